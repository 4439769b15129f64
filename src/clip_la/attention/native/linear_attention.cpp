// The two functions that native_backend.py calls: forward and backward of Eq. 4 and Eq. 7 on the CPU.
//
// Sequences are cut in segments, so that a few long ones keep all cores busy. Each pass over the tokens is
// parallel over (sequence, head, segment); between passes the segments' sums are put together in their order,
// whatever the number of threads, so that results are the same bits every time.

#include "causal.h"

namespace clip_la {
namespace {

// Segment 0 gets the sum of all segments.
void total(const Problem& p, float* buffer, const Task& head) {
    const Sums first = sums_at(p, buffer, head);
    for (int64_t s = 1; s < p.num_segments; ++s)
        add_row(first.S, 1, sums_at(p, buffer, {head.b, head.h, s}).S, p.sums_size());
}

// Each segment gets the sum of those before it, or after it.
void exclusive_sums(const Problem& p, float* buffer, const Task& head, bool reverse, float* running) {
    const int64_t size = p.sums_size();
    memset(running, 0, sizeof(float) * size);
    for (int64_t i = 0; i < p.num_segments; ++i) {
        float* segment = sums_at(p, buffer, {head.b, head.h, reverse ? p.num_segments - 1 - i : i}).S;
        for (int64_t j = 0; j < size; j += kLanes) {
            const Vector own = load(segment + j), before = load(running + j);
            store(segment + j, before);
            store(running + j, before + own);
        }
    }
}

// Sums of 0: in the buffer of all segments, or in the thread's memory where there is but one.
HeadSums new_sums(const Problem& p, float* buffer, const Scratch& scratch, const Heads& heads,
                  int index = 0) {
    HeadSums sums;
    for (int64_t i = 0; i < heads.count; ++i)
        sums[i] = zeros(
            p, p.num_segments > 1 ? sums_at(p, buffer, heads.task(i)) : sums_in(p, scratch.sums(i, index)));
    return sums;
}

// What an earlier pass left in the buffer, for this segment or, of `total`, for all.
HeadSums segment_sums(const Problem& p, float* buffer, const Heads& heads) {
    HeadSums sums;
    for (int64_t i = 0; i < heads.count; ++i) sums[i] = sums_at(p, buffer, heads.task(i));
    return sums;
}

HeadSums total_sums(const Problem& p, float* buffer, const Heads& heads) {
    return segment_sums(p, buffer, {heads.b, heads.first, heads.count, 0});
}

template <class T, class Engine>
void forward_full(const Problem& p, const Scratch& scratch, const Engine& engine) {
    for_each_heads(p, [&](const Heads& heads) {
        const HeadSums sums = new_sums(p, p.sums, scratch, heads);
        sum_keys<T>(p, heads, scratch, engine, sums, false);
        if (p.num_segments > 1) return;
        for (int64_t i = 0; i < heads.count; ++i) finish_sums(p, heads.task(i), sums[i]);
        read_sums<T>(p, heads, scratch, engine, sums);
    });
    if (p.num_segments == 1) return;
    for_each_head(p, [&](const Task& head) {
        total(p, p.sums, head);
        finish_sums(p, head, sums_at(p, p.sums, head));
    });
    for_each_heads(p, [&](const Heads& heads) {
        read_sums<T>(p, heads, scratch, engine, total_sums(p, p.sums, heads));
    });
}

template <class T, class Engine>
void backward_full(const Problem& p, const Scratch& scratch, const Engine& engine) {
    for_each_heads(p, [&](const Heads& heads) {
        const HeadSums sums = new_sums(p, p.later_sums, scratch, heads);
        backward_queries<T>(p, heads, scratch, engine, sums);
        if (p.num_segments > 1) return;
        for (int64_t i = 0; i < heads.count; ++i) finish_gradients(p, heads.task(i), sums[i]);
        backward_keys<T>(p, heads, scratch, engine, sums);
    });
    if (p.num_segments == 1) return;
    for_each_head(p, [&](const Task& head) {
        total(p, p.later_sums, head);
        finish_gradients(p, head, sums_at(p, p.later_sums, head));
    });
    for_each_heads(p, [&](const Heads& heads) {
        backward_keys<T>(p, heads, scratch, engine, total_sums(p, p.later_sums, heads));
    });
}

template <class T>
void forward_causal(const Problem& p, const Scratch& scratch) {
    for_each_heads(p, [&](const Heads& heads) {
        const HeadSums sums = new_sums(p, p.sums, scratch, heads);
        if (p.num_segments == 1)
            forward_segment<T>(p, heads, scratch, sums);
        else
            sum_keys<T>(p, heads, scratch, VectorEngine(scratch), sums, false);
    });
    if (p.num_segments == 1) return;
    for_each_head(p, [&](const Task& head) { exclusive_sums(p, p.sums, head, false, scratch.sums(0)); });
    for_each_heads(p, [&](const Heads& heads) {
        forward_segment<T>(p, heads, scratch, segment_sums(p, p.sums, heads));
    });
}

template <class T>
void backward_causal(const Problem& p, const Scratch& scratch) {
    for_each_heads(p, [&](const Heads& heads) {
        const HeadSums earlier = new_sums(p, p.sums, scratch, heads, 0);
        const HeadSums later = new_sums(p, p.later_sums, scratch, heads, 1);
        if (p.num_segments == 1) {
            backward_queries_segment<T>(p, heads, scratch, earlier);
            backward_keys_segment<T>(p, heads, scratch, later);
        } else {
            sum_keys<T>(p, heads, scratch, VectorEngine(scratch), earlier, true);
            sum_queries<T>(p, heads, scratch, later);
        }
    });
    if (p.num_segments == 1) return;
    for_each_head(p, [&](const Task& head) {
        exclusive_sums(p, p.sums, head, false, scratch.sums(0));
        exclusive_sums(p, p.later_sums, head, true, scratch.sums(0));
    });
    for_each_heads(p, [&](const Heads& heads) {
        backward_queries_segment<T>(p, heads, scratch, segment_sums(p, p.sums, heads));
        backward_keys_segment<T>(p, heads, scratch, segment_sums(p, p.later_sums, heads));
    });
}

template <class T, class Work>
void with_engine([[maybe_unused]] const Problem& p, const Scratch& scratch, Work work) {
#ifdef CLIP_LA_HAS_AMX
    if (AmxEngine<T>::fits(p) && AmxEngine<T>::is_available()) return work(AmxEngine<T>(scratch));
#endif
    work(VectorEngine(scratch));
}

template <class T>
void forward(const Problem& p) {
#pragma omp parallel num_threads(p.num_threads)
    {
        const Scratch scratch(p);
        if (p.causal)
            forward_causal<T>(p, scratch);
        else
            with_engine<T>(p, scratch, [&](const auto& engine) { forward_full<T>(p, scratch, engine); });
        finish_streams();
    }
}

template <class T>
void backward(const Problem& p) {
#pragma omp parallel num_threads(p.num_threads)
    {
        const Scratch scratch(p);
        if (p.causal)
            backward_causal<T>(p, scratch);
        else
            with_engine<T>(p, scratch, [&](const auto& engine) { backward_full<T>(p, scratch, engine); });
        finish_streams();
    }
}

}  // namespace
}  // namespace clip_la

extern "C" {

void clip_la_forward_float32(const clip_la::Problem* p) {
    clip_la::forward<float>(*p);
}
void clip_la_forward_bfloat16(const clip_la::Problem* p) {
    clip_la::forward<clip_la::BFloat16>(*p);
}
void clip_la_backward_float32(const clip_la::Problem* p) {
    clip_la::backward<float>(*p);
}
void clip_la_backward_bfloat16(const clip_la::Problem* p) {
    clip_la::backward<clip_la::BFloat16>(*p);
}
}
