"""Summaries and comparisons: right numbers from hand-made lines, and wrong runs made visible."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from run_writer import FinishedRun, NewRun, RunWriter

from clip_la.attention.spec import AttentionSpec
from clip_la.bundle import resolve_model_config
from clip_la.model_size import count_tower_parameters, model_shape, training_flops
from clip_la.report.compare import compare
from clip_la.report.differences import ABSENT
from clip_la.report.runs import read_run, read_runs
from clip_la.report.summary import RunSummary, attention_label, smooth_losses, summarise


def summary_of(run: RunWriter, seconds_later: float = 1.0) -> RunSummary:
    return summarise(read_run(run.folder), now=run.time + seconds_later)


def messages(folders: list[Path], severity: str = "warning") -> str:
    return "\n".join(f.message for f in compare(read_runs(folders)).findings if f.severity == severity)


def test_training_loss_is_the_mean_of_the_last_tenth_by_samples(new_run: NewRun) -> None:
    run = new_run("a").start().train(800, 5.0).train(900, 4.0).train(930, 2.0).train(1000, 1.0)
    assert summary_of(run).train_loss == pytest.approx((30 * 2.0 + 70 * 1.0) / 100)


def test_smoothed_loss_leaves_out_what_is_not_finite(new_run: NewRun) -> None:
    run = new_run("a").start().train(980, 5.0).train(990, None).train(1000, 3.0)
    smooth = smooth_losses(read_run(run.folder).train)
    assert smooth[0] == 5.0
    assert math.isnan(smooth[1])
    assert smooth[2] == pytest.approx((980 * 5.0 + 10 * 3.0) / 990)


def test_numbers_of_a_run(new_run: NewRun) -> None:
    run = new_run("a").start(num_parameters=1234, samples_total=300)
    run.train(100, 3.0, samples_per_second=10.0, data_wait=0.1)
    run.train(200, 2.0, samples_per_second=30.0, data_wait=0.3, skipped_steps=1)
    run.epoch(200, 0, 2.5, corrupt=2, empty=1)
    run.eval(200, "validation", loss=1.5).zeroshot(200, 0.6)
    run.train(300, 1.0, samples_per_second=20.0, data_wait=None, skipped_steps=2, lost_samples=4)
    run.epoch(300, 1, 1.1, corrupt=3, empty=1).eval(300, "validation", loss=1.7).zeroshot(300, 0.5).end(300)
    summary = summary_of(run)
    assert (summary.num_parameters, summary.samples, summary.samples_total) == (1234, 300, 300)
    assert (summary.epoch_loss, summary.samples_per_second) == (1.1, 20.0)
    assert summary.data_wait == pytest.approx(0.2)
    assert (summary.skipped_steps, summary.lost_samples) == (2, 4)
    assert summary.lost_by_cause == {"corrupt": 3, "empty": 1}
    (validation,) = summary.validation
    assert (validation.best, validation.best_samples, validation.last) == (1.5, 200, 1.7)
    (zeroshot,) = summary.zeroshot
    assert (zeroshot.top1, zeroshot.best_top1, zeroshot.chance) == (0.5, 0.6, 1 / 40)
    assert (zeroshot.top1_low, zeroshot.top1_high) == (0.47, 0.54)


def test_loss_that_ended_not_finite_is_not_hidden_by_earlier_ones(new_run: NewRun) -> None:
    run = new_run("a").start().train(900, 2.0).train(1000, None).eval(900, "v", loss=2.0)
    summary = summary_of(run.eval(1000, "v", loss=None))
    assert math.isnan(summary.train_loss)
    assert summary.num_non_finite == 1
    assert summary.validation[0].best == 2.0
    assert math.isnan(summary.validation[0].last)


def test_state(new_run: NewRun) -> None:
    run = new_run("a").start().train(100, 3.0)
    assert summary_of(run).state == "running"
    assert summary_of(run, 3 * 3600).state == "stopped (no end logged, silent for 3 h)"
    run.end(100, "signal")
    assert summary_of(run).state == "stopped (signal)"
    run.start(100, resumed=True).train(200, 2.0)
    assert summary_of(run).state == "running"
    assert summary_of(run.end(200)).state == "finished"


@pytest.mark.parametrize(
    ("config", "label"),
    [
        (None, "softmax"),
        ("eq4", "Eq. 4"),
        ({"kind": "eq4", "normalise_qk": False}, "Eq. 4, raw q and k"),
        ({"kind": "eq7", "gain": "learned", "scale": "length"}, "Eq. 7 + gain, 1/N"),
        ({"kind": "eq7", "scale": "length", "centre_values": True}, "Eq. 7, 1/N, centred"),
        (
            {"kind": "eq7", "gain": 8, "scale": 1 / 197, "output_norm": "rms"},
            "Eq. 7 + gain 8, scale 0.00508, RMS norm",
        ),
    ],
)
def test_attention_labels(config: object, label: str) -> None:
    assert attention_label(AttentionSpec.from_config(config)) == label  # type: ignore[arg-type]


def test_healthy_twins_have_no_warning(finished_run: FinishedRun) -> None:
    folders = [
        finished_run("softmax", {"model": "nano"}, attention=None),
        finished_run("la", {"model": "nano-LA"}),
    ]
    comparison = compare(read_runs(folders))
    assert [finding.severity for finding in comparison.findings] == ["note"]
    assert "one seed a kind" in comparison.findings[0].message
    assert set(comparison.config.differs) == {"model", "name"}
    assert comparison.config.differs["model"] == {"softmax": "nano", "la": "nano-LA"}
    assert comparison.config.equal["lr"] == 0.001
    assert comparison.config.equal["versions.torch"] == "2.9"


def test_key_that_one_config_lacks_differs(finished_run: FinishedRun) -> None:
    folders = [finished_run("a"), finished_run("b", {"new_option": None})]
    assert compare(read_runs(folders)).config.differs["new_option"] == {"a": ABSENT, "b": None}


@pytest.mark.parametrize(
    ("config", "start", "expected"),
    [
        ({"batch_size": 64}, {"global_batch_size": 64}, "the global batch size: 128 (a); 64 (b)"),
        (
            {"train_data": "other.tar"},
            {},
            "the data (train_data): shards/{00000..00007}.tar (a); other.tar (b)",
        ),
        ({"epochs": 3}, {"samples_total": 1500}, "the planned number of samples: 1 000 (a); 1 500 (b)"),
        ({"lr": 0.002}, {}, "lr: 0.001 (a); 0.002 (b)"),
    ],
)
def test_runs_that_are_not_comparable(
    finished_run: FinishedRun, config: dict[str, object], start: dict[str, object], expected: str
) -> None:
    found = messages([finished_run("a"), finished_run("b", config, **start)])
    assert f"The runs differ in {expected}." in found


def test_runs_at_different_progress(finished_run: FinishedRun, new_run: NewRun) -> None:
    short = new_run("b").start().train(500, 2.0).end(500)
    found = messages([finished_run("a"), short.folder])
    assert "the number of samples seen: 1 000 (a); 500 (b)" in found
    assert "b: says it is finished, but saw only 500 of 1 000 samples." in found


def test_differences_that_only_need_a_note(finished_run: FinishedRun) -> None:
    folders = [finished_run("a"), finished_run("b", num_parameters=9_000_000, versions={"torch": "2.6"})]
    assert messages(folders) == ""
    notes = messages(folders, "note")
    assert "The models differ in size" in notes
    assert "versions.torch" in notes


def test_housekeeping_is_no_finding(finished_run: FinishedRun) -> None:
    folders = [finished_run("a", {"workers": 1}), finished_run("b", {"workers": 2})]
    comparison = compare(read_runs(folders))
    assert comparison.warnings == ()
    assert [finding.topic for finding in comparison.findings] == ["seed"]
    assert "workers" in comparison.config.differs


def test_accuracies_over_different_sets_are_not_comparable(
    finished_run: FinishedRun, new_run: NewRun
) -> None:
    other = new_run("b").start().train(1000, 1.0)
    other.eval(1000, "zeroshot/held_out", top1=0.4, top1_low=0.3, num_images=50, num_classes=40).end(1000)
    assert "num_images of held_out: 400 (a); 50 (b)" in messages([finished_run("a"), other.folder])


def test_what_is_wrong_with_one_run(new_run: NewRun) -> None:
    run = new_run("bad").start().train(100, 4.9, data_wait=0.5).train(200, None, data_wait=0.5)
    run.train(150, 4.9, skipped_steps=3, lost_samples=7).epoch(200, 0, 4.9, corrupt=7)
    run.zeroshot(200, 0.02).train(300, 4.9, skipped_steps=3, lost_samples=7, data_wait=0.5).end(
        300, "non_finite"
    )
    found = messages([run.folder])
    for expected in (
        "its loss was not finite in 1 log interval(s)",
        "skipped 3 step(s)",
        "lost 7 sample(s) that could not be used (corrupt 7)",
        "is not finished: stopped (non_finite), 300 of 1 000 samples",
        "its training loss 4.900 is not below guessing (ln 128 = 4.852)",
        "go back in samples at line(s) 4 without a resume",
        "waited for data 38 % of the time",
        "its top-1 on held_out can't be told from chance: 2.0 % against 2.50 %",
        "was last evaluated on held_out at 200 of its 300 samples",
    ):
        assert expected in found


def test_evaluation_that_failed_or_left_images_out(new_run: NewRun) -> None:
    run = new_run("a").start().train(1000, 1.0).line("eval_failed", 1000, name="validation")
    run.eval(1000, "zeroshot/x", top1=0.5, top1_low=0.4, chance=0.1, num_unreadable=3).end(1000)
    found = messages([run.folder])
    assert "a: validation failed at 1 000 samples; out.log says why." in found
    assert "a: 3 image(s) of x could not be read" in found
    run.start(1000, resumed=True).eval(1000, "validation", loss=1.0).end(1000)
    assert "validation failed" not in messages([run.folder])


def test_guessing_level_is_that_of_the_softmax_loss(new_run: NewRun) -> None:
    folders = [
        new_run(f"siglip-{flag}", siglip=flag).start().train(1000, 6.0).end(1000).folder
        for flag in (False, True)
    ]
    assert "not below guessing" in messages(folders[:1])
    assert "not below guessing" not in messages(folders[1:])


def test_resumed_and_restarted_runs_say_so(new_run: NewRun) -> None:
    run = new_run("r").start().train(100, 3.0).start().train(100, 3.0).train(200, 2.5)
    run.raw('{"type": "tra\n').start(100, resumed=True).train(1000, 2.0).end(1000)
    assert "r: was begun again from nothing 1 time(s)" in messages([run.folder])
    notes = messages([run.folder], "note")
    assert "r: was resumed 1 time(s); 2 line(s) and 2 s of training were undone" in notes
    assert "1 torn line(s)" in notes


def test_what_a_tired_reader_would_miss(finished_run: FinishedRun, new_run: NewRun) -> None:
    """Other templates, classes or negatives; an evaluation that one run lacks; pairs left out."""
    other = new_run("b").start().train(1000, 1.0)
    other.eval(1000, "validation", loss=1.2, num_samples=500, num_negatives=127, num_unusable=3)
    other.eval(1000, "zeroshot/held_out", top1=0.4, num_classes=40, templates_hash="x", class_list_hash="y")
    first = new_run("a").start().train(1000, 1.0)
    first.eval(1000, "validation", loss=1.2, num_samples=500, num_negatives=255)
    first.eval(1000, "zeroshot/held_out", top1=0.4, num_classes=40, templates_hash="t", class_list_hash="c")
    first.eval(1000, "retrieval", **{"image_to_text_recall@1": 0.1})
    found = messages([first.end(1000).folder, other.end(1000).folder])
    for expected in (
        "differ in num_negatives of validation: 255 (a); 127 (b)",
        "differ in templates_hash of held_out: t (a); x (b)",
        "differ in class_list_hash of held_out: c (a); y (b)",
        "retrieval was never evaluated in b",
        "3 pair(s) of validation could not be read",
    ):
        assert expected in found


def test_a_loss_that_rose_again_and_a_run_that_slowed_down(new_run: NewRun) -> None:
    run = new_run("a").start()
    for samples in range(100, 1001, 100):
        run.train(samples, 1.0 if samples < 700 else 2.0, samples_per_second=100 if samples < 800 else 40)
        run.eval(samples, "validation", loss=1.0 if samples < 600 else 1.5)
    run.end(1000)
    found = messages([run.folder])
    assert "its smoothed training loss rose again, from 1.000 at 600 samples to 2.000" in found
    assert "its loss on validation rose again, from 1.000 at 100 samples to 1.500" in found
    assert "slowed down: 40 samples/s in its last quarter, 100 over all" in messages([run.folder], "note")


def test_time_counts_training_over_restarts_and_no_gaps(new_run: NewRun) -> None:
    run = new_run("a").start()  # a second a line
    run.train(100, 3.0).train(200, 2.5).eval(200, "validation", loss=2.0).train(300, 2.4)
    run.time += 10_000
    run.start(200, resumed=True).train(300, 2.4).train(400, 2.3).end(400)
    summary = summary_of(run)
    assert summary.hours * 3600 == pytest.approx(7)
    assert summary.training_hours * 3600 == pytest.approx(5), "without the evaluation and the end"
    assert summary.undone_hours * 3600 == pytest.approx(1)
    assert [point.seconds for point in read_run(run.folder).train] == pytest.approx([1, 2, 4, 5])


def test_flops_are_those_of_the_plan_and_unknown_where_the_model_is(new_run: NewRun) -> None:
    known = new_run("known", model="ViT-nano-8-LA", force_image_size=32)
    known.start(sample_flops=None, tower_parameters=None, num_parameters=8_370_433).train(100, 1.0)
    unknown = new_run("unknown", model="nowhere").start(sample_flops=None).train(100, 1.0)
    liar = new_run("liar", model="ViT-nano-8-LA").start(sample_flops=None, num_parameters=99).train(100, 1.0)
    facts = compare(read_runs([known.folder, unknown.folder, liar.folder])).facts
    config = resolve_model_config("ViT-nano-8-LA", force_image_size=32)
    assert facts["known"].sample_flops == training_flops(model_shape(config), 128, recompute=False)
    assert facts["known"].parameters == {**count_tower_parameters(config), "total": 8_370_433}
    assert facts["unknown"].sample_flops is None
    assert "no model named 'nowhere'" in str(facts["unknown"].why_no_flops)
    assert "not the same model" in str(facts["liar"].why_no_flops)
