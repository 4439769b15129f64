// Query i sees keys 0..i: a masked tile for the keys of its own block, sums over all earlier blocks.
//
// With L the lower triangle of ones, in a block: A = L (1 + gain Q^ K^^T), B = L (G V^T),
//     numerator = A V + gain Q^ S + z          dQ^ = w gain (B K^ + G S^T) + delta kappa
//     dV = w (A^T G + gain K^ dS + dz)         dK^ = (w gain B + L delta)^T Q^ + w gain V dS^T + dkappa
// where S, z and kappa are of the keys before (kappa: and up to i), dS, dz and dkappa of the queries after.

#pragma once

#include "full.h"

namespace clip_la {

// tile = x y^T (rows `stride` apart), its tiles above the diagonal left out. y_T is y transposed, (k x
// stride).
inline void lower_tile(int rows, int k, const float* x, const float* y_T, float* tile, int stride) {
    for (int i = 0; i < rows; i += kTileRows)
        multiply<false>(kTileRows, padded(i + kTileRows, kLanes), k, plain(x + i * k, k), y_T, stride,
                        tile + i * stride, stride);
}

// Each element on or below the diagonal becomes slope x + offset(row), those beside it 0.
template <class Offset>
void mask_tile(float* tile, int stride, int count, float slope, Offset offset) {
    for (int i = 0; i < count; ++i) {
        float* row = tile + i * stride;
        const float shift = offset(i);
        for (int j = 0; j <= i; ++j) row[j] = slope * row[j] + shift;
        for (int j = i + 1; j < padded(i + 1, kTileRows); ++j) row[j] = 0;
    }
}

// to += L x, and to += L^T x, of a masked tile L and x (rows x width).
inline void add_lower(const float* tile, int stride, int rows, const float* x, int width, float* to) {
    for (int i = 0; i < rows; i += kTileRows)
        multiply<true>(kTileRows, width, i + kTileRows, plain(tile + i * stride, stride), x, width,
                       to + i * width, width);
}

inline void add_lower_transposed(const float* tile, int stride, int rows, int count, const float* x,
                                 int width, float* to) {
    for (int j = 0; j < rows; j += kTileRows)
        multiply<true>(kTileRows, width, count - j, transposed(tile + j * stride + j, stride), x + j * width,
                       width, to + j * width, width);
}

// q^_i.kappa_i, with kappa_i the sum of the unit keys 0..i, of which `earlier` holds those before the block.
inline void sum_cosines(const float* Q, const float* K, const float* earlier, int count, int D,
                        float* cosine_sums) {
    float inside[kMaxWidth] = {};
    for (int i = 0; i < count; ++i) {
        add_row(inside, 1, K + i * D, D);
        cosine_sums[i] = dot(Q + i * D, inside, D) + dot(Q + i * D, earlier, D);
    }
}

// Sums of unit rows, which is what causal blocks hold.
inline void add_unit_rows(const Problem& p, const Scratch& scratch, const Sums& sums, const float* a,
                          const float* b, const float* weights, int count) {
    const float* ones = kOnes.data();
    add_to_sums(p, VectorEngine(scratch), sums, {a, ones}, {b, ones}, weights, count);
}

// Out and norms of a segment. `earlier` are the sums before it, and after it when done.
template <class T>
void forward_segment(const Problem& p, const Heads& heads, const Scratch& scratch, const HeadSums& earlier) {
    const int D = p.padded_D(), E = p.padded_E(), stride = p.block();
    float *Q = scratch.block(0), *K = scratch.block(1), *V = scratch.block(2), *K_T = scratch.block(3);
    float *A = scratch.block(4), *numerator = scratch.block(5);
    for_each_block(p, p.N, heads, [&](int64_t i, const Task& task, int64_t first, int count) {
        const int rows = padded(count, kTileRows);
        const float gain = p.gain_of(task.h);
        float cosine_sums[kMaxBlock];
        load_unit_block<T>(p, p.q, p.q_norm, false, task, first, count, Q);
        load_unit_block<T>(p, p.k, p.k_norm, false, task, first, count, K);
        load_block<T>(p.v, task, first, count, p.E, V);
        if (first > 0) {
            multiply<false>(rows, E, D, plain(Q, D), earlier[i].S, E, numerator, E);
            scale_row(numerator, gain, rows * E);
        } else {
            memset(numerator, 0, sizeof(float) * rows * E);
        }
        transpose(K, count, D, K_T, stride);
        lower_tile(rows, D, Q, K_T, A, stride);
        if (p.has_denominator) sum_cosines(Q, K, earlier[i].kappa, count, D, cosine_sums);
        mask_tile(A, stride, count, gain, [](int) { return 1.0f; });
        add_lower(A, stride, rows, V, E, numerator);
        write_out_block<T>(p, task, first, count, numerator, kOnes.data(), earlier[i].z, cosine_sums);
        if (first + count < p.N) add_unit_rows(p, scratch, earlier[i], K, V, kOnes.data(), count);
    });
}

// What both backward passes read of a block.
struct CausalBlock {
    float *Q, *K, *V, *G;
    float delta[kMaxBlock];

    explicit CausalBlock(const Scratch& scratch)
        : Q(scratch.block(0)), K(scratch.block(1)), V(scratch.block(2)), G(scratch.block(3)) {}

    template <class T>
    void load(const Problem& p, const Task& task, int64_t first, int count) {
        load_unit_block<T>(p, p.q, p.q_norm, true, task, first, count, Q);
        load_unit_block<T>(p, p.k, p.k_norm, true, task, first, count, K);
        load_block<T>(p.v, task, first, count, p.E, V);
        load_scaled_gradient_block<T>(p, task, first, count, G, delta);
    }
};

// dq and the segment's part of dgain, from the first block to the last. Its sums hold S^T, not S.
template <class T>
void backward_queries_segment(const Problem& p, const Heads& heads, const Scratch& scratch,
                              const HeadSums& earlier) {
    const int D = p.padded_D(), E = p.padded_E(), stride = p.block();
    const float w = p.constant_weight();
    CausalBlock x(scratch);
    float *V_T = scratch.block(4), *B = scratch.block(5), *dQ = scratch.block(6), dgain[kMaxHeads] = {};
    for (int64_t i = 0; i < heads.count; ++i) transpose(earlier[i].S, D, E, scratch.packed_state(i, 0), D);
    for_each_block(p, p.N, heads, [&](int64_t i, const Task& task, int64_t first, int count) {
        const int rows = padded(count, kTileRows);
        float *S_T = scratch.packed_state(i, 0), *kappa = earlier[i].kappa;
        x.load<T>(p, task, first, count);
        transpose(x.V, count, E, V_T, stride);
        lower_tile(rows, E, x.G, V_T, B, stride);
        mask_tile(B, stride, count, 1, [](int) { return 0.0f; });
        if (first > 0)
            multiply<false>(rows, D, E, plain(x.G, E), S_T, D, dQ, D);
        else
            memset(dQ, 0, sizeof(float) * rows * D);
        add_lower(B, stride, rows, x.K, D, dQ);
        for (int row = 0; row < count; ++row) {
            if (p.dgain) dgain[i] += dot(x.Q + row * D, dQ + row * D, D);
            scale_row(dQ + row * D, w * p.gain_of(task.h), D);
            if (!p.has_denominator) continue;
            add_row(kappa, 1, x.K + row * D, D);
            add_row(dQ + row * D, x.delta[row], kappa, D);
        }
        write_through_norm<T>(p, p.dq, p.q_norm, task, first, count, x.Q, kOnes.data(), dQ);
        if (first + count < p.N) multiply<true>(E, D, count, transposed(x.V, E), x.K, D, S_T, D);
    });
    write_gain_gradients(p, heads, dgain);
}

// dk and dv of a segment, from the last block to the first. `later` are the sums after it.
template <class T>
void backward_keys_segment(const Problem& p, const Heads& heads, const Scratch& scratch,
                           const HeadSums& later) {
    const int D = p.padded_D(), E = p.padded_E(), stride = p.block();
    const float w = p.constant_weight();
    CausalBlock x(scratch);
    float *y_T = scratch.block(4), *tile = scratch.block(5), *dK = scratch.block(6), *dV = scratch.block(7);
    float* dS_T = scratch.state(0);
    for_each_block_backwards(p, p.N, heads, [&](int64_t i, const Task& task, int64_t first, int count) {
        const int rows = padded(count, kTileRows);
        const float slope = w * p.gain_of(task.h);
        x.load<T>(p, task, first, count);
        if (first + count < p.N) {
            transpose(later[i].S, D, E, dS_T, D);
            multiply<false>(rows, D, E, plain(x.V, E), dS_T, D, dK, D);
            multiply<false>(rows, E, D, plain(x.K, D), later[i].S, E, dV, E);
        } else {
            memset(dK, 0, sizeof(float) * rows * D);
            memset(dV, 0, sizeof(float) * rows * E);
        }
        for (int row = 0; row < count; ++row) {
            scale_row(dK + row * D, slope, D);
            scale_row(dV + row * E, slope, E);
            if (p.has_denominator) add_row(dK + row * D, 1, later[i].kappa, D);
            add_row(dV + row * E, w, later[i].z, E);
        }
        transpose(x.K, count, D, y_T, stride);
        lower_tile(rows, D, x.Q, y_T, tile, stride);
        mask_tile(tile, stride, count, slope, [=](int) { return w; });
        add_lower_transposed(tile, stride, rows, count, x.G, E, dV);
        transpose(x.V, count, E, y_T, stride);
        lower_tile(rows, E, x.G, y_T, tile, stride);
        mask_tile(tile, stride, count, slope, [&](int row) { return x.delta[row]; });
        add_lower_transposed(tile, stride, rows, count, x.Q, D, dK);
        write_through_norm<T>(p, p.dk, p.k_norm, task, first, count, x.K, kOnes.data(), dK);
        write_block<T>(p, p.dv, task, first, count, p.E, dV);
        if (first > 0) add_unit_rows(p, scratch, later[i], x.Q, x.G, x.delta, count);
    });
}

// dS, dz and dkappa of a segment.
template <class T>
void sum_queries(const Problem& p, const Heads& heads, const Scratch& scratch, const HeadSums& sums) {
    float *Q = scratch.block(0), *G = scratch.block(1);
    for_each_block(p, p.N, heads, [&](int64_t i, const Task& task, int64_t first, int count) {
        float delta[kMaxBlock];
        load_unit_block<T>(p, p.q, p.q_norm, true, task, first, count, Q);
        load_scaled_gradient_block<T>(p, task, first, count, G, delta);
        add_unit_rows(p, scratch, sums[i], Q, G, delta, count);
    });
}

}  // namespace clip_la
