// What Python hands over (native_backend.py has the same structs), and where things of one head are in it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "rows.h"

namespace clip_la {

constexpr int kBlock = 64;      // tokens worked on at a time
constexpr int kMaxBlock = 128;  // the same of a short causal sequence: one masked tile needs no sums
constexpr int kMaxWidth = 256;  // of D and E

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
    int32_t causal, normalise, has_denominator, num_threads;
    int64_t num_segments;
    float scale, norm_floor, denominator_floor;
    const float* gain;  // (H,)
    Tensor q, k, v, num_keys;
    Tensor out, exact_out, q_norm, k_norm, denominator;
    float *state, *key_sum;  // (B, H, D, E), (B, H, D)
    Tensor dout, dq, dk, dv;
    float* dgain;              // (B, H, num_segments)
    float *sums, *later_sums;  // (B, H, num_segments, sums_size), where there are several segments

    int64_t padded_D() const { return padded(D, kLanes); }
    int64_t padded_E() const { return padded(E, kLanes); }
    int64_t sums_size() const { return padded_D() * padded_E() + padded_E() + padded_D(); }
    float gain_of(int64_t h) const { return gain ? gain[h] : 1.0f; }
    int block() const { return causal && N <= kMaxBlock ? kMaxBlock : kBlock; }
    float constant_weight() const { return has_denominator ? 1.0f : scale; }
};

struct Range {
    int64_t begin, end;
};

// The tokens of a segment: whole blocks, but for the last one.
inline Range segment_tokens(int64_t length, int64_t num_segments, int64_t segment) {
    const int64_t size = padded((length + num_segments - 1) / num_segments, kBlock);
    return {std::min(length, segment * size), std::min(length, (segment + 1) * size)};
}

template <class Work>
void for_each_block(Range tokens, int block, Work work) {
    for (int64_t first = tokens.begin; first < tokens.end; first += block)
        work(first, int(std::min<int64_t>(block, tokens.end - first)));
}

template <class Work>
void for_each_block_backwards(Range tokens, int block, Work work) {
    const int64_t num_blocks = (tokens.end - tokens.begin + block - 1) / block;
    for (int64_t i = num_blocks - 1; i >= 0; --i) {
        const int64_t first = tokens.begin + i * block;
        work(first, int(std::min<int64_t>(block, tokens.end - first)));
    }
}

// One head of one sequence, and a segment of it: the unit of parallel work.
struct Task {
    int64_t b, h, segment;
};

template <class Work>
void for_each_task(const Problem& p, int64_t num_segments, Work work) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < p.B * p.H * num_segments; ++i)
        work(Task{i / num_segments / p.H, i / num_segments % p.H, i % num_segments});
}

// S (D x E), z (E) and kappa (D) of some tokens, padded; or dS, dz and dkappa.
struct Sums {
    float *S, *z, *kappa;
};

inline Sums sums_in(const Problem& p, float* S) {
    float* z = S + p.padded_D() * p.padded_E();
    return {S, z, z + p.padded_E()};
}

inline Sums sums_at(const Problem& p, float* buffer, const Task& task) {
    return sums_in(p, buffer + ((task.b * p.H + task.h) * p.num_segments + task.segment) * p.sums_size());
}

inline Sums zeros(const Problem& p, const Sums& sums) {
    memset(sums.S, 0, sizeof(float) * p.sums_size());
    return sums;
}

// Blocks (tokens x D, E or a causal tile) and states (D x E) for one thread.
class Scratch {
public:
    explicit Scratch(const Problem& p)
        : block_size_(p.block() * std::max<int64_t>({p.padded_D(), p.padded_E(), p.block()})),
          state_size_(p.padded_D() * p.padded_E()),
          sums_size_(p.sums_size()),
          data_(static_cast<float*>(aligned_alloc(64, bytes()))) {
        if (!data_) abort();
    }
    ~Scratch() { free(data_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    float* block(int index) const { return data_ + index * block_size_; }
    float* sums(int index) const { return state(kStates) + index * sums_size_; }
    uint32_t* packed_left() const { return words(block(8)); }
    uint32_t* packed_right() const { return words(block(9)); }
    uint32_t* packed_state(int index) const { return words(state(2 + index)); }
    float* state(int index) const { return data_ + kBlocks * block_size_ + index * state_size_; }

private:
    static constexpr int kBlocks = 10, kStates = 4, kSums = 2;
    static uint32_t* words(float* room) { return reinterpret_cast<uint32_t*>(room); }
    size_t bytes() const {
        return padded(sizeof(float) * (kBlocks * block_size_ + kStates * state_size_ + kSums * sums_size_),
                      64);
    }

    int64_t block_size_, state_size_, sums_size_;
    float* data_;
};

}  // namespace clip_la
