"""How long the CPU scale should take on idle cores, before anything is known of this machine.

Rates are of one core of a machine with AVX-512 and bfloat16 products; another machine differs.
"""

from __future__ import annotations

from clip_la.model_size import model_shape, training_flops
from clip_la.reproduce.budget import Budget
from clip_la.reproduce.kinds import MODELS, sized_model
from clip_la.reproduce.settings import BATCH_SIZE

_STARTUP_SECONDS = 10.0  # of a training: imports, model, the last evaluation
_PAIRS_A_SECOND = 600.0  # generated on one core
_NANO_RATES = {"softmax": 150.0}  # samples a second of a nano model; of linear ones the next
_LINEAR_NANO_RATE = 200.0
_FIXED_SECONDS = {"softmax": 1.45e-3}  # a sample, whatever the width; of linear models the next
_LINEAR_FIXED_SECONDS = 0.55e-3
_FLOPS_A_SECOND = 80e9
_MAX_BENCH_CALLS = 3  # of an operator that is slow: to warm up, to be timed, for its memory


def sample_seconds(kind: str) -> float:
    """Of a nano model's training, on one core."""
    return 1 / _NANO_RATES.get(kind, _LINEAR_NANO_RATE)


def sized_sample_seconds(kind: str, width: int) -> float:
    """Of a training of a model of the fit, on one core."""
    flops = training_flops(model_shape(sized_model(kind, width)), BATCH_SIZE, recompute=False)
    return _FIXED_SECONDS.get(kind, _LINEAR_FIXED_SECONDS) + flops / _FLOPS_A_SECOND


def estimated_seconds(budget: Budget, processes: int) -> dict[str, float]:
    """Panel -> seconds on as many idle cores as there are processes."""
    nano = [sample_seconds(kind) * budget.convergence_samples for kind in MODELS for _ in budget.seeds]
    sized = [
        sized_sample_seconds(kind, width) * budget.fit_samples
        for kind in budget.fit_kinds
        for width in budget.fit_widths
        for _ in budget.fit_seeds
    ]
    num_passes = 2  # forward alone, and with backward
    timing = num_passes * (
        len(budget.lengths) * budget.bench_seconds + _MAX_BENCH_CALLS * budget.max_call_seconds
    )
    return {
        "time": timing,
        "convergence": budget.num_pairs / _PAIRS_A_SECOND + _side_by_side(nano, processes),
        "fit": _side_by_side(sized, processes),
    }


def _side_by_side(seconds: list[float], processes: int) -> float:
    return sum(each + _STARTUP_SECONDS for each in seconds) / min(processes, len(seconds))
