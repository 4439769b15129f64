"""What evaluations keep on disk: text features, and how far an evaluation had come when it was killed.

    FOLDER/text/KEY.pt         the features of a list of class names
    FOLDER/partial/KEY/        the answers so far, a file a rank; removed when the evaluation has ended, or
                               when it has been left alone for a month

KEY is a hash of everything that the content is a function of. Nothing here is needed: a file that is missing
or damaged is made again, and one that can't be written is done without.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from clip_la import checkpoint
from clip_la.bundle import ClipBundle
from clip_la.evaluate.journal import Journal
from clip_la.evaluate.templates import Templates
from clip_la.version import __version__

_logger = logging.getLogger(__name__)
MAX_TEXT_BYTES = 4 * 2**30
MAX_PARTIAL_SECONDS = 30 * 24 * 3600


def default_folder() -> Path:
    """$CLIP_LA_CACHE, or `clip_la` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CLIP_LA_CACHE") or Path(base) / "clip_la")


class EvaluationCache:
    """The cache in one folder, which may not exist yet.

    Args:
        folder: may be shared by any number of processes.
        max_text_bytes: the text features used longest ago are removed beyond this.
    """

    def __init__(self, folder: str | Path, max_text_bytes: int = MAX_TEXT_BYTES) -> None:
        self._text = Path(folder) / "text"
        self._partial = Path(folder) / "partial"
        self._max_text_bytes = max_text_bytes

    def load_text(self, key: str) -> Tensor | None:
        """The features saved under `key`, on the CPU; None, with a warning if it is damaged, for none."""
        path = self._text / f"{key}.pt"
        if not path.exists():
            return None
        try:
            checkpoint.verify(path)
            content = torch.load(path, map_location="cpu", weights_only=True)
            if content["key"] != key:
                raise ValueError(f"it was made for {content['key']}")
            os.utime(path)
        except Exception as error:  # whatever the damage leads to
            _logger.warning("text features are computed again: %s can't be used: %s", path, error)
            return None
        features: Tensor = content["features"]
        return features

    def save_text(self, key: str, features: Tensor) -> None:
        """Save features under `key`, whole or not at all; where that fails, with a warning."""
        try:
            self._text.mkdir(parents=True, exist_ok=True)
            checkpoint.write_atomically({"key": key, "features": features.cpu()}, self._text / f"{key}.pt")
            self._prune()
        except OSError as error:
            _logger.warning("text features are not kept: %s", error)

    def journal(self, key: str) -> Journal:
        """The answers so far of the evaluation `key`."""
        for folder in self._partial.glob("*"):
            if folder.name != key and time.time() - _last_change(folder) > MAX_PARTIAL_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        return Journal(self._partial / key)

    def _prune(self) -> None:
        by_age = sorted(self._text.glob("*.pt"), key=lambda path: path.stat().st_mtime, reverse=True)
        total = 0
        for path in by_age:
            total += path.stat().st_size
            if total > self._max_text_bytes and path != by_age[0]:
                path.unlink(missing_ok=True)


def _last_change(folder: Path) -> float:
    """Unix seconds; now where another process is removing it."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return time.time()


def hash_of_model(bundle: ClipBundle) -> str:
    """Hash of weights, model config, image preprocessing, precision, kind of device and versions."""
    digest = hashlib.blake2b(digest_size=32)  # twice as fast as SHA-256, for weights by the gigabyte
    settings = {
        "model_config": bundle.model_config,
        "preprocess_config": bundle.preprocess_config,
        "precision": bundle.precision,
        "device": bundle.device.type,
        "versions": [__version__, torch.__version__],
    }
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, value in sorted(bundle.model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_of_text(bundle: ClipBundle, names: Sequence[str], templates: Templates) -> str:
    """SHA-256 of all that text features are a function of.

    The tokenizer counts by its tokens of every name and of every template, not of every pair of them.
    """
    digest = hashlib.sha256(hash_of_model(bundle).encode())
    for texts in (names, templates.texts):
        digest.update("\0".join(texts).encode() + b"\1")
        for start in range(0, len(texts), 1024):
            digest.update(bundle.tokenizer(list(texts[start : start + 1024])).numpy().tobytes())
    return digest.hexdigest()
