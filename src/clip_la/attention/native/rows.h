// Blocks of rows in float32: loading and storing them, sums over them, and their matrix products.
//
// A block is a small row-major matrix that stays in the caches. Its rows are padded with zeros to whole
// vectors and its number of rows to whole tiles, so that no loop over it has a remainder.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace clip_la {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileRows = 8, kTileVectors = 2;  // 16 of 32 registers hold sums
#else
constexpr int kLanes = 8, kTileRows = 4, kTileVectors = 2;
#endif

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

struct BFloat16 {
    uint16_t bits;
};

constexpr int padded(int64_t count, int to) {
    return int((count + to - 1) / to * to);
}

inline Vector load(const float* from) {
    Vector x;
    memcpy(&x, from, sizeof x);
    return x;
}

inline void store(float* to, Vector x) {
    memcpy(to, &x, sizeof x);
}

inline Vector load(const BFloat16* from) {
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    Words words = __builtin_convertvector(halves, Words) << 16;
    return (Vector)words;
}

// Round to nearest, ties to even; NaN stays NaN.
inline Halves to_bfloat16(Vector x) {
#ifdef __AVX512BF16__
    return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
    Words words = (Words)x;
    Words rounded = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
    Words is_number = (Words)(x == x);
    return __builtin_convertvector((rounded & is_number) | (0x7fc0 & ~is_number), Halves);
#endif
}

inline void store(BFloat16* to, Vector x) {
    const Halves halves = to_bfloat16(x);
    memcpy(to, &halves, sizeof halves);
}

// Around the caches; `to` is a multiple of a vector's size. finish_streams() before another thread reads.
#ifdef __AVX512F__
inline void stream(float* to, Vector x) {
    _mm512_stream_ps(to, (__m512)x);
}
inline void stream(BFloat16* to, Vector x) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)to_bfloat16(x));
}
inline void finish_streams() {
    _mm_sfence();
}
#else
template <class T>
inline void stream(T* to, Vector x) {
    store(to, x);
}
inline void finish_streams() {}
#endif

inline float sum(Vector x) {
    float total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += x[lane];
    return total;
}

// The first `width` elements of a row, the rest of `stride` 0.
template <class T>
inline void load_row(const T* from, int width, float* to, int stride) {
    int column = 0;
    for (; column + kLanes <= width; column += kLanes) store(to + column, load(from + column));
    if (column == stride) return;
    T tail[kLanes] = {};
    memcpy(tail, from + column, sizeof(T) * (width - column));
    store(to + column, load(tail));
}

template <class T>
inline void store_row(const float* from, int width, T* to) {
    int column = 0;
    for (; column + kLanes <= width; column += kLanes) store(to + column, load(from + column));
    if (column == width) return;
    T tail[kLanes];
    store(tail, load(from + column));
    memcpy(to + column, tail, sizeof(T) * (width - column));
}

// Where the row is whole vectors.
template <class T>
inline void stream_row(const float* from, int width, T* to) {
    for (int column = 0; column < width; column += kLanes) stream(to + column, load(from + column));
}

inline Vector lane_products(const float* x, const float* y, int width) {
    Vector total = {};
    for (int column = 0; column < width; column += kLanes) total += load(x + column) * load(y + column);
    return total;
}

inline float dot(const float* x, const float* y, int width) {
    return sum(lane_products(x, y, width));
}

// to = factor x
inline void copy_scaled(const float* x, float factor, float* to, int width) {
    for (int column = 0; column < width; column += kLanes) store(to + column, load(x + column) * factor);
}

inline void scale_row(float* x, float factor, int width) {
    copy_scaled(x, factor, x, width);
}

// to += factor x
inline void add_row(float* to, float factor, const float* x, int width) {
    for (int column = 0; column < width; column += kLanes)
        store(to + column, load(to + column) + load(x + column) * factor);
}

// to += the sum of factor_i x_i, which is formed first: a long sum loses less in few large steps.
inline void add_rows(float* to, const float* factors, const float* x, int count, int width) {
    for (int column = 0; column < width; column += kLanes) {
        Vector total = {};
        for (int row = 0; row < count; ++row) total += load(x + row * width + column) * factors[row];
        store(to + column, load(to + column) + total);
    }
}

// Two rows swap parts of kDistance elements: the second of each pair in `above` for the first in `below`.
template <int kDistance, int... kLane>
inline void swap_parts(Words& above, Words& below, std::integer_sequence<int, kLane...>) {
    const Words old_above = above, old_below = below;
#ifdef __clang__
    above = __builtin_shufflevector(old_above, old_below,
                                    (kLane & kDistance ? kLane - kDistance + kLanes : kLane)...);
    below = __builtin_shufflevector(old_above, old_below,
                                    (kLane & kDistance ? kLane + kLanes : kLane + kDistance)...);
#else
    above = __builtin_shuffle(old_above, old_below,
                              Words{(kLane & kDistance ? kLane - kDistance + kLanes : kLane)...});
    below = __builtin_shuffle(old_above, old_below,
                              Words{(kLane & kDistance ? kLane + kLanes : kLane + kDistance)...});
#endif
}

template <int kDistance>
inline void swap_all_parts(Words* rows) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
        if (!(i & kDistance))
            swap_parts<kDistance>(rows[i], rows[i + kDistance], std::make_integer_sequence<int, kLanes>());
    if constexpr (kDistance > 1) swap_all_parts<kDistance / 2>(rows);
}

// dots[i] = x_i.y_i of rows, those of y y_stride apart; their number is rounded up to kLanes.
inline void row_dots(const float* x, const float* y, int y_stride, int rows, int width, float* dots) {
    for (int first = 0; first < rows; first += kLanes) {
        Words lanes[kLanes];
        for (int i = 0; i < kLanes; ++i)
            lanes[i] = (Words)lane_products(x + (first + i) * width, y + (first + i) * y_stride, width);
        swap_all_parts<kLanes / 2>(lanes);
        Vector total = {};
        for (int i = 0; i < kLanes; ++i) total += (Vector)lanes[i];
        store(dots + first, total);
    }
}

// A square of kLanes x kLanes elements, transposed.
inline void transpose_square(const uint32_t* x, int x_stride, uint32_t* to, int to_stride) {
    Words rows[kLanes];
    for (int i = 0; i < kLanes; ++i) memcpy(&rows[i], x + i * x_stride, sizeof(Words));
    swap_all_parts<kLanes / 2>(rows);
    for (int i = 0; i < kLanes; ++i) memcpy(to + i * to_stride, &rows[i], sizeof(Words));
}

// to is x (rows x columns) transposed, its rows to_stride apart. Both numbers are rounded up to kLanes.
inline void transpose(const uint32_t* x, int rows, int columns, uint32_t* to, int to_stride) {
    for (int i = 0; i < rows; i += kLanes)
        for (int j = 0; j < columns; j += kLanes)
            transpose_square(x + i * columns + j, columns, to + j * to_stride + i, to_stride);
}

inline void transpose(const float* x, int rows, int columns, float* to, int to_stride) {
    transpose(reinterpret_cast<const uint32_t*>(x), rows, columns, reinterpret_cast<uint32_t*>(to),
              to_stride);
}

// A matrix whose element (i, j) is at data[i * row + j * column].
struct Operand {
    const float* data;
    int row, column;
};

inline Operand plain(const float* data, int stride) {
    return {data, stride, 1};
}
inline Operand transposed(const float* data, int stride) {
    return {data, 1, stride};
}

// One tile of `multiply`: the sums stay in registers over all of k.
template <bool kAdd, int kVectors>
inline void multiply_tile(int k, Operand a, const float* b, int b_stride, float* c, int c_stride) {
    Vector sums[kTileRows][kVectors] = {};
    for (int step = 0; step < k; ++step) {
        Vector b_row[kVectors];
#pragma GCC unroll 2
        for (int j = 0; j < kVectors; ++j) b_row[j] = load(b + step * b_stride + j * kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 2
            for (int j = 0; j < kVectors; ++j) sums[i][j] += a.data[i * a.row + step * a.column] * b_row[j];
    }
#pragma GCC unroll 8
    for (int i = 0; i < kTileRows; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < kVectors; ++j) {
            float* to = c + i * c_stride + j * kLanes;
            store(to, kAdd ? load(to) + sums[i][j] : sums[i][j]);
        }
}

// c (m x n) = a (m x k) b (k x n), or c += a b. m is a multiple of kTileRows, n of kLanes.
template <bool kAdd>
inline void multiply(int m, int n, int k, Operand a, const float* b, int b_stride, float* c, int c_stride) {
    for (int j = 0; j < n;) {
        const bool wide = j + kTileVectors * kLanes <= n;
        for (int i = 0; i < m; i += kTileRows) {
            Operand rows = {a.data + i * a.row, a.row, a.column};
            float* to = c + i * c_stride + j;
            if (wide)
                multiply_tile<kAdd, kTileVectors>(k, rows, b + j, b_stride, to, c_stride);
            else
                multiply_tile<kAdd, 1>(k, rows, b + j, b_stride, to, c_stride);
        }
        j += wide ? kTileVectors * kLanes : kLanes;
    }
}

}  // namespace clip_la
