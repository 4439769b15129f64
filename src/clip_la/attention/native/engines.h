// Two ways to multiply float32 blocks, with one interface: the CPU's vector units, and AMX where it has that.
//
// An engine packs the right operand of many products once, multiplies blocks by it, and adds outer products:
//     Right pack_right(b, k, n, room)          b (k x n), in room, which holds 3/2 k n float32
//     product(count, a, right, c)              c (count x n) = a (count x k) b
//     add_outer(count, m, n, a, factor, b, c)  c (m x n) += a^T diag(factor) b, a (count x m), b (count x n)
// a and, in the latter, b are blocks as read from a tensor, padded to kPaddedRows; n and k are multiples of
// what `fits` asks for.

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

    explicit VectorEngine(const Scratch& scratch) : scratch_(scratch) {}

    Right pack_right(const float* b, int k, int n, float* room) const {
        memcpy(room, b, sizeof(float) * k * n);
        return {room, k, n};
    }

    void product(int count, const float* a, const Right& right, float* c) const {
        multiply<false>(padded(count, kTileRows), right.n, right.k, plain(a, right.k), right.b, right.n, c,
                        right.n);
    }

    void add_outer(int count, int m, int n, const float* a, const float* factor, const float* b,
                   float* c) const {
        float* scaled = scratch_.packed_right();
        for (int row = 0; row < count; ++row) copy_scaled(b + row * n, factor[row], scaled + row * n, n);
        multiply<true>(m, n, count, transposed(a, m), scaled, n, c, n);
    }

private:
    const Scratch& scratch_;
};

#ifdef CLIP_LA_HAS_AMX

// AMX multiplies bfloat16 and adds in float32. Each float32 goes in as a sum of bfloat16 parts of 8 bits
// each: rows read from bfloat16 tensors are one part, those of float32 tensors three, which is all 24 bits of
// them. The other operand has as many, at least two. Products of parts below the last one's precision are
// left out.
template <class T>
class AmxEngine {
    static constexpr int kLeftParts = std::is_same_v<T, float> ? 3 : 1;
    static constexpr int kRightParts = std::is_same_v<T, float> ? 3 : 2;

public:
    struct Right {
        const uint32_t* parts;  // kRightParts of (k / 2 x n) pairs of rows
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

    Right pack_right(const float* b, int k, int n, float* room) const {
        uint32_t* parts = words(room);
        pair_rows<kRightParts>(b, k, n, parts);
        return {parts, k, n};
    }

    void product(int count, const float* a, const Right& right, float* c) const {
        const int rows = padded(count, kStep);
        uint32_t* left = words(scratch_.packed_left());
        pair_columns(a, rows, right.k, left);
        multiply<false>(rows, left, right, c);
    }

    void add_outer(int count, int m, int n, const float* a, const float* factor, const float* b,
                   float* c) const {
        if constexpr (kLeftParts == 1)
            add_tiles(padded(count, kStep), m, n, a, factor, b, c);
        else  // transposing three parts takes longer than AMX saves
            VectorEngine(scratch_).add_outer(count, m, n, a, factor, b, c);
    }

private:
    static constexpr int kTile = 16;  // rows of a tile, and pairs in a row of it
    static constexpr int kStep = 2 * kTile;
    static_assert(kStep == kPaddedRows && kTile == kLanes);

    static uint32_t* words(float* room) { return reinterpret_cast<uint32_t*>(room); }

    void add_tiles(int rows, int m, int n, const float* a, const float* factor, const float* b,
                   float* c) const {
        uint32_t *left = words(scratch_.packed_left()), *pairs = words(scratch_.packed_right());
        pair_rows<1>(a, rows, m, pairs);
        transpose(pairs, rows / 2, m, left, rows / 2);
        pair_rows<kRightParts>(b, rows, n, pairs, factor);
        multiply<true>(m, left, Right{pairs, rows, n}, c);
    }

    // GCC's tile intrinsics don't tell it which memory they read.
    static void finish_stores(const void* read_next) { asm volatile("" : : "r"(read_next) : "memory"); }

    // To bfloat16, in the upper halves: rounded, or cut off, which keeps every NaN.
    static Words upper_halves(Vector x, bool cut) { return ((Words)x + (cut ? 0 : 0x8000)) & 0xffff0000; }

    // The parts of even and odd side by side, each part `distance` after the one before.
    template <int kParts>
    static void store_pairs(Vector even, Vector odd, uint32_t* to, int distance) {
        for (int part = 0; part < kParts; ++part) {
            const bool cut = kParts == 3 || part + 1 == kParts;  // three parts lose nothing either way
            const Words even_part = upper_halves(even, cut), odd_part = upper_halves(odd, cut);
            const Words pairs = odd_part | (even_part >> 16);
            memcpy(to + part * distance, &pairs, sizeof pairs);
            even -= (Vector)even_part;
            odd -= (Vector)odd_part;
        }
    }

    // Pairs of each row's elements j and j + kTile, in every kStep of them: (rows x width / 2).
    static void pair_columns(const float* x, int rows, int width, uint32_t* to) {
        for (int i = 0; i < rows * width; i += kStep)
            store_pairs<kLeftParts>(load(x + i), load(x + i + kTile), to + i / 2, rows * width / 2);
    }

    // Pairs of rows j and j + kTile, in every kStep of them, times their factors: (rows / 2 x width).
    template <int kParts>
    static void pair_rows(const float* x, int rows, int width, uint32_t* to, const float* factor = nullptr) {
        for (int first = 0; first < rows; first += kStep)
            for (int row = first; row < first + kTile; ++row)
                for (int column = 0; column < width; column += kLanes) {
                    const float *even = x + row * width + column, *odd = even + kTile * width;
                    uint32_t* pair = to + (row - first / 2) * width + column;
                    if (factor)
                        store_pairs<kParts>(load(even) * factor[row], load(odd) * factor[row + kTile], pair,
                                            rows / 2 * width);
                    else
                        store_pairs<kParts>(load(even), load(odd), pair, rows / 2 * width);
                }
    }

    // c (m x right.n) = or += a b, a of kLeftParts (m x right.k / 2).
    template <bool kAdd>
    static void multiply(int m, const uint32_t* a, const Right& right, float* c) {
        finish_stores(a);
        for (int i = 0; i < m; i += kStep)
            for (int j = 0; j < right.n; j += kStep)
                multiply_tiles<kAdd>(a + i * right.k / 2, m * right.k / 2, right, j, c + i * right.n + j);
    }

    // c (32 x 32 of rows right.n apart) = or += 32 rows of a, its parts a_part apart, by the columns j... of
    // b.
    template <bool kAdd>
    static void multiply_tiles(const uint32_t* a, int a_part, const Right& right, int j, float* c) {
        const int n = right.n, c_stride = n * 4, a_stride = right.k * 2, right_part = right.k / 2 * n;
        float* c_below = c + kTile * n;
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
        for (int pair = 0; pair < right.k / 2; pair += kTile)
            for (int left = 0; left < kLeftParts; ++left) {
                const uint32_t* a_tile = a + left * a_part + pair;
                _tile_loadd(4, a_tile, a_stride);
                _tile_loadd(5, a_tile + kTile * right.k / 2, a_stride);
                for (int part = 0; part < kRightParts - left; ++part) {
                    const uint32_t* b_tile = right.parts + part * right_part + pair * n + j;
                    _tile_loadd(6, b_tile, n * 4);
                    _tile_loadd(7, b_tile + kTile, n * 4);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
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
