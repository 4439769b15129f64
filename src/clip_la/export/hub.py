"""OpenCLIP hub folders: open_clip_config.json, safetensors and a model card, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from safetensors.torch import save_file
from torch import Tensor, nn

from clip_la.bundle import ClipBundle
from clip_la.model_choice import HUB_CONFIG_FILE, HUB_WEIGHTS_FILE
from clip_la.openclip import PLUGIN_NEEDED

CARD_FILE = "README.md"


def hub_config(bundle: ClipBundle) -> dict[str, Any]:
    """The content of open_clip_config.json.

    A linear model's begins with a key that stock OpenCLIP refuses by its name, `requires_import_clip_la`.
    """
    model = {
        key: value for key, value in bundle.model_config.items() if key not in (PLUGIN_NEEDED, "attention")
    }
    if bundle.spec.kind != "softmax":
        hint = "linear attention: install clip_la, and import it before building this model"
        model = {PLUGIN_NEEDED: hint, **model, "attention": bundle.spec.to_config()}
    preprocess = {key: value for key, value in bundle.preprocess_config.items() if key != "size"}
    return {"model_cfg": model, "preprocess_cfg": preprocess}


def write_hub_folder(
    bundle: ClipBundle, folder: Path, write_card: Callable[[Path], str], *, force: bool = False
) -> None:
    """Write the folder under another name beside it, then rename it.

    Args:
        write_card: given the folder under construction, may add files to it and returns the model card.
        force: replace an earlier export. Never anything else.

    Raises:
        ValueError: something is there that may not be replaced.
        OSError: it can't be written; nothing is left behind.
    """
    refuse_occupied(folder, force)
    with _new_folder(folder) as partial:
        config = json.dumps(hub_config(bundle), indent=2, ensure_ascii=False)
        (partial / HUB_CONFIG_FILE).write_text(config + "\n", encoding="utf-8")
        write_weights(bundle, partial / HUB_WEIGHTS_FILE)
        if bundle.model_config["text_cfg"].get("hf_tokenizer_name"):  # then OpenCLIP looks for its files here
            cast(Any, bundle.tokenizer).save_pretrained(str(partial))
        (partial / CARD_FILE).write_text(write_card(partial), encoding="utf-8")


def write_safetensors(bundle: ClipBundle, path: Path, *, force: bool = False) -> None:
    """Write the weights alone; `open_clip.create_model(NAME, pretrained=PATH)` reads them.

    Raises:
        ValueError: the name doesn't end in .safetensors, or the file is there and `force` isn't given.
        OSError: it can't be written; nothing is left behind.
    """
    if path.suffix != ".safetensors":
        raise ValueError(f"{path} must end in .safetensors: OpenCLIP tells the format by that")
    if path.exists() and not (force and path.is_file()):
        raise ValueError(f"{path} is already there; give another name, or --force to replace it")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.safetensors")
    try:
        write_weights(bundle, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_weights(bundle: ClipBundle, path: Path) -> None:
    """All tensors of the model, in the dtypes they have, with the model's name in the metadata."""
    metadata = {
        "format": "pt",
        "model": bundle.model_name,
        "attention": json.dumps(bundle.spec.to_config()),
    }
    try:
        save_file(_tensors(bundle.model), path, metadata)
    except Exception as error:  # safetensors has an error class of its own for a full disk
        raise OSError(f"can't write {path.name} in {path.parent}: {error}") from error
    path.chmod(0o666 & ~_umask())  # safetensors lets nobody else read it
    _flush(path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}


def refuse_occupied(folder: Path, force: bool) -> None:
    """Refuse a target that holds something, so that it is known before any work.

    Raises:
        ValueError: a file, or a folder that isn't empty and isn't an earlier export to be replaced.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder to make")
    if not any(folder.iterdir()):
        return
    if not (folder / HUB_CONFIG_FILE).is_file():
        raise ValueError(f"{folder} is not empty and no earlier export; give another --out")
    if not force:
        raise ValueError(f"{folder} already holds an export; give another --out, or --force to replace it")


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it becomes `target` at the end, or is removed where that isn't reached."""
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        filled = partial / "new"
        filled.mkdir()
        yield filled
        _swap(filled, target, partial / "old")
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _swap(new: Path, target: Path, old: Path) -> None:
    """`new` in the place of `target`, which goes to `old`, or stays where that fails."""
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
