// Reading blocks of q, k, v and dout in the form that the sums take them, and writing results and gradients.
//
// Both equations are out_i = w_i (gain q^_i.S + z) with sums S, z over the keys that i sees, where w_i is w,
// Eq. 7's scale, or 1 over Eq. 4's denominator, and w = 1. G_i = w_i / w dout_i, and delta_i is the gradient
// of Eq. 4's denominator. With t_i = S G_i, dq^_i = w gain t_i + delta_i kappa, and dgain = w sum q^_i.t_i.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "engines.h"

namespace clip_la {

template <class T>
void prefetch_row(const T* row, int64_t width) {
    for (int64_t byte = 0; byte < int64_t(sizeof(T)) * width; byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(row) + byte);
}

// A block of a tensor. The next head's, which comes next, is fetched.
template <class T>
void load_block(const Tensor& x, const Task& task, int64_t first, int count, int64_t width, float* block) {
    const int stride = padded(width, kLanes);
    for (int row = 0; row < count; ++row) {
        const T* from = x.row<T>(task.b, task.h, first + row);
        prefetch_row(from + x.head, width);
        load_row(from, width, block + row * stride, stride);
    }
    memset(block + count * stride, 0, sizeof(float) * stride * (padded(count, kPaddedRows) - count));
}

inline const std::array<float, kMaxBlock> kOnes = [] {
    std::array<float, kMaxBlock> ones;
    ones.fill(1);
    return ones;
}();

// The norms of rows of q or k: read where they are known, else computed and kept.
inline void find_norms(const Problem& p, const Tensor& kept, bool known, const Task& task, int64_t first,
                       int count, const float* rows, float* norms) {
    const int padded_count = padded(count, kPaddedRows);
    if (!known) {
        row_dots(rows, rows, p.padded_D(), padded_count, p.padded_D(), norms);
        for (int row = 0; row < padded_count; ++row) norms[row] = std::sqrt(norms[row]);
    }
    for (int row = 0; row < count; ++row) {
        float* norm = kept.row<float>(task.b, task.h, first + row);
        if (known)
            norms[row] = *norm;
        else
            *norm = norms[row];
    }
}

// A block of q or k as it is, and the factors that make its rows unit rows.
template <class T>
void load_with_factors(const Problem& p, const Tensor& x, const Tensor& norms, bool norms_known,
                       const Task& task, int64_t first, int count, float* block, float* factors) {
    load_block<T>(x, task, first, count, p.D, block);
    const int padded_count = padded(count, kPaddedRows);
    std::fill_n(factors, padded_count, 1.0f);
    if (!p.normalise) return;
    find_norms(p, norms, norms_known, task, first, count, block, factors);
    for (int row = 0; row < padded_count; ++row)
        factors[row] = 1 / (factors[row] < p.norm_floor ? p.norm_floor : factors[row]);
}

// Unit rows of q or k.
template <class T>
void load_unit_block(const Problem& p, const Tensor& x, const Tensor& norms, bool norms_known,
                     const Task& task, int64_t first, int count, float* block) {
    float factors[kMaxBlock];
    load_with_factors<T>(p, x, norms, norms_known, task, first, count, block, factors);
    const int D = p.padded_D();
    for (int row = 0; row < count; ++row) scale_row(block + row * D, factors[row], D);
}

inline float floored(float denominator, float floor) {
    if (std::fabs(denominator) >= floor || denominator != denominator) return denominator;
    return denominator < 0 ? -floor : floor;
}

// dout, the factors that make it G, and delta: in Eq. 4 from what forward kept.
template <class T>
void load_gradient_block(const Problem& p, const Task& task, int64_t first, int count, float* dout,
                         float* factors, float* delta) {
    load_block<T>(p.dout, task, first, count, p.E, dout);
    std::fill_n(factors, padded(count, kPaddedRows), 1.0f);
    std::fill_n(delta, count, 0.0f);
    if (!p.has_denominator) return;
    const int E = p.padded_E();
    for (int row = 0; row < count; ++row) {
        const float denominator = *p.denominator.row<float>(task.b, task.h, first + row);
        factors[row] = 1 / floored(denominator, p.denominator_floor);
        if (std::fabs(denominator) < p.denominator_floor) continue;
        float out[kMaxWidth];
        load_row(p.exact_out.row<const float>(task.b, task.h, first + row), p.E, out, E);
        delta[row] = -factors[row] * dot(dout + row * E, out, E);
    }
}

// G itself.
template <class T>
void load_scaled_gradient_block(const Problem& p, const Task& task, int64_t first, int count, float* G,
                                float* delta) {
    float factors[kMaxBlock];
    load_gradient_block<T>(p, task, first, count, G, factors, delta);
    if (!p.has_denominator) return;
    const int E = p.padded_E();
    for (int row = 0; row < count; ++row) scale_row(G + row * E, factors[row], E);
}

// Whether results go around the caches: those that no second-level cache holds, if their rows are whole
// lines. Else each line would be read before it is overwritten.
template <class T>
bool is_streamed(const Problem& p, const Tensor& x, int64_t length, int64_t width) {
    constexpr int64_t kCached = 1 << 20, kLine = 64;
    const int64_t bytes = p.B * p.H * length * width * sizeof(T);
    const int64_t strides = (x.batch | x.head | x.token | width) * sizeof(T);
    return bytes > kCached && (strides | reinterpret_cast<intptr_t>(x.data)) % kLine == 0;
}

template <class T>
void write_row(const float* from, int64_t width, T* to, bool streamed) {
    streamed ? stream_row(from, int(width), to) : store_row(from, int(width), to);
}

// out_i = w_i (factor_i numerator_i + z), with w from the cosine sums sum_n q^_i.k^_n in Eq. 4.
template <class T>
void write_out_block(const Problem& p, const Task& task, int64_t first, int count, float* numerator,
                     const float* factors, const float* z, const float* cosine_sums) {
    const int E = p.padded_E();
    const bool streamed = is_streamed<T>(p, p.out, p.N, p.E);
    for (int row = 0; row < count; ++row) {
        const int64_t n = first + row;
        float weight = p.scale;
        if (p.has_denominator) {
            const float denominator = *p.num_keys.row<float>(task.b, task.h, n) + cosine_sums[row];
            *p.denominator.row<float>(task.b, task.h, n) = denominator;
            weight = 1 / floored(denominator, p.denominator_floor);
        }
        float* out = numerator + row * E;
        for (int column = 0; column < E; column += kLanes)
            store(out + column, (load(out + column) * factors[row] + load(z + column)) * weight);
        if (p.exact_out.data) store_row(out, p.E, p.exact_out.row<float>(task.b, task.h, n));
        write_row(out, p.E, p.out.row<T>(task.b, task.h, n), streamed);
    }
}

// dx = (dx^ - x^ (x^.dx^)) / |x|, where x^ = factor x; below the floor dx^ / floor.
template <class T>
void write_through_norm(const Problem& p, const Tensor& dx, const Tensor& norms, const Task& task,
                        int64_t first, int count, const float* x, const float* factors, float* dunit) {
    const int D = p.padded_D();
    const bool streamed = is_streamed<T>(p, dx, p.M, p.D);
    float dots[kMaxBlock];
    if (p.normalise) row_dots(x, dunit, D, count, D, dots);
    for (int row = 0; row < count; ++row) {
        float* d = dunit + row * D;
        if (p.normalise) {
            const float norm = *norms.row<const float>(task.b, task.h, first + row);
            const bool floored = norm < p.norm_floor;
            const float along = floored ? 0 : -factors[row] * factors[row] * dots[row];
            const float inverse = 1 / (floored ? p.norm_floor : norm);
            for (int column = 0; column < D; column += kLanes)
                store(d + column, (load(d + column) + along * load(x + row * D + column)) * inverse);
        }
        write_row(d, p.D, dx.row<T>(task.b, task.h, first + row), streamed);
    }
}

template <class T>
void write_block(const Problem& p, const Tensor& x, const Task& task, int64_t first, int count, int64_t width,
                 const float* block) {
    const int stride = padded(width, kLanes);
    const bool streamed = is_streamed<T>(p, x, p.M, width);
    for (int row = 0; row < count; ++row)
        write_row(block + row * stride, width, x.row<T>(task.b, task.h, first + row), streamed);
}

// Rows as they were read, and the factors that make them what the sums take.
struct Rows {
    const float *x, *factors;
};

// S += a^T b, z += sum of b, and, with a denominator, kappa += sum of weight_i a_i.
template <class Engine>
void add_to_sums(const Problem& p, const Engine& engine, const Sums& sums, Rows a, Rows b,
                 const float* weights, int count) {
    const int D = p.padded_D(), E = p.padded_E();
    float factors[kMaxBlock];
    for (int row = 0; row < padded(count, kPaddedRows); ++row) factors[row] = a.factors[row] * b.factors[row];
    engine.add_outer(count, D, E, a.x, factors, b.x, sums.S);
    add_rows(sums.z, b.factors, b.x, count, E);
    if (!p.has_denominator) return;
    for (int row = 0; row < count; ++row) factors[row] = a.factors[row] * weights[row];
    add_rows(sums.kappa, factors, a.x, count, D);
}

}  // namespace clip_la
