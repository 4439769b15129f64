// Every query sees every key: sums over all keys, then rows that read them, and the same way back.

#pragma once

#include "blocks.h"

namespace clip_la {

// S, z and kappa of a segment.
template <class T, class Engine>
void sum_keys(const Problem& p, const Heads& heads, const Scratch& scratch, const Engine& engine,
              const HeadSums& sums, bool norms_known) {
    float *K = scratch.block(0), *V = scratch.block(1);
    for_each_block(p, p.M, heads, [&](int64_t i, const Task& task, int64_t first, int count) {
        float factors[kMaxBlock];
        load_with_factors<T>(p, p.k, p.k_norm, norms_known, task, first, count, K, factors);
        load_block<T>(p.v, task, first, count, p.E, V);
        add_to_sums(p, engine, sums[i], {K, factors}, {V, kOnes.data()}, kOnes.data(), count);
    });
}

// S and kappa over all keys, for backward.
inline void save_state(const Problem& p, const Task& task, const Sums& sums) {
    const int64_t head = task.b * p.H + task.h;
    for (int64_t d = 0; d < p.D; ++d)
        store_row(sums.S + d * p.padded_E(), p.E, p.state + (head * p.D + d) * p.E);
    if (p.has_denominator) store_row(sums.kappa, p.D, p.key_sum + head * p.D);
}

inline void load_state(const Problem& p, const Task& task, float* S, float* kappa) {
    const int64_t head = task.b * p.H + task.h;
    memset(S, 0, sizeof(float) * p.padded_D() * p.padded_E());
    for (int64_t d = 0; d < p.D; ++d)
        load_row(p.state + (head * p.D + d) * p.E, p.E, S + d * p.padded_E(), p.padded_E());
    if (p.has_denominator) load_row(p.key_sum + head * p.D, p.D, kappa, p.padded_D());
}

// Out of S, z and kappa over all keys.
template <class T, class Engine>
void read_sums(const Problem& p, const Heads& heads, const Scratch& scratch, const Engine& engine,
               const HeadSums& sums) {
    const int D = p.padded_D(), E = p.padded_E();
    float *Q = scratch.block(0), *numerator = scratch.block(1), *S = scratch.state(0);
    typename Engine::Right right[kMaxHeads];
    for (int64_t i = 0; i < heads.count; ++i) {
        copy_scaled(sums[i].S, p.gain_of(heads.first + i), S, D * E);
        right[i] = engine.pack_right(S, D, E, scratch.packed_state(i, 0));
    }
    for_each_block(p, p.N, heads, [&](int64_t i, const Task& task, int64_t first, int count) {
        float factors[kMaxBlock], cosine_sums[kMaxBlock];
        load_with_factors<T>(p, p.q, p.q_norm, false, task, first, count, Q, factors);
        engine.product(count, Q, right[i], numerator);
        if (p.has_denominator) {
            row_dots(Q, sums[i].kappa, 0, count, D, cosine_sums);
            for (int row = 0; row < count; ++row) cosine_sums[row] *= factors[row];
        }
        write_out_block<T>(p, task, first, count, numerator, factors, sums[i].z, cosine_sums);
    });
}

// dgain of a segment, from sum q^_i.t_i.
inline void write_gain_gradients(const Problem& p, const Heads& heads, const float* sums) {
    for (int64_t i = 0; p.dgain && i < heads.count; ++i)
        p.dgain[(heads.b * p.H + heads.first + i) * p.num_segments + heads.segment] =
            p.constant_weight() * sums[i];
}

// dq and the segment's part of dS, dz, dkappa and dgain, from the S and kappa that forward kept.
template <class T, class Engine>
void backward_queries(const Problem& p, const Heads& heads, const Scratch& scratch, const Engine& engine,
                      const HeadSums& later) {
    const int D = p.padded_D(), E = p.padded_E();
    const float w = p.constant_weight();
    float *Q = scratch.block(0), *G = scratch.block(1), *dQ = scratch.block(2);
    float kappa[kMaxHeads][kMaxWidth], dgain[kMaxHeads] = {};
    typename Engine::Right right[kMaxHeads];
    for (int64_t i = 0; i < heads.count; ++i) {
        load_state(p, heads.task(i), scratch.state(0), kappa[i]);
        transpose(scratch.state(0), D, E, scratch.state(1), D);
        right[i] = engine.pack_right(scratch.state(1), E, D, scratch.packed_state(i, 0));
    }
    for_each_block(p, p.N, heads, [&](int64_t i, const Task& task, int64_t first, int count) {
        float q_factors[kMaxBlock], G_factors[kMaxBlock], delta[kMaxBlock];
        load_with_factors<T>(p, p.q, p.q_norm, true, task, first, count, Q, q_factors);
        load_gradient_block<T>(p, task, first, count, G, G_factors, delta);
        engine.product(count, G, right[i], dQ);
        for (int row = 0; row < count; ++row) {
            if (p.dgain) dgain[i] += q_factors[row] * dot(Q + row * D, dQ + row * D, D);
            scale_row(dQ + row * D, w * p.gain_of(task.h) * G_factors[row], D);
            if (p.has_denominator) add_row(dQ + row * D, delta[row], kappa[i], D);
        }
        write_through_norm<T>(p, p.dq, p.q_norm, task, first, count, Q, q_factors, dQ);
        add_to_sums(p, engine, later[i], {Q, q_factors}, {G, G_factors}, delta, count);
    });
    write_gain_gradients(p, heads, dgain);
}

// dk and dv, from dS, dz and dkappa over all queries.
template <class T, class Engine>
void backward_keys(const Problem& p, const Heads& heads, const Scratch& scratch, const Engine& engine,
                   const HeadSums& sums) {
    const int D = p.padded_D(), E = p.padded_E();
    const float w = p.constant_weight();
    float *K = scratch.block(0), *V = scratch.block(1), *dK = scratch.block(2), *dV = scratch.block(3);
    float *dS = scratch.state(0), *dS_T = scratch.state(1);
    typename Engine::Right right[kMaxHeads], right_T[kMaxHeads];
    for (int64_t i = 0; i < heads.count; ++i) {
        copy_scaled(sums[i].S, w * p.gain_of(heads.first + i), dS, D * E);
        transpose(dS, D, E, dS_T, D);
        right[i] = engine.pack_right(dS, D, E, scratch.packed_state(i, 0));
        right_T[i] = engine.pack_right(dS_T, E, D, scratch.packed_state(i, 1));
    }
    for_each_block(p, p.M, heads, [&](int64_t i, const Task& task, int64_t first, int count) {
        float factors[kMaxBlock];
        load_with_factors<T>(p, p.k, p.k_norm, true, task, first, count, K, factors);
        load_block<T>(p.v, task, first, count, p.E, V);
        engine.product(count, V, right_T[i], dK);
        engine.product(count, K, right[i], dV);
        for (int row = 0; row < count; ++row) {
            if (p.has_denominator) add_row(dK + row * D, 1, sums[i].kappa, D);
            scale_row(dV + row * E, factors[row], E);
            add_row(dV + row * E, w, sums[i].z, E);
        }
        write_through_norm<T>(p, p.dk, p.k_norm, task, first, count, K, factors, dK);
        write_block<T>(p, p.dv, task, first, count, p.E, dV);
    });
}

}  // namespace clip_la
