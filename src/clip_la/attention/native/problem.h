// What Python hands over (native_backend.py has the same structs), and where things of one head are in it.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>

#include "rows.h"

namespace clip_la {

constexpr int kBlock = 64;       // tokens worked on at a time
constexpr int kMaxBlock = 128;   // the same of a short causal sequence: one masked tile needs no sums
constexpr int kPaddedRows = 32;  // blocks are padded with rows of zeros to a multiple of this
constexpr int kMaxWidth = 256;   // of D and E
constexpr int kMaxHeads = 16;    // worked on together

// A tensor (B, H, tokens, width) whose rows are contiguous; strides in elements.
struct Tensor {
    void* data;
    int64_t batch, head, token;

    template <class T>
    T* row(int64_t b, int64_t h, int64_t n) const {
        return static_cast<T*>(data) + b * batch + h * head + n * token;
    }
};

// See contract.py for the tensors. Those of one number a row have width 1. Absent ones are null.
struct Problem {
    int64_t B, H, N, M, D, E;
    int32_t causal, normalise, has_denominator, centre_values;
    int64_t num_threads, num_segments;
    float scale, norm_floor, denominator_floor;
    const float* gain;  // (H,)
    Tensor q, k, v, num_keys;
    Tensor out, exact_out, q_norm, k_norm, denominator;
    float *state, *key_sum, *value_mean;  // (B, H, D, E), (B, H, D), (B, H, E)
    Tensor dout, dq, dk, dv;
    float* dgain;              // (B, H, num_segments)
    float *sums, *later_sums;  // (B, H, num_segments, sums_size), where there are several segments

    int64_t padded_D() const { return padded(D, kLanes); }
    int64_t padded_E() const { return padded(E, kLanes); }
    int64_t sums_size() const { return padded_D() * padded_E() + padded_E() + padded_D(); }
    int64_t num_heads_together() const;
    float gain_of(int64_t h) const { return gain ? gain[h] : 1.0f; }
    int block() const { return causal && N <= kMaxBlock ? kMaxBlock : kBlock; }
    float constant_weight() const { return has_denominator ? 1.0f : scale; }
    float inverse_M() const { return 1.0f / std::max<int64_t>(M, 1); }
};

struct Range {
    int64_t begin, end;
};

// The tokens of a segment: whole blocks, but for the last one.
inline Range segment_tokens(int64_t length, int64_t num_segments, int64_t segment) {
    const int64_t size = padded((length + num_segments - 1) / num_segments, kBlock);
    return {std::min(length, segment * size), std::min(length, (segment + 1) * size)};
}

// One head of one sequence, and a segment of it.
struct Task {
    int64_t b, h, segment;
};

// Of all heads of all sequences.
inline int64_t head_number(const Problem& p, const Task& task) {
    return task.b * p.H + task.h;
}

template <class Work>
void for_each_head(const Problem& p, Work work) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < p.B * p.H; ++i) work(Task{i / p.H, i % p.H, 0});
}

// Heads of one sequence, in a segment of it, that one thread works on together, block by block. In a packed
// projection their rows lie side by side: read so, memory is about twice as fast as head by head.
struct Heads {
    int64_t b, first, count, segment;

    Task task(int64_t i) const { return {b, first + i, segment}; }
};

// As many as leave work for every thread, and whose sums and packed states the second-level cache holds.
inline int64_t Problem::num_heads_together() const {
    const int64_t cached = (1 << 18) / (4 * sums_size());
    const int64_t shared = B * H * num_segments / std::max<int64_t>(num_threads, 1);
    return std::max<int64_t>(1, std::min<int64_t>({cached, shared, H, kMaxHeads}));
}

template <class Work>
void for_each_heads(const Problem& p, Work work) {
    const int64_t together = p.num_heads_together(), num_groups = (p.H + together - 1) / together;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < p.B * num_groups * p.num_segments; ++i) {
        const int64_t group = i / p.num_segments % num_groups, first = group * together;
        work(Heads{i / p.num_segments / num_groups, first, std::min(together, p.H - first),
                   i % p.num_segments});
    }
}

// Calls work(i, task, first, count) for each block of the segment, from the first or the last one on, and in
// it for each head.
template <bool kBackwards, class Work>
void for_each_block_in_order(const Problem& p, int64_t length, const Heads& heads, Work work) {
    const Range tokens = segment_tokens(length, p.num_segments, heads.segment);
    const int64_t block = p.block(), num_blocks = (tokens.end - tokens.begin + block - 1) / block;
    for (int64_t n = 0; n < num_blocks; ++n) {
        const int64_t first = tokens.begin + (kBackwards ? num_blocks - 1 - n : n) * block;
        const int count = int(std::min(block, tokens.end - first));
        for (int64_t i = 0; i < heads.count; ++i) work(i, heads.task(i), first, count);
    }
}

template <class Work>
void for_each_block(const Problem& p, int64_t length, const Heads& heads, Work work) {
    for_each_block_in_order<false>(p, length, heads, work);
}

template <class Work>
void for_each_block_backwards(const Problem& p, int64_t length, const Heads& heads, Work work) {
    for_each_block_in_order<true>(p, length, heads, work);
}

// S (D x E), z (E) and kappa (D) of some tokens, padded; or dS, dz and dkappa.
struct Sums {
    float *S, *z, *kappa;
};

inline Sums sums_in(const Problem& p, float* S) {
    float* z = S + p.padded_D() * p.padded_E();
    return {S, z, z + p.padded_E()};
}

using HeadSums = std::array<Sums, kMaxHeads>;

inline Sums sums_at(const Problem& p, float* buffer, const Task& task) {
    return sums_in(p, buffer + (head_number(p, task) * p.num_segments + task.segment) * p.sums_size());
}

inline Sums zeros(const Problem& p, const Sums& sums) {
    memset(sums.S, 0, sizeof(float) * p.sums_size());
    return sums;
}

// Blocks (tokens x D, E or a causal tile), states (D x E) and, for each head, sums and packed states: the
// memory of one thread.
class Scratch {
public:
    explicit Scratch(const Problem& p)
        : block_size_(p.block() * std::max<int64_t>({p.padded_D(), p.padded_E(), p.block()})),
          state_size_(p.padded_D() * p.padded_E()),
          sums_size_(p.sums_size()),
          num_heads_(p.num_heads_together()),
          data_(static_cast<float*>(aligned_alloc(64, bytes()))) {
        if (!data_) abort();
    }
    ~Scratch() { free(data_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    float* block(int index) const { return data_ + index * block_size_; }
    float* state(int index) const { return block(kBlocks) + index * state_size_; }
    float* sums(int64_t head, int index = 0) const {
        return state(kStates) + (2 * head + index) * sums_size_;
    }
    float* packed_state(int64_t head, int index) const {
        return sums(num_heads_) + (2 * head + index) * packed_size(state_size_);
    }
    float* packed_left() const { return block(8); }
    float* packed_right() const { return block(10); }

private:
    static constexpr int kBlocks = 12, kStates = 2;
    // Three bfloat16 take as much room as one and a half float32.
    static int64_t packed_size(int64_t size) { return size * 3 / 2; }
    size_t bytes() const {
        const int64_t each_head = 2 * sums_size_ + 2 * packed_size(state_size_);
        return sizeof(float) *
               padded(kBlocks * block_size_ + kStates * state_size_ + num_heads_ * each_head, 16);
    }

    int64_t block_size_, state_size_, sums_size_, num_heads_;
    float* data_;
};

}  // namespace clip_la
