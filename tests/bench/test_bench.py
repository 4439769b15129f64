"""`clip-la bench` on small sizes: what it measures, what it refuses, what it writes."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clip_la.bench import sweep as sweep_module
from clip_la.bench.models import Step, attention_share, build_model, step_call
from clip_la.bench.operators import Shape, available_operators, error_of
from clip_la.bench.sweep import ErrorGateError, OperatorSweep, Row, fitted_slope, gate_errors, sweep_operators
from clip_la.bench.timing import Times, available_memory, peak_memory, time_calls
from clip_la.bench.write import speedup
from clip_la.cli import main

CPU = torch.device("cpu")
SWEEP = OperatorSweep((16, 64), (2, 1), 2, 16, (torch.float32,), False, budget=0.0, max_call=60.0)


def row(subject: str, size: int, seconds: float, level: str = "operator") -> Row:
    return Row(level, subject, "forward", "float32", False, 1, size, seconds, seconds, seconds, 1)


def only(rows: Iterable[Row], subject: str) -> list[Row]:
    return [row for row in rows if row.subject == subject]


def test_repeats_are_interleaved() -> None:
    order: list[str] = []
    time_calls({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, budget=0.01)
    assert order[:4] == ["a", "b", "a", "b"]
    assert order.count("a") == order.count("b") > 3


def test_quartiles() -> None:
    assert Times.of([3.0, 1.0, 2.0, 5.0, 4.0]) == Times(3.0, 2.0, 4.0, 5)
    assert Times.of([7.0]) == Times(7.0, 7.0, 7.0, 1)


def test_peak_memory_counts_what_a_call_takes() -> None:
    kept = []
    peak = peak_memory(lambda: kept.append(torch.ones(2**22)), CPU)  # 16 MiB
    if peak is None:
        pytest.skip("this system doesn't tell peaks of memory")
    assert 15 * 2**20 < peak < 24 * 2**20


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_takes_memory_in_proportion_to_tokens(causal: bool) -> None:
    """Forward and backward of 32,768 tokens: some copies of the 24 MiB input, and no 4 GiB of weights."""
    shape = Shape(1, 1, 2**15, 64, causal, torch.float32)
    packed = shape.packed(CPU)
    (operator,) = (x for x in available_operators(CPU, causal) if x.name == "eq7")
    call = sweep_module.training_call(operator, shape, packed)
    call()
    peak = peak_memory(call, CPU)
    if peak is None:
        pytest.skip("this system doesn't tell peaks of memory")
    assert peak < 4 * packed.nbytes


def test_operators_and_ceilings_at_every_length() -> None:
    rows = list(sweep_operators(SWEEP, CPU))
    assert [row.size for row in only(rows, "eq7")] == [16, 16, 64, 64]
    assert {row.subject for row in rows} == {"softmax", "eq4", "eq7", "matmul", "copy"}
    assert all(row.seconds_low <= row.seconds <= row.seconds_high for row in rows)
    assert all((row.error is None) == (row.subject in ("matmul", "copy")) for row in rows)


def test_no_longer_calls_than_asked_for() -> None:
    """Whatever took time at all is left out at the next length."""
    rows = list(sweep_operators(replace(SWEEP, max_call=0.0), CPU))
    assert {row.size for row in only(rows, "softmax")} == {16}
    assert {row.size for row in only(rows, "matmul")} == {16, 64}


@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_those_of_the_dtype(causal: bool) -> None:
    errors = gate_errors(replace(SWEEP, dtypes=(torch.float32, torch.bfloat16), causal=causal), CPU)
    assert all(0 < errors[name, torch.float32] < 1e-5 for name in ("softmax", "eq4", "eq7"))
    assert all(1e-4 < errors[name, torch.bfloat16] < 1e-2 for name in ("softmax", "eq4", "eq7"))


def test_a_wrong_operator_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    (eq7,) = (x for x in available_operators(CPU, False) if x.name == "eq7")
    wrong = replace(eq7, attention=lambda packed, causal: 1.01 * eq7.attention(packed, causal))
    assert 0.009 < error_of(wrong, Shape(1, 2, 77, 16, False, torch.float32), CPU) < 0.011
    monkeypatch.setattr(sweep_module, "available_operators", lambda device, causal: [wrong])
    with pytest.raises(ErrorGateError, match=r"Eq. 7 in float32 has a relative error of 1\.0e-02"):
        next(sweep_operators(SWEEP, CPU))


def test_slope() -> None:
    assert fitted_slope([row("eq7", N, 3e-6 * N**1.5) for N in (10, 100, 1000)]) == pytest.approx(1.5)


def test_speedup_is_over_softmax_on_the_same_work() -> None:
    rows = [row("softmax", 64, 6.0), row("softmax", 128, 9.0), row("eq7", 64, 2.0), row("matmul", 64, 1.0)]
    assert [speedup(x, rows) for x in rows] == [None, None, 3.0, None]
    models = [row("ViT-B-16", 224, 6.0, "both towers"), row("ViT-B-16-LA", 224, 4.0, "both towers")]
    assert [speedup(x, models) for x in models] == [None, 1.5]


@pytest.mark.parametrize("name", ["ViT-nano-8", "ViT-nano-8-LA"])
@pytest.mark.parametrize("tower", ["both", "image"])
def test_attention_takes_a_part_of_a_step(name: str, tower: str) -> None:
    step = Step(32, 4, "amp_bf16", tower)
    call = step_call(build_model(name, step, CPU), step, CPU)
    call()
    assert 0.001 < attention_share(call, CPU) < 0.9


def test_the_command_writes_table_document_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--lengths 16 32 --heads 2 --head-size 16 --dtype float32 --image-size 32 --batch-size 2"
    models = "--models ViT-nano-8 ViT-nano-8-LA --seconds 0.01 --device cpu"
    assert main(["bench", "--out", str(tmp_path), *sizes.split(), *models.split()]) == 0
    document = json.loads((tmp_path / "bench.json").read_text())
    with (tmp_path / "bench.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(document["rows"]) == 2 * 2 * 5 + 2
    assert document["about"]["torch"] == torch.__version__
    assert document["about"]["backends"].keys() == {"float32"}
    assert {path.name for path in tmp_path.iterdir()} == {"bench.csv", "bench.json", "time.png", "time.svg"}
    assert "ViT-nano-8-LA" in capsys.readouterr().out


def test_lengths_that_memory_cant_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if available_memory(CPU) is None:
        pytest.skip("this system doesn't tell what memory is available")
    sizes = "--lengths 16 32 4000000000 --heads 2 --head-size 16 --dtype float32 --batch-size 1"
    command = f"bench --out {tmp_path} --level operator {sizes} --seconds 0.01 --device cpu"
    assert main(command.split()) == 0
    assert "left out for lack of memory: 4000000000 tokens" in capsys.readouterr().out


def test_a_dtype_without_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"bench --out {tmp_path} --level model --dtype float16 --device cpu"
    assert main(command.split()) == 1
    assert "timed in float32 and bfloat16" in capsys.readouterr().err
