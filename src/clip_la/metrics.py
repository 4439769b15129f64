"""metrics.jsonl, the one file that programs read of a run; TensorBoard and W&B on request."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clip_la.config import ConfigError, RunConfig

Sink = Callable[[str, int, Mapping[str, Any]], None]


class MetricsLog:
    """Appends one JSON object a line and hands the same record to every other sink.

    A record has `type`, `samples` (global samples seen), `time` (unix seconds) and its own keys;
    NaN and infinity become null, which JSON has no word for.
    """

    def __init__(self, path: Path, sinks: list[Sink] | None = None) -> None:
        self._file = path.open("a", encoding="utf-8")
        if _ends_mid_line(path):
            self._file.write("\n")  # a kill tore the last line; keep it apart from what follows
        self._sinks = sinks or []

    def write(self, kind: str, samples: int, **values: Any) -> None:
        """Append one record and flush it, so that a killed run loses none."""
        record = {"type": kind, "samples": samples, "time": time.time(), **values}
        self._file.write(json.dumps(_without_nan(record)) + "\n")
        self._file.flush()
        for sink in self._sinks:
            sink(kind, samples, values)

    def close(self) -> None:
        """Close the file; sinks close themselves at exit."""
        self._file.close()


def recorded_evaluations(path: Path, samples: int) -> list[str]:
    """Names of what a run's metrics.jsonl says was evaluated, or failed to be, at `samples`."""
    names = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if '"type": "eval' not in line:
            continue
        try:
            record = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if record["samples"] == samples:
            names.append(record["name"])
    return names


def _ends_mid_line(path: Path) -> bool:
    content = path.read_bytes()
    return bool(content) and not content.endswith(b"\n")


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value


def scalars(kind: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record under the names that dashboards show: `train/loss`, `zeroshot/x/top1`."""
    prefix = str(values.get("name", kind))
    numbers = values.get("metrics", values.get("layers", values))
    return {
        f"{prefix}/{key}": value
        for key, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def build_sinks(config: RunConfig, folder: Path) -> list[Sink]:
    """The sinks that `--report-to` asks for.

    Raises:
        ConfigError: a sink whose package is not installed.
    """
    wanted = {"wandb", "tensorboard"} if config.report_to == "all" else set(config.report_to.split(","))
    sinks: list[Sink] = []
    if "tensorboard" in wanted:
        sinks.append(_tensorboard_sink(folder / "tensorboard"))
    if "wandb" in wanted:
        sinks.append(_wandb_sink(config, folder))
    return sinks


def _tensorboard_sink(folder: Path) -> Sink:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("--report-to tensorboard needs: pip install 'clip_la[tensorboard]'") from None
    writer = SummaryWriter(str(folder))

    def write(kind: str, samples: int, values: Mapping[str, Any]) -> None:
        """One line's numbers into TensorBoard."""
        for name, value in scalars(kind, values).items():
            writer.add_scalar(name, value, samples)
        writer.flush()

    return write


def _wandb_sink(config: RunConfig, folder: Path) -> Sink:
    try:
        import wandb
    except ImportError:
        raise ConfigError("--report-to wandb needs: pip install 'clip_la[wandb]'") from None
    id_file = folder / "wandb_id"
    if not id_file.exists():
        id_file.write_text(secrets.token_hex(4), encoding="utf-8")
    run = wandb.init(
        project=config.wandb_project_name,
        name=config.name,
        id=id_file.read_text(encoding="utf-8").strip(),
        notes=config.wandb_notes or None,
        resume="allow",
        dir=str(folder),
        config=vars(config),
    )

    def write(kind: str, samples: int, values: Mapping[str, Any]) -> None:
        """One line's numbers into Weights & Biases."""
        run.log({**scalars(kind, values), "samples": samples})

    return write
