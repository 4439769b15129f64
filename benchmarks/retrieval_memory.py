"""Peak memory of retrieval over N images and N captions of random features: linear in N.

    python benchmarks/retrieval_memory.py            # N = 12,500, 25,000, 50,000

Each N runs in a process of its own. All N x N scores at once would take 4 N^2 bytes, which is printed beside.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import torch

from clip_la.evaluate.retrieval import retrieval_metrics

MIB = 2**20


def measure(num_pairs: int, dimension: int) -> None:
    """Print a line on one N."""
    generator = torch.Generator().manual_seed(0)
    images = torch.nn.functional.normalize(torch.randn(num_pairs, dimension, generator=generator), dim=1)
    noise = torch.randn(num_pairs, dimension, generator=generator)
    texts = torch.nn.functional.normalize(images + noise, dim=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    metrics = retrieval_metrics(images, texts, torch.arange(num_pairs))
    seconds = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(
        f"N {num_pairs:7,d}: {grown / MIB:7.0f} MiB beside the features' {8 * images.numel() / MIB:.0f} MiB "
        f"(all scores: {4 * num_pairs**2 / MIB:,.0f} MiB), {seconds:.0f} s, "
        f"median rank {metrics['image_to_text_median_rank']:g}"
    )


def main() -> None:
    """Measure each N in a fresh process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-pairs", type=int, nargs="+", default=[12_500, 25_000, 50_000])
    parser.add_argument("--dimension", type=int, default=64)
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for num_pairs in arguments.num_pairs:
        if arguments.in_this_process:
            measure(num_pairs, arguments.dimension)
            continue
        given = ["--num-pairs", str(num_pairs), "--dimension", str(arguments.dimension), "--in-this-process"]
        subprocess.run([sys.executable, __file__, *given], check=True)


if __name__ == "__main__":
    main()
