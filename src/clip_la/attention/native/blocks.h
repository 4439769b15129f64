// Reading blocks of q, k, v and dout in the form that the sums take them, and writing results and gradients.
//
// Both equations are out_i = w_i (gain q^_i.S + z) with sums S, z over the keys that i sees, where w_i is w,
// Eq. 7's scale, or 1 over Eq. 4's denominator, and w = 1. G_i = w_i / w dout_i, and delta_i is the gradient
// of Eq. 4's denominator. With t_i = S G_i, dq^_i = w gain t_i + delta_i kappa, and dgain = w sum q^_i.t_i.

#pragma once

#include <cmath>

#include "engines.h"

namespace clip_la {

// Rows lie far apart in a packed projection, so that the CPU doesn't foresee the next ones by itself. kWrite:
// they are about to be written.
template <class T, bool kWrite>
void prefetch_row(const T* row, int64_t width) {
    for (int64_t byte = 0; byte < int64_t(sizeof(T)) * width; byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, kWrite, 2);
}

template <class T, bool kWrite>
void prefetch_rows(const Tensor& x, const Task& task, int64_t first, int count, int64_t width) {
    for (int row = 0; row < count; ++row)
        prefetch_row<T, kWrite>(x.row<const T>(task.b, task.h, first + row), width);
}

// A block of a tensor of `length` tokens. The rows one block ahead are fetched: after the last ones, the next
// head's.
template <class T>
void load_block(const Problem& p, const Tensor& x, int64_t length, const Task& task, int64_t first, int count,
                int64_t width, float* block) {
    const int stride = padded(width, kLanes);
    const int64_t next_b = task.h + 1 < p.H ? task.b : task.b + 1, next_h = task.h + 1 < p.H ? task.h + 1 : 0;
    for (int row = 0; row < count; ++row) {
        const int64_t n = first + row, ahead = n + kBlock;
        if (ahead < length)
            prefetch_row<T, false>(x.row<const T>(task.b, task.h, ahead), width);
        else
            prefetch_row<T, false>(x.row<const T>(next_b, next_h, ahead - length), width);
        load_row(x.row<const T>(task.b, task.h, n), width, block + row * stride, stride);
    }
    memset(block + count * stride, 0, sizeof(float) * stride * (padded(count, kTileRows) - count));
}

// Unit rows of q or k, whose norms are written to `norms` where they aren't known yet.
template <class T>
void load_unit_block(const Problem& p, const Tensor& x, int64_t length, const Tensor& norms, bool norms_known,
                     const Task& task, int64_t first, int count, float* block) {
    load_block<T>(p, x, length, task, first, count, p.D, block);
    if (!p.normalise) return;
    const int D = p.padded_D();
    for (int row = 0; row < count; ++row) {
        float* x_row = block + row * D;
        float* norm = norms.row<float>(task.b, task.h, first + row);
        if (!norms_known) *norm = std::sqrt(dot(x_row, x_row, D));
        scale_row(x_row, 1 / (*norm < p.norm_floor ? p.norm_floor : *norm), D);
    }
}

inline float floored(float denominator, float floor) {
    if (std::fabs(denominator) >= floor || denominator != denominator) return denominator;
    return denominator < 0 ? -floor : floor;
}

// G and delta, from dout and, in Eq. 4, what forward kept.
template <class T>
void load_gradient_block(const Problem& p, const Task& task, int64_t first, int count, float* G,
                         float* delta) {
    load_block<T>(p, p.dout, p.N, task, first, count, p.E, G);
    const int E = p.padded_E();
    for (int row = 0; row < count; ++row) {
        float* G_row = G + row * E;
        delta[row] = 0;
        if (!p.has_denominator) continue;
        const float denominator = *p.denominator.row<float>(task.b, task.h, first + row);
        scale_row(G_row, 1 / floored(denominator, p.denominator_floor), E);
        if (std::fabs(denominator) < p.denominator_floor) continue;
        float out[kMaxWidth];
        load_row(p.exact_out.row<const float>(task.b, task.h, first + row), p.E, out, E);
        delta[row] = -dot(G_row, out, E);
    }
}

// out_i = w_i (numerator_i + z), with w from the cosine sums sum_n q^_i.k^_n in Eq. 4.
template <class T>
void write_out_block(const Problem& p, const Task& task, int64_t first, int count, float* numerator,
                     const float* z, const float* cosine_sums) {
    const int E = p.padded_E();
    for (int row = 0; row < count; ++row) {
        float* out = numerator + row * E;
        add_row(out, 1, z, E);
        const int64_t n = first + row;
        if (p.has_denominator) {
            const float denominator = *p.num_keys.row<float>(task.b, task.h, n) + cosine_sums[row];
            *p.denominator.row<float>(task.b, task.h, n) = denominator;
            const float floor = floored(denominator, p.denominator_floor);
            for (int column = 0; column < E; column += kLanes)
                store(out + column, load(out + column) / floor);
            if (p.exact_out.data) store_row(out, p.E, p.exact_out.row<float>(task.b, task.h, n));
        } else {
            scale_row(out, p.scale, E);
        }
        store_row(out, p.E, p.out.row<T>(task.b, task.h, n));
    }
}

// dx = (dx^ - x^ (x^.dx^)) / |x|, from the unit rows; below the floor dx^ / floor.
template <class T>
void write_through_norm(const Problem& p, const Tensor& dx, const Tensor& norms, const Task& task,
                        int64_t first, int count, const float* unit, float* dunit) {
    const int D = p.padded_D();
    for (int row = 0; row < count; ++row) {
        float* d = dunit + row * D;
        if (p.normalise) {
            const float norm = *norms.row<const float>(task.b, task.h, first + row);
            if (norm < p.norm_floor) {
                scale_row(d, 1 / p.norm_floor, D);
            } else {
                add_row(d, -dot(unit + row * D, d, D), unit + row * D, D);
                scale_row(d, 1 / norm, D);
            }
        }
        store_row(d, p.D, dx.row<T>(task.b, task.h, first + row));
    }
}

template <class T>
void write_block(const Tensor& x, const Task& task, int64_t first, int count, int64_t width,
                 const float* block) {
    const int stride = padded(width, kLanes);
    for (int row = 0; row < count; ++row)
        store_row(block + row * stride, width, x.row<T>(task.b, task.h, first + row));
}

// S += a^T b, z += sum of b, and, with a denominator, kappa += sum of weight_i a_i (no weight: 1).
template <class Engine>
void add_to_sums(const Problem& p, const Engine& engine, const Sums& sums, const float* a, const float* b,
                 const float* weight, int count) {
    const int D = p.padded_D(), E = p.padded_E();
    engine.add_outer(count, D, E, a, b, sums.S);
    add_rows(sums.z, b, count, E);
    if (!p.has_denominator) return;
    if (!weight) return add_rows(sums.kappa, a, count, D);
    for (int row = 0; row < count; ++row) add_row(sums.kappa, weight[row], a + row * D, D);
}

}  // namespace clip_la
