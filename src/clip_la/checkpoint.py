"""Checkpoints: saved whole or not at all, the newest that loads wins, weights_only always.

A file has OpenCLIP's keys (`state_dict`, `optimizer`, `epoch`, `name`, `scaler`), so that
`open_clip.create_model(..., pretrained=FILE)` reads it, and what exact resume and stand-alone use need.
"""

from __future__ import annotations

import logging
import os
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clip_la.bundle import ClipBundle, build, load_weights
from clip_la.checkpoint_files import list_checkpoints as list_checkpoints
from clip_la.checkpoint_files import samples_of as samples_of
from clip_la.errors import ExpectedError

logger = logging.getLogger(__name__)

FORMAT = 1


class CheckpointError(ExpectedError):
    """A checkpoint that can't be read or written; the message names the file."""


def read(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint of this package, on the CPU.

    Raises:
        CheckpointError: missing, damaged, or of another kind.
    """
    try:
        verify(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {path}") from None
    except Exception as error:  # torch.load raises whatever the damage leads to
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict) or "model_config" not in content or "state_dict" not in content:
        raise CheckpointError(f"{path} is not a clip_la checkpoint: it doesn't say what model it holds")
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {content.get('format')}; this version reads {FORMAT}")
    return content


def verify(path: str | Path) -> None:
    """Compare every checksum of a file of torch.save, which torch.load leaves out.

    Raises:
        Exception: whatever the damage leads to.
    """
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"{damaged} in it is damaged")


def newest_readable(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint of a run that loads, None if there is none; warns of each that doesn't."""
    for path in list_checkpoints(folder):
        try:
            return path, read(path)
        except CheckpointError as error:
            logger.warning("skipping a checkpoint: %s", error)
    return None


def load_bundle(
    path: str | Path,
    *,
    precision: str | None = None,
    device: str | torch.device = "cpu",
    force_image_size: int | None = None,
) -> ClipBundle:
    """The model of a checkpoint, ready to run; config, attention, image size, tokenizer come from the file.

    Args:
        path: a checkpoint, or a run's folder (its newest readable checkpoint).
        precision: default is the one it was trained in.
        force_image_size: pixels a side in place of the file's; position embeddings are resized.

    Raises:
        CheckpointError: nothing readable there.
    """
    path = Path(path)
    if path.is_dir():
        found = newest_readable(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
        if found is None:
            raise CheckpointError(f"no readable checkpoint in {path}")
        path, content = found
    else:
        content = read(path)
    model_config = content["model_config"]
    if force_image_size is not None:  # OpenCLIP takes the transform's size from here too
        vision_config = {**model_config["vision_cfg"], "image_size": force_image_size}
        model_config = {**model_config, "vision_cfg": vision_config}
    bundle = build(
        model_config,
        model_name=content["model_name"],
        precision=precision or content["precision"],
        device=device,
        preprocess_config=content["preprocess_config"],
    )
    load_weights(bundle.model, path)
    bundle.model.eval()
    return bundle


class CheckpointStore:
    """The `checkpoints/` folder of a run. Writing happens in the background, one file at a time.

    Args:
        folder: where the files lie.
        keep_last: how many rolling files to keep; files of epochs are never removed.
    """

    def __init__(self, folder: Path, keep_last: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._keep_last = keep_last
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        for leftover in folder.glob("*.tmp"):
            leftover.unlink()

    def save(self, content: Mapping[str, Any], *, samples: int, epoch: int | None = None) -> Path:
        """Copy `content` to host memory and write it in the background.

        Args:
            content: anything that weights_only loading accepts.
            samples: global samples seen.
            epoch: of a checkpoint that is kept for good; None for a rolling one.

        Raises:
            CheckpointError: the save before this one failed.
        """
        self.wait()
        name = f"rolling_{samples:014d}.pt" if epoch is None else f"epoch_{epoch:04d}_{samples:014d}.pt"
        snapshot = _to_host(content)
        self._thread = threading.Thread(target=self._write, args=(snapshot, self.folder / name), daemon=False)
        self._thread.start()
        return self.folder / name

    def wait(self) -> None:
        """Until the file under way is on disk.

        Raises:
            CheckpointError: it couldn't be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise CheckpointError(f"saving a checkpoint in {self.folder} failed: {error}") from error

    def _write(self, content: dict[str, Any], path: Path) -> None:
        try:
            bad = _first_non_finite(content["state_dict"])
            if bad is not None:
                raise ValueError(f"the weights are not finite ({bad}); the file before it stays the newest")
            write_atomically(content, path)
            self._prune()
        except Exception as error:  # handed to the training thread by wait()
            self._error = error

    def _prune(self) -> None:
        rolling = [path for path in list_checkpoints(self.folder) if path.name.startswith("rolling_")]
        for path in rolling[self._keep_last :]:
            path.unlink()


def write_atomically(content: Mapping[str, Any], path: Path) -> None:
    """Write under a temporary name, flush to disk, rename: a reader sees the whole file or none."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(dict(content), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _to_host(value: Any) -> Any:
    """A deep copy with every tensor in host memory, so that training can go on changing the originals."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_host(item) for item in value)
    return value


def _first_non_finite(state_dict: Mapping[str, Any]) -> str | None:
    for name, value in state_dict.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            return name
    return None
