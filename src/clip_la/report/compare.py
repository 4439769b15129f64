"""Runs side by side: their numbers, how their configs differ, and what speaks against comparing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clip_la.report.differences import ConfigDifference, config_difference
from clip_la.report.facts import ModelFacts, model_facts
from clip_la.report.findings import Finding, find_problems
from clip_la.report.kinds import Kind, PairedDifference, find_kinds, paired_differences
from clip_la.report.runs import Run
from clip_la.report.summary import RunSummary, summarise


@dataclass(frozen=True)
class Comparison:
    """Everything that is known of runs side by side.

    Attributes:
        facts: run name -> its model's parameters and FLOPs.
        kinds: runs that differ only in their seed, grouped.
        paired: the kinds against a baseline, seed by seed.
    """

    summaries: tuple[RunSummary, ...]
    facts: Mapping[str, ModelFacts]
    config: ConfigDifference
    kinds: tuple[Kind, ...]
    paired: tuple[PairedDifference, ...]
    findings: tuple[Finding, ...]

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that make numbers wrong or not comparable."""
        return tuple(finding for finding in self.findings if finding.severity == "warning")


def compare(
    runs: Sequence[Run], now: float | None = None, left_out: Mapping[str, str] | None = None
) -> Comparison:
    """Compare runs.

    Args:
        runs: with unique names.
        now: unix seconds, as in `summarise`.
        left_out: runs that could not be read: name -> problem.
    """
    summaries = tuple(summarise(run, now) for run in runs)
    config = config_difference(runs)
    kinds = find_kinds(runs, {summary.name: summary.attention for summary in summaries})
    return Comparison(
        summaries=summaries,
        facts={run.name: model_facts(run) for run in runs},
        config=config,
        kinds=kinds,
        paired=paired_differences(kinds, summaries),
        findings=find_problems(runs, summaries, config, kinds, left_out or {}),
    )
