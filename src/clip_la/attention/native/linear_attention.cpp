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

template <class T, class Engine>
void forward_full(const Problem& p, const Scratch& scratch, const Engine& engine) {
    if (p.num_segments == 1) {
        for_each_task(p, 1, [&](const Task& head) {
            const Sums sums = zeros(p, sums_in(p, scratch.sums(0)));
            sum_keys<T>(p, head, scratch, engine, sums, false);
            save_state(p, head, sums);
            read_sums<T>(p, head, scratch, engine, sums);
        });
        return;
    }
    for_each_task(p, p.num_segments, [&](const Task& task) {
        sum_keys<T>(p, task, scratch, engine, zeros(p, sums_at(p, p.sums, task)), false);
    });
    for_each_task(p, 1, [&](const Task& head) {
        total(p, p.sums, head);
        save_state(p, head, sums_at(p, p.sums, head));
    });
    for_each_task(p, p.num_segments, [&](const Task& task) {
        read_sums<T>(p, task, scratch, engine, sums_at(p, p.sums, {task.b, task.h, 0}));
    });
}

template <class T, class Engine>
void backward_full(const Problem& p, const Scratch& scratch, const Engine& engine) {
    if (p.num_segments == 1) {
        for_each_task(p, 1, [&](const Task& head) {
            const Sums sums = zeros(p, sums_in(p, scratch.sums(0)));
            backward_queries<T>(p, head, scratch, engine, sums);
            backward_keys<T>(p, head, scratch, engine, sums);
        });
        return;
    }
    for_each_task(p, p.num_segments, [&](const Task& task) {
        backward_queries<T>(p, task, scratch, engine, zeros(p, sums_at(p, p.later_sums, task)));
    });
    for_each_task(p, 1, [&](const Task& head) { total(p, p.later_sums, head); });
    for_each_task(p, p.num_segments, [&](const Task& task) {
        backward_keys<T>(p, task, scratch, engine, sums_at(p, p.later_sums, {task.b, task.h, 0}));
    });
}

template <class T>
void forward_causal(const Problem& p, const Scratch& scratch) {
    if (p.num_segments == 1) {
        for_each_task(p, 1, [&](const Task& head) {
            forward_segment<T>(p, head, scratch, zeros(p, sums_in(p, scratch.sums(0))));
        });
        return;
    }
    const VectorEngine engine(scratch);
    for_each_task(p, p.num_segments, [&](const Task& task) {
        sum_keys<T>(p, task, scratch, engine, zeros(p, sums_at(p, p.sums, task)), false);
    });
    for_each_task(p, 1, [&](const Task& head) { exclusive_sums(p, p.sums, head, false, scratch.sums(0)); });
    for_each_task(p, p.num_segments,
                  [&](const Task& task) { forward_segment<T>(p, task, scratch, sums_at(p, p.sums, task)); });
}

template <class T>
void backward_causal(const Problem& p, const Scratch& scratch) {
    if (p.num_segments == 1) {
        for_each_task(p, 1, [&](const Task& head) {
            backward_queries_segment<T>(p, head, scratch, zeros(p, sums_in(p, scratch.sums(0))));
            backward_keys_segment<T>(p, head, scratch, zeros(p, sums_in(p, scratch.sums(1))));
        });
        return;
    }
    const VectorEngine engine(scratch);
    for_each_task(p, p.num_segments, [&](const Task& task) {
        sum_keys<T>(p, task, scratch, engine, zeros(p, sums_at(p, p.sums, task)), true);
        sum_queries<T>(p, task, scratch, zeros(p, sums_at(p, p.later_sums, task)));
    });
    for_each_task(p, 1, [&](const Task& head) {
        exclusive_sums(p, p.sums, head, false, scratch.sums(0));
        exclusive_sums(p, p.later_sums, head, true, scratch.sums(0));
    });
    for_each_task(p, p.num_segments, [&](const Task& task) {
        backward_queries_segment<T>(p, task, scratch, sums_at(p, p.sums, task));
        backward_keys_segment<T>(p, task, scratch, sums_at(p, p.later_sums, task));
    });
}

// AMX has bfloat16's precision in every factor but not float32's, which Eq. 4's differences need.
template <class T, class Work>
void with_engine([[maybe_unused]] const Problem& p, const Scratch& scratch, Work work) {
#ifdef CLIP_LA_HAS_AMX
    if (std::is_same_v<T, BFloat16> && !p.has_denominator && AmxEngine::fits(p) && AmxEngine::is_available())
        return work(AmxEngine(scratch));
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
