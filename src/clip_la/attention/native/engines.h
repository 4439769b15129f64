// Two ways to multiply float32 blocks, with one interface: the CPU's vector units, and AMX where it has that.
//
// An engine packs the right operand of many products once, multiplies blocks by it, and adds outer products:
//     Right pack_right(b, k, n, index)     b (k x n), which stays where it is as long as the Right is used
//     product(rows, a, right, c)           c (rows x n) = a (rows x k) b
//     add_outer(count, m, n, a, b, c)      c (m x n) += a^T b, a (count x m), b (count x n) as read from a
//     tensor
// rows is a multiple of kTileRows; m, n and k are multiples of what `fits` asks for.

#pragma once

#include "problem.h"

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define CLIP_LA_HAS_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace clip_la {

class VectorEngine {
public:
    struct Right {
        const float* b;
        int k, n;
    };

    explicit VectorEngine(const Scratch&) {}

    Right pack_right(const float* b, int k, int n, int) const { return {b, k, n}; }

    void product(int rows, const float* a, const Right& right, float* c) const {
        multiply<false>(rows, right.n, right.k, plain(a, right.k), right.b, right.n, c, right.n);
    }

    void add_outer(int count, int m, int n, const float* a, const float* b, float* c) const {
        multiply<true>(m, n, count, transposed(a, m), b, n, c, n);
    }
};

#ifdef CLIP_LA_HAS_AMX

// For bfloat16 tensors. A float32 that wasn't read from one is split in two bfloat16, hi + lo, and in the
// product of two such sums lo lo is left out: a relative error of 2^-16, for a fraction of the time.
class AmxEngine {
public:
    struct Right {
        const uint32_t *hi, *lo;  // (k / 2 x n) pairs of rows
        int k, n;
    };

    // Whether the kernel lets this process use the tiles; asked once.
    static bool is_available() {
        constexpr int kRequestPermission = 0x1023, kTileData = 18;
        static const bool available = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
        return available;
    }

    static bool fits(const Problem& p) { return p.D % kStep == 0 && p.E % kStep == 0; }

    explicit AmxEngine(const Scratch& scratch) : scratch_(scratch) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int tile = 0; tile < 8; ++tile) config.row_bytes[tile] = 64, config.rows[tile] = kTile;
        finish_stores(&config);
        _tile_loadconfig(&config);
    }
    ~AmxEngine() { _tile_release(); }
    AmxEngine(const AmxEngine&) = delete;
    AmxEngine& operator=(const AmxEngine&) = delete;

    Right pack_right(const float* b, int k, int n, int index) const {
        uint32_t* hi = scratch_.packed_state(index);
        uint32_t* lo = hi + k / 2 * n;
        pack_pairs<true>(b, k, k, n, hi, lo);
        return {hi, lo, k, n};
    }

    void product(int rows, const float* a, const Right& right, float* c) const {
        uint32_t* hi = scratch_.packed_left();
        uint32_t* lo = hi + kBlock * right.k / 2;
        for (int i = 0; i < rows * right.k; i += kLanes) {
            const Split x = split(load(a + i));
            store_halves(x.hi >> 16, hi + i / 2);
            store_halves(x.lo >> 16, lo + i / 2);
        }
        for (int i = 0; i < rows; i += kStep)
            for (int j = 0; j < right.n; j += kStep)
                multiply_tiles<false, 3>(hi + i * right.k / 2, lo + i * right.k / 2, right.k, right, j,
                                         c + i * right.n + j);
    }

    void add_outer(int count, int m, int n, const float* a, const float* b, float* c) const {
        const int k = padded(count, kStep);
        uint32_t* pairs_hi = scratch_.packed_right();
        uint32_t* pairs_lo = pairs_hi + kBlock / 2 * std::max(m, n);
        uint32_t* hi = scratch_.packed_left();
        uint32_t* lo = hi + m * k / 2;
        pack_pairs<true>(a, count, k, m, pairs_hi, pairs_lo);
        transpose(pairs_hi, k / 2, m, hi, k / 2);
        transpose(pairs_lo, k / 2, m, lo, k / 2);
        pack_pairs<false>(b, count, k, n, pairs_hi, nullptr);
        const Right right = {pairs_hi, nullptr, k, n};
        for (int i = 0; i < m; i += kStep)
            for (int j = 0; j < n; j += kStep)
                multiply_tiles<true, 2>(hi + i * k / 2, lo + i * k / 2, k, right, j, c + i * n + j);
    }

private:
    static constexpr int kTile = 16;  // rows of a tile, and pairs in a row of it
    static constexpr int kStep = 32;

    struct Split {
        Words hi, lo;  // the bfloat16 are the upper halves
    };

    static Split split(Vector x) {
        const Words hi = ((Words)x + 0x8000) & 0xffff0000;
        return {hi, (Words)(x - (Vector)hi) & 0xffff0000};
    }

    static void store_halves(Words words, uint32_t* to) {
        const Halves halves = __builtin_convertvector(words, Halves);
        memcpy(to, &halves, sizeof halves);
    }

    // GCC's tile intrinsics don't tell it which memory they read.
    static void finish_stores(const void* read_next) { asm volatile("" : : "r"(read_next) : "memory"); }

    // Rows 2 i and 2 i + 1 of x (count x width, to be padded with zeros to k rows) side by side in row i.
    template <bool kLow>
    static void pack_pairs(const float* x, int count, int k, int width, uint32_t* hi, uint32_t* lo) {
        for (int row = 0; row < k; row += 2)
            for (int column = 0; column < width; column += kLanes) {
                const Split even = split(row < count ? load(x + row * width + column) : Vector{});
                const Split odd = split(row + 1 < count ? load(x + (row + 1) * width + column) : Vector{});
                const Words pair_hi = odd.hi | (even.hi >> 16), pair_lo = odd.lo | (even.lo >> 16);
                memcpy(hi + row / 2 * width + column, &pair_hi, sizeof pair_hi);
                if (kLow) memcpy(lo + row / 2 * width + column, &pair_lo, sizeof pair_lo);
            }
    }

    // c (32 x 32 of rows right.n apart) = or += the rows of a (32 x k) by the columns j... of the right
    // operand, in two terms where that has no lo.
    template <bool kAdd, int kTerms>
    static void multiply_tiles(const uint32_t* a_hi, const uint32_t* a_lo, int k, const Right& right, int j,
                               float* c) {
        finish_stores(a_hi);
        const int c_stride = right.n * 4, a_stride = k * 2;
        float* c_below = c + kTile * right.n;
        if (kAdd) {
            _tile_loadd(0, c, c_stride);
            _tile_loadd(1, c + kTile, c_stride);
            _tile_loadd(2, c_below, c_stride);
            _tile_loadd(3, c_below + kTile, c_stride);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        const uint32_t* const left[] = {a_hi, a_lo, a_hi};
        const uint32_t* const rights[] = {right.hi, right.hi, right.lo};
        for (int term = 0; term < kTerms; ++term)
            for (int pair = 0; pair < k / 2; pair += kTile) {
                const uint32_t* a = left[term] + pair;
                const uint32_t* b = rights[term] + pair * right.n + j;
                _tile_loadd(4, a, a_stride);
                _tile_loadd(5, a + kTile * k / 2, a_stride);
                _tile_loadd(6, b, right.n * 4);
                _tile_loadd(7, b + kTile, right.n * 4);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        _tile_stored(0, c, c_stride);
        _tile_stored(1, c + kTile, c_stride);
        _tile_stored(2, c_below, c_stride);
        _tile_stored(3, c_below + kTile, c_stride);
    }

    const Scratch& scratch_;
};

#endif

}  // namespace clip_la
