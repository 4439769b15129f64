// Every query sees every key: sums over all keys, then rows that read them, and the same way back.

#pragma once

#include "blocks.h"

namespace clip_la {

// S, z and kappa of a segment.
template <class T, class Engine>
void sum_keys(const Problem& p, const Task& task, const Scratch& scratch, const Engine& engine,
              const Sums& sums, bool norms_known) {
    float *K = scratch.block(0), *V = scratch.block(1);
    for_each_block(segment_tokens(p.M, p.num_segments, task.segment), p.block(),
                   [&](int64_t first, int count) {
                       load_unit_block<T>(p, p.k, p.M, p.k_norm, norms_known, task, first, count, K);
                       load_block<T>(p, p.v, p.M, task, first, count, p.E, V);
                       add_to_sums(p, engine, sums, K, V, nullptr, count);
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
void read_sums(const Problem& p, const Task& task, const Scratch& scratch, const Engine& engine,
               const Sums& sums) {
    const int D = p.padded_D(), E = p.padded_E();
    const float gain = p.gain_of(task.h);
    float *Q = scratch.block(0), *numerator = scratch.block(1), *S = scratch.state(0);
    for (int i = 0; i < D * E; i += kLanes) store(S + i, gain * load(sums.S + i));
    const auto right = engine.pack_right(S, D, E, 0);
    for_each_block(segment_tokens(p.N, p.num_segments, task.segment), p.block(),
                   [&](int64_t first, int count) {
                       float cosine_sums[kMaxBlock];
                       prefetch_rows<T, true>(p.out, task, first, count, p.E);
                       load_unit_block<T>(p, p.q, p.N, p.q_norm, false, task, first, count, Q);
                       engine.product(padded(count, kTileRows), Q, right, numerator);
                       if (p.has_denominator)
                           for (int row = 0; row < count; ++row)
                               cosine_sums[row] = dot(Q + row * D, sums.kappa, D);
                       write_out_block<T>(p, task, first, count, numerator, sums.z, cosine_sums);
                   });
}

// dq and the segment's part of dS, dz, dkappa and dgain, from the S and kappa that forward kept.
template <class T, class Engine>
void backward_queries(const Problem& p, const Task& task, const Scratch& scratch, const Engine& engine,
                      const Sums& later) {
    const int D = p.padded_D(), E = p.padded_E();
    const float w = p.constant_weight(), slope = w * p.gain_of(task.h);
    float *Q = scratch.block(0), *G = scratch.block(1), *dQ = scratch.block(2), *S_T = scratch.state(1);
    float kappa[kMaxWidth];
    load_state(p, task, scratch.state(0), kappa);
    transpose(scratch.state(0), D, E, S_T, D);
    const auto right = engine.pack_right(S_T, E, D, 0);
    float dgain = 0;
    for_each_block(segment_tokens(p.N, p.num_segments, task.segment), p.block(),
                   [&](int64_t first, int count) {
                       float delta[kMaxBlock];
                       prefetch_rows<T, true>(p.dq, task, first, count, p.D);
                       load_unit_block<T>(p, p.q, p.N, p.q_norm, true, task, first, count, Q);
                       load_gradient_block<T>(p, task, first, count, G, delta);
                       engine.product(padded(count, kTileRows), G, right, dQ);
                       for (int row = 0; row < count; ++row) {
                           if (p.dgain) dgain += dot(Q + row * D, dQ + row * D, D);
                           scale_row(dQ + row * D, slope, D);
                           if (p.has_denominator) add_row(dQ + row * D, delta[row], kappa, D);
                       }
                       write_through_norm<T>(p, p.dq, p.q_norm, task, first, count, Q, dQ);
                       add_to_sums(p, engine, later, Q, G, delta, count);
                   });
    if (p.dgain) p.dgain[(task.b * p.H + task.h) * p.num_segments + task.segment] = w * dgain;
}

// dk and dv, from dS, dz and dkappa over all queries.
template <class T, class Engine>
void backward_keys(const Problem& p, const Task& task, const Scratch& scratch, const Engine& engine,
                   const Sums& sums) {
    const int D = p.padded_D(), E = p.padded_E();
    const float w = p.constant_weight(), slope = w * p.gain_of(task.h);
    float *K = scratch.block(0), *V = scratch.block(1), *dK = scratch.block(2), *dV = scratch.block(3);
    float *dS = scratch.state(0), *dS_T = scratch.state(1);
    for (int i = 0; i < D * E; i += kLanes) store(dS + i, slope * load(sums.S + i));
    transpose(dS, D, E, dS_T, D);
    const auto right = engine.pack_right(dS, D, E, 0), right_T = engine.pack_right(dS_T, E, D, 1);
    for_each_block(segment_tokens(p.M, p.num_segments, task.segment), p.block(),
                   [&](int64_t first, int count) {
                       const int rows = padded(count, kTileRows);
                       prefetch_rows<T, true>(p.dk, task, first, count, p.D);
                       prefetch_rows<T, true>(p.dv, task, first, count, p.E);
                       load_unit_block<T>(p, p.k, p.M, p.k_norm, true, task, first, count, K);
                       load_block<T>(p, p.v, p.M, task, first, count, p.E, V);
                       engine.product(rows, V, right_T, dK);
                       engine.product(rows, K, right, dV);
                       for (int row = 0; row < count; ++row) {
                           if (p.has_denominator) add_row(dK + row * D, 1, sums.kappa, D);
                           add_row(dV + row * E, w, sums.z, E);
                       }
                       write_through_norm<T>(p, p.dk, p.k_norm, task, first, count, K, dK);
                       write_block<T>(p.dv, task, first, count, p.E, dV);
                   });
}

}  // namespace clip_la
