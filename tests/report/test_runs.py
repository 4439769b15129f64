"""Reading a run folder: what holds after kills and resumes, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from run_writer import NewRun

from clip_la.report.runs import RunError, read_run, read_runs
from clip_la.report.watched import EVALS_FILE


def test_lines_become_points(new_run: NewRun) -> None:
    run = new_run("a").start().train(100, 3.5, skipped_steps=1, lost_samples=2, data_wait=0.25)
    run.train(200, 2.5).epoch(200, 0, 3.0, corrupt=2).eval(200, "validation", loss=2.0).end(200)
    read = read_run(run.folder)
    assert [(p.samples, p.loss) for p in read.train] == [(100, 3.5), (200, 2.5)]
    assert (read.train[0].skipped_steps, read.train[0].lost_samples, read.train[0].data_wait) == (1, 2, 0.25)
    assert [(p.samples, p.loss, p.losses) for p in read.epochs] == [(200, 3.0, {"corrupt": 2})]
    assert [(p.name, p.metrics) for p in read.evals] == [("validation", {"loss": 2.0})]
    assert read.end is not None
    assert read.end.reason == "finished"
    assert read.samples == 200
    assert read.seconds == 5.0
    assert read.attention.kind == "eq7"


def test_resume_cancels_what_was_undone(new_run: NewRun) -> None:
    run = new_run("a").start().train(100, 3.0).train(200, 2.9).epoch(200, 0, 2.95).train(300, 2.8)
    run.eval(300, "validation", loss=9.0).zeroshot(300, 0.1).end(300, "signal")
    run.start(200, resumed=True).train(300, 2.7).eval(300, "validation", loss=1.0)
    read = read_run(run.folder)
    assert [(p.samples, p.loss) for p in read.train] == [(100, 3.0), (200, 2.9), (300, 2.7)]
    assert [p.samples for p in read.epochs] == [200]
    assert [(p.name, p.metrics.get("loss")) for p in read.evals] == [("validation", 1.0)]
    assert read.end is None, "the end of the first session isn't the end of the run"
    assert (read.num_resumes, read.num_undone_lines, read.samples) == (1, 3, 300)


def test_second_resume_cancels_lines_of_the_first(new_run: NewRun) -> None:
    run = new_run("a").start().train(100, 3.0).train(200, 2.0)
    run.start(100, resumed=True).train(200, 2.1).train(300, 1.9)
    run.start(200, resumed=True).train(300, 1.8)
    read = read_run(run.folder)
    assert [(p.samples, p.loss) for p in read.train] == [(100, 3.0), (200, 2.1), (300, 1.8)]
    assert (read.num_resumes, read.num_undone_lines) == (2, 2)


def test_samples_of_a_run_that_resumed_and_logged_nothing_yet(new_run: NewRun) -> None:
    run = new_run("a").start().train(100, 3.0).train(200, 2.0).start(150, resumed=True)
    assert read_run(run.folder).samples == 150


def test_evaluation_repeated_at_the_resume_replaces_the_first(new_run: NewRun) -> None:
    run = new_run("a").start().train(100, 3.0).zeroshot(100, 0.2)
    run.start(100, resumed=True).zeroshot(100, 0.3)
    assert [p.metrics["top1"] for p in read_run(run.folder).evals] == [0.3]


def watched(samples: int, time: float, kind: str = "eval", **fields: object) -> str:
    line = {"type": kind, "name": "zeroshot/x", "samples": samples, "time": time, "checkpoint": "x.pt"}
    return json.dumps({**line, **fields}) + "\n"


def test_evaluations_of_a_watcher_count_like_those_of_training(new_run: NewRun) -> None:
    run = new_run("a").start().train(100, 3.0).train(200, 2.0).zeroshot(200, 0.4, name="zeroshot/x").end(200)
    lines = [
        watched(100, run.time + 9, metrics={"top1": 0.1}),
        watched(150, run.time + 9, kind="eval_failed", error="damaged"),
        watched(200, run.time + 9, metrics={"top1": 0.3}),
        '{"type": "eval", "sam',
    ]
    (run.folder / EVALS_FILE).write_text("".join(lines))
    read = read_run(run.folder)
    assert [(p.samples, p.name, p.metrics["top1"]) for p in read.evals] == [
        (100, "zeroshot/x", 0.1),
        (200, "zeroshot/x", 0.4),
    ]
    assert [(p.samples, p.name) for p in read.failed_evals] == [(150, "zeroshot/x")]
    assert (read.end is not None, read.last_time) == (True, run.time)


def test_a_watcher_s_evaluation_of_undone_weights_is_left_out(new_run: NewRun) -> None:
    run = new_run("a").start().train(100, 3.0).train(200, 2.0)
    before = run.time
    run.start(100, resumed=True).train(200, 1.9)
    lines = [watched(samples, before, metrics={}) for samples in (100, 200)]
    (run.folder / EVALS_FILE).write_text("".join([*lines, watched(200, run.time, metrics={"top1": 0.2})]))
    assert [(p.samples, dict(p.metrics)) for p in read_run(run.folder).evals] == [
        (100, {}),
        (200, {"top1": 0.2}),
    ]


def test_start_that_is_no_resume_begins_again(new_run: NewRun) -> None:
    run = new_run("a").start().train(100, 3.0).start().train(50, 4.0)
    read = read_run(run.folder)
    assert [(p.samples, p.loss) for p in read.train] == [(50, 4.0)]
    assert (read.num_restarts, read.num_resumes) == (1, 0)


@pytest.mark.parametrize(
    "torn", ['{"type": "train", "samp', '{"type": "train"', "\x00\x00\x00", '{"a": "\udcff']
)
def test_torn_last_line_is_left_out(new_run: NewRun, torn: str) -> None:
    run = new_run("a").start().train(100, 3.0)
    with (run.folder / "metrics.jsonl").open("ab") as file:
        file.write(torn.encode("utf-8", "surrogateescape"))
    read = read_run(run.folder)
    assert [p.samples for p in read.train] == [100]
    assert read.num_torn_lines == 1


def test_line_torn_by_a_kill_before_a_resume_is_left_out(new_run: NewRun) -> None:
    run = new_run("a").start().train(100, 3.0).raw('{"type": "train", "samples": 20\n')
    run.start(100, resumed=True).train(200, 2.0)
    read = read_run(run.folder)
    assert [p.samples for p in read.train] == [100, 200]
    assert read.num_torn_lines == 1


def test_corrupt_line_inside_is_named(new_run: NewRun) -> None:
    run = new_run("a").start().train(100, 3.0).raw("not json\n").train(200, 2.0)
    with pytest.raises(RunError, match=r"metrics\.jsonl: line 3 is not JSON"):
        read_run(run.folder)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[1, 2]", "line 2 has no type"),
        ('{"type": "train", "samples": 1}', "line 2 has no type"),
        ('{"type": "train", "samples": NaN, "time": 1}', "line 2 has no type"),
        ('{"type": "train", "samples": 1, "time": 1}', r"line 2 \(train\) has no 'loss'"),
        ('{"type": "train", "samples": 1, "time": 1, "loss": "low"}', r"line 2 \(train\) has 'loss' = 'low'"),
        ('{"type": "eval", "samples": 1, "time": 1, "name": "v", "metrics": 3}', r"has 'metrics' = 3"),
    ],
)
def test_line_of_the_wrong_shape_is_named(new_run: NewRun, line: str, problem: str) -> None:
    run = new_run("a").start().raw(line + "\n").train(200, 2.0)
    with pytest.raises(RunError, match=problem):
        read_run(run.folder)


def test_first_line_must_be_a_start(new_run: NewRun) -> None:
    run = new_run("a").train(100, 3.0)
    with pytest.raises(RunError, match="line 1 is 'train'; expected a run_start"):
        read_run(run.folder)


def test_line_of_an_unknown_type_is_no_error(new_run: NewRun) -> None:
    run = new_run("a").start().line("weather", 50, sunny=1.0).train(100, 3.0)
    assert len(read_run(run.folder).train) == 1


@pytest.mark.parametrize("written", ["null", "NaN", "Infinity"])
def test_loss_that_is_not_finite_is_kept_as_such(new_run: NewRun, written: str) -> None:
    run = new_run("a").start().raw(f'{{"type": "train", "samples": 10, "time": 1.7e9, "loss": {written}}}\n')
    assert not math.isfinite(read_run(run.folder).train[0].loss)


def test_samples_that_go_back_without_a_resume_are_pointed_out(new_run: NewRun) -> None:
    run = new_run("a").start().train(100, 3.0).train(200, 2.0).train(150, 2.5)
    read = read_run(run.folder)
    assert read.backward_lines == (4,)
    assert [p.samples for p in read.train] == [100, 150, 200]


def test_empty_run_is_refused(new_run: NewRun) -> None:
    with pytest.raises(RunError, match="is empty"):
        read_run(new_run("a").folder)


def test_run_without_a_training_line_cannot_be_compared(new_run: NewRun) -> None:
    with pytest.raises(RunError, match="no training line yet"):
        read_runs([new_run("a").start().folder])


def test_folders_that_are_no_runs(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run("a").start().train(100, 3.0)
    with pytest.raises(RunError, match="no such folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RunError, match="contains the runs a: name those"):
        read_run(run.folder.parent)
    (run.folder / "config.yaml").unlink()
    with pytest.raises(RunError, match=r"none of config\.yaml, config\.json"):
        read_run(run.folder)
    (run.folder / "config.json").write_text('{"model": {"width": 3, "heads": {}}, "lr": 0.1}')
    assert read_run(run.folder).config == {"model.width": 3, "model.heads": {}, "lr": 0.1}
    (run.folder / "config.json").write_text("[1")
    with pytest.raises(RunError, match="cannot be read"):
        read_run(run.folder)


def test_names_are_made_unique(new_run: NewRun) -> None:
    folders = [new_run(name).start().train(100, 3.0).folder for name in ("x/nano", "y/nano")]
    assert [run.name for run in read_runs(folders)] == ["x/nano", "y/nano"]
    with pytest.raises(RunError, match="more than once"):
        read_runs([folders[0], folders[0]])
    with pytest.raises(RunError, match="no run folder"):
        read_runs([])
