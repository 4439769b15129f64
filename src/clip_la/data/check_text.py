"""A CheckReport as a few lines for people."""

from __future__ import annotations

from clip_la.data.check import CheckReport, PartReport

_MAX_PARTS = 20


def format_check(report: CheckReport) -> str:
    """Totals, every cause with its first example, and the shards that something is wrong with."""
    figures = report.to_dict()
    lines = [f"{figures['usable']:,} usable pairs of {figures['pairs']:,} in {figures['shards']:,} parts"]
    if figures["short_side"]:
        lines.append(
            "shorter side in pixels: " + ", ".join(f"{k} {v}" for k, v in figures["short_side"].items())
        )
    losses = report.losses
    for cause, count in losses.to_counts().items():
        first = next(loss for known, loss in losses.first.items() if known.value == cause)
        lines.append(f"  {count:>8,} {cause:<22} first: {first}")
    lines += _worst_parts(report)
    lines.append("nothing wrong" if report.is_clean else _verdict(report))
    return "\n".join(lines)


def _worst_parts(report: CheckReport) -> list[str]:
    wrong = sorted((part for part in report.parts if len(part.losses)), key=_num_lost, reverse=True)
    lines = [
        f"  {part.name}: {part.num_usable:,} usable"
        + (f" of {part.num_recorded:,} recorded" if part.num_recorded is not None else "")
        for part in wrong[:_MAX_PARTS]
    ]
    if len(wrong) > _MAX_PARTS:
        lines.append(f"  ... and {len(wrong) - _MAX_PARTS} more (all in --json)")
    return ["shards with losses:", *lines] if lines else []


def _num_lost(part: PartReport) -> int:
    return len(part.losses)


def _verdict(report: CheckReport) -> str:
    if report.num_usable == 0:
        return "NOTHING USABLE: a training run would stop"
    return "training can run: it would drop and count what is listed"
