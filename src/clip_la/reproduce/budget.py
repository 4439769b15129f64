"""How much of everything the CPU scale takes: in full, and for a smoke test."""

from __future__ import annotations

from dataclasses import dataclass

from clip_la.reproduce.kinds import RECOMMENDED_KIND


@dataclass(frozen=True)
class Budget:
    """What is measured and trained.

    Attributes:
        lengths: tokens that attention is timed at.
        bench_seconds: of repeats a length and kind of pass.
        max_call_seconds: an operator isn't run where one call would take longer.
        num_pairs: training pairs generated.
        convergence_samples: samples of each training of the convergence panel.
        num_points: held-out losses along each of them.
        seeds: of the convergence panel.
        fit_samples: samples of each training of the fit.
        fit_kinds: kinds of attention in the fit.
        fit_widths: widths of the models in the fit.
        fit_seeds: of the fit.
    """

    lengths: tuple[int, ...]
    bench_seconds: float
    max_call_seconds: float
    num_pairs: int
    convergence_samples: int
    num_points: int
    seeds: tuple[int, ...]
    fit_samples: int
    fit_kinds: tuple[str, ...]
    fit_widths: tuple[int, ...]
    fit_seeds: tuple[int, ...]


FULL = Budget(
    lengths=(256, 1024, 4096, 16384, 32768, 65536, 262144),
    bench_seconds=4.0,
    max_call_seconds=30.0,
    num_pairs=16_000,
    convergence_samples=16_000,
    num_points=8,
    seeds=(0, 1, 2),
    fit_samples=16_000,
    fit_kinds=("softmax", "eq7", RECOMMENDED_KIND),
    fit_widths=(32, 64, 96, 128, 192),
    fit_seeds=(0,),
)

QUICK = Budget(
    lengths=(256, 1024, 4096),
    bench_seconds=0.5,
    max_call_seconds=10.0,
    num_pairs=2_000,
    convergence_samples=2_560,
    num_points=2,
    seeds=(0, 1),
    fit_samples=1_280,
    fit_kinds=("softmax", "eq7"),
    fit_widths=(32, 64, 96),
    fit_seeds=(0,),
)
