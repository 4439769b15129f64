// Every query sees every key: sums over all keys, then rows that read them, and the same way back.
//
// If v_n less the mean of the M values is to take the place of v_n, S is the same for v_n - c as for v_n:
//     S = sum k^_n (v_n - c)^T - kappa z^T / M,    z = sum (v_n - c)
// and 0 then takes the place of z. With c, the mean of the first block, near that of all, no engine's rounding
// is large beside what is left. Backward, constant rows take the place of dkappa and dz:
//     dk^_n = w gain (dS v_n - dS mean),    dv_n = w gain (dS^T k^_n - dS^T kappa / M)

#pragma once

#include "blocks.h"

namespace clip_la {

// The mean of the head's first block of values.
template <class T>
void first_mean(const Problem& p, const Task& task, float* V, float* mean) {
    const int count = int(std::min<int64_t>(p.M, kBlock)), E = p.padded_E();
    load_block<T>(p.v, task, 0, count, p.E, V);
    std::fill_n(mean, E, 0.0f);
    add_rows(mean, kOnes.data(), V, count, E);
    scale_row(mean, 1.0f / std::max(count, 1), E);
}

// S, z and kappa of a segment. Values to be centred come in less their `first_mean`, which is kept as theirs.
template <class T, class Engine>
void sum_keys(const Problem& p, const Heads& heads, const Scratch& scratch, const Engine& engine,
              const HeadSums& sums, bool norms_known) {
    const int D = p.padded_D(), E = p.padded_E();
    float *K = scratch.block(0), *V = scratch.block(1);
    float c[kMaxHeads][kMaxWidth];
    for (int64_t i = 0; p.centre_values && i < heads.count; ++i) {
        first_mean<T>(p, heads.task(i), V, c[i]);
        if (heads.segment == 0) store_row(c[i], p.E, p.value_mean + head_number(p, heads.task(i)) * p.E);
    }
    for_each_block(p, p.M, heads, [&](int64_t i, const Task& task, int64_t first, int count) {
        float factors[kMaxBlock];
        load_with_factors<T>(p, p.k, p.k_norm, norms_known, task, first, count, K, factors);
        load_block<T>(p.v, task, first, count, p.E, V);
        if (p.centre_values) {
            for (int row = 0; row < count; ++row) add_row(V + row * E, -1, c[i], E);
            add_rows(sums[i].kappa, factors, K, count, D);
        }
        add_to_sums(p, engine, sums[i], {K, factors}, {V, kOnes.data()}, kOnes.data(), count);
    });
}

// From sums over v_n - c to those over v_n less the mean, which is kept.
inline void centre_sums(const Problem& p, const Task& task, const Sums& sums) {
    const int E = p.padded_E();
    float mean[kMaxWidth], *kept = p.value_mean + head_number(p, task) * p.E;
    load_row(kept, p.E, mean, E);
    scale_row(sums.z, p.inverse_M(), E);
    for (int64_t d = 0; d < p.D; ++d) add_row(sums.S + d * E, -sums.kappa[d], sums.z, E);
    add_row(mean, 1, sums.z, E);
    store_row(mean, p.E, kept);
    std::fill_n(sums.z, E, 0.0f);
}

// dS, dz and dkappa over all queries: of centred values, the last two become the rows that take their place.
inline void finish_gradients(const Problem& p, const Task& task, const Sums& sums) {
    if (!p.centre_values) return;
    const int D = p.padded_D(), E = p.padded_E();
    const int64_t head = head_number(p, task);
    const float gain = p.gain_of(task.h);
    float kappa[kMaxWidth], mean[kMaxWidth];
    load_row(p.key_sum + head * p.D, p.D, kappa, D);
    load_row(p.value_mean + head * p.E, p.E, mean, E);
    row_dots(sums.S, mean, 0, D, E, sums.kappa);
    scale_row(sums.kappa, -p.scale * gain, D);
    std::fill_n(sums.z, E, 0.0f);
    add_rows(sums.z, kappa, sums.S, D, E);
    scale_row(sums.z, -gain * p.inverse_M(), E);
}

// Sums over all keys: centred if they are to be, and S and kappa kept for backward.
inline void finish_sums(const Problem& p, const Task& task, const Sums& sums) {
    if (p.centre_values) centre_sums(p, task, sums);
    const int64_t head = head_number(p, task);
    for (int64_t d = 0; d < p.D; ++d)
        store_row(sums.S + d * p.padded_E(), p.E, p.state + (head * p.D + d) * p.E);
    if (p.key_sum) store_row(sums.kappa, p.D, p.key_sum + head * p.D);
}

inline void load_state(const Problem& p, const Task& task, float* S, float* kappa) {
    const int64_t head = head_number(p, task);
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
            if (p.has_denominator || p.centre_values) add_row(dK + row * D, 1, sums[i].kappa, D);
            scale_row(dV + row * E, factors[row], E);
            add_row(dV + row * E, w, sums[i].z, E);
        }
        write_through_norm<T>(p, p.dk, p.k_norm, task, first, count, K, factors, dK);
        write_block<T>(p, p.dv, task, first, count, p.E, dV);
    });
}

}  // namespace clip_la
