"""Evaluators by config: each with its own clock, after the checkpoint is on disk; none ends a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clip_la import checkpoint
from clip_la.config import ConfigError, RunConfig
from clip_la.config_sources import load_run_config, read_yaml, write_yaml
from clip_la.exit_codes import EXIT_FINISHED
from clip_la.train import loop
from clip_la.train.evaluators import ScheduledEvaluator, build_evaluators
from clip_la.train.loop import train
from clip_la.train.run import Run

MakeConfig = Callable[..., RunConfig]
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220), "white": (240, 240, 240)}


class Evaluator:
    name = "mine"

    def run(self, bundle: Any) -> dict[str, Any]:
        return {}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        (tmp_path / "tree" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32), colour).save(tmp_path / "tree" / name / "0.png")
    (tmp_path / "tree" / "classnames.txt").write_text("\n".join(COLOURS))
    return tmp_path / "tree"


def records(config: RunConfig) -> list[dict[str, Any]]:
    lines = (Path(config.logs) / str(config.name) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def evaluated(config: RunConfig) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for record in records(config):
        if record["type"] == "eval":
            found.setdefault(record["name"], []).append(record["samples"])
    return found


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ({"every_epochs": 1}, [64, 128, 192, 256]),
        ({"every_epochs": 3}, [192]),
        ({"every_epochs": 0}, []),
        ({"every_samples": 96}, [96, 192]),
        ({"every_samples": 50}, [64, 112, 160, 208, 256]),
    ],
)
def test_clock(every: dict[str, int], expected: list[int]) -> None:
    scheduled = ScheduledEvaluator(Evaluator(), **every)
    steps = range(16, 257, 16)
    assert [after for after in steps if scheduled.is_due(after - 16, after, epoch_samples=64)] == expected


def test_flags_can_count_samples_in_place_of_epochs(make_config: MakeConfig, shards: str, tree: Path) -> None:
    config = make_config(
        val_data=shards,
        val_block_size=4,
        val_every_samples=96,
        zeroshot=str(tree),
        templates="plain",
        zeroshot_every_samples=128,
    )
    assert train(config) == EXIT_FINISHED
    assert evaluated(config) == {"validation": [96, 192, 256], "zeroshot/tree": [128, 256]}


@pytest.mark.parametrize("name", ["val_every_samples", "zeroshot_every_samples", "save_every_samples"])
def test_an_interval_of_no_samples_is_refused(name: str, make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')} is 0; expected more than 0"):
        make_config(**{name: 0})


def test_each_runs_at_its_own_clock_after_the_save(
    make_config: MakeConfig, shards: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [f"{name}/0.png\t{caption}" for name in COLOURS for caption in (f"{name} and {name}", name)]
    (tree / "pairs.tsv").write_text("\n".join(["image\tcaption", *pairs]))
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""
evaluators:
  - {{kind: zeroshot, data: {tree}, templates: plain, every_samples: 96}}
  - {{kind: zeroshot, name: rarely, data: {tree}, templates: photo, every_epochs: 0}}
  - {{kind: retrieval, data: {tree}/pairs.tsv, every-epochs: 2}}
  - {{kind: validation, name: held-out, data: "{shards}", block_size: 8, num_samples: 24}}
"""
    )
    config = make_config(**read_yaml(path), val_data=shards, val_block_size=4, val_frequency=3)
    newest: list[tuple[int | None, int]] = []
    original = loop.evaluate

    def evaluate(run: Run, evaluator: Evaluator) -> None:
        file = checkpoint.list_checkpoints(run.folder / "checkpoints")[0]
        newest.append((checkpoint.samples_of(file), run.progress.samples))
        original(run, evaluator)

    monkeypatch.setattr(loop, "evaluate", evaluate)

    assert train(config) == EXIT_FINISHED
    assert evaluated(config) == {
        "zeroshot/tree": [96, 192, 256],
        "rarely": [256],
        "retrieval/pairs": [128, 256],
        "held-out": [64, 128, 192, 256],
        "validation": [192, 256],
    }
    by_name = {record["name"]: record["metrics"] for record in records(config) if record["type"] == "eval"}
    assert by_name["held-out"]["num_negatives"] == 7
    assert by_name["held-out"]["num_pairs"] == 24
    assert by_name["retrieval/pairs"]["num_texts"] == 8
    assert by_name["rarely"]["num_images"] == 4
    assert len(newest) == 12
    assert all(saved == now for saved, now in newest), "an evaluation began before the checkpoint was on disk"


def test_the_list_survives_being_written(make_config: MakeConfig, tree: Path, tmp_path: Path) -> None:
    config = make_config(
        evaluators=json.dumps([{"kind": "zeroshot", "data": str(tree), "every_samples": 100}])
    )
    write_yaml(config, tmp_path / "config.yaml")
    assert load_run_config(tmp_path / "config.yaml", {}) == config


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"kind": "zeroshot"}], "evaluators, entry 1: data is missing"),
        ("zeroshot", "--evaluators is 'zeroshot'; expected a list of mappings"),
        ([3], r"--evaluators is \[3\]; expected a list of mappings"),
    ],
)
def test_a_list_that_cannot_be_used(make_config: MakeConfig, entries: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(evaluators=entries)


def test_equal_names_are_refused(make_config: MakeConfig, tree: Path) -> None:
    config = make_config(evaluators=[{"kind": "zeroshot", "data": str(tree)}] * 2)
    with pytest.raises(ConfigError, match="two evaluations are called zeroshot/tree"):
        build_evaluators(config)


def test_class_names_in_the_tree_need_no_flag(make_config: MakeConfig, tree: Path) -> None:
    config = make_config(zeroshot=str(tree), templates="plain")
    assert [scheduled.evaluator.name for scheduled in build_evaluators(config)] == ["zeroshot/tree"]
    (tree / "classnames.txt").unlink()
    with pytest.raises(ValueError, match=r"no class names: .* give --classnames"):
        build_evaluators(config)


def test_data_that_is_not_there_stops_a_start_but_not_a_continuation(
    make_config: MakeConfig, tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(evaluators=[{"kind": "zeroshot", "data": str(tree / "absent")}])
    with pytest.raises(ValueError, match="found nothing"):
        train(config)
    assert train(make_config(epochs=1)) == EXIT_FINISHED
    both = [*config.evaluators, {"kind": "zeroshot", "data": str(tree), "templates": "plain"}]
    with caplog.at_level(logging.ERROR):
        assert train(make_config(epochs=2, evaluators=both)) == EXIT_FINISHED
    assert "an evaluation is left out of this run: zeroshot of" in caplog.text
    assert evaluated(config) == {"zeroshot/tree": [64, 128]}
