"""Both towers as ONNX files that need no torch: plain operations, any batch size, checked in onnxruntime."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from clip_la.attention.plain import DECOMPOSITIONS
from clip_la.bundle import ClipBundle

IMAGE_FILE, TEXT_FILE, CHECK_FILE = "vision_model.onnx", "text_model.onnx", "check.json"
TOLERANCE = 2e-5
"""Largest difference of a feature's component between onnxruntime and torch, both float32; a feature's length
is 1. Sums over tokens are taken in another order, so bits differ."""

_CHECKED_BATCHES = (1, 2, 5)
_PACKAGES = ("onnx", "onnxruntime", "onnxscript")


class Tower(nn.Module):
    """One tower with L2-normalised float32 features, as a function of one tensor.

    Args:
        model: an OpenCLIP model; it is copied to float32 on the CPU.
        encode: "encode_image" or "encode_text".
    """

    def __init__(self, model: nn.Module, encode: str) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
        self._encode = encode

    def forward(self, batch: Tensor) -> Tensor:
        """Images (n, 3, height, width) float32, or token ids (n, context_length) int64: (n, embed_dim)."""
        features = getattr(self.model, self._encode)(batch)
        return nn.functional.normalize(features, dim=-1)


@dataclass(frozen=True)
class TowerCheck:
    """What a user of an ONNX file has to know, and how far it is from torch."""

    file: str
    input: str
    output: str
    input_shape: list[int | str]
    input_dtype: str
    embed_dim: int
    max_abs_difference: float
    tolerance: float


def trace_tower(bundle: ClipBundle, name: str) -> ExportedProgram:
    """The "image" or "text" tower through torch.export: float32, any batch size, the operator as one op."""
    tower = Tower(bundle.model, f"encode_{name}")
    return torch.export.export(tower, (_example(bundle, name),), dynamic_shapes=({0: Dim("batch")},))


def _example(bundle: ClipBundle, name: str, batch: int = 2, seed: int = 0) -> Tensor:
    """A batch of noise as pictures, or of random words as texts of all lengths."""
    generator = torch.Generator().manual_seed(seed)
    model: Any = bundle.model
    if name == "image":
        size = model.visual.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return torch.randn(batch, 3, height, width, generator=generator)
    lengths = torch.randint(1, 40, (batch,), generator=generator).tolist()
    return bundle.tokenizer([" ".join(f"word{i * n}" for i in range(n)) for n in lengths])


def write_onnx(bundle: ClipBundle, folder: Path) -> list[TowerCheck]:
    """Write both towers into `folder` and compare each with torch in onnxruntime.

    Beside the ONNX files lies check.json: inputs, outputs, logit scale and the differences found.

    Raises:
        ValueError: a package is missing, or the files don't compute what the model does.
    """
    require_packages()
    folder.mkdir(parents=True, exist_ok=True)
    files = {"image": (IMAGE_FILE, "images"), "text": (TEXT_FILE, "tokens")}
    checks = []
    for name, (file, input_name) in files.items():
        _write_tower(bundle, name, input_name, folder / file)
        checks.append(_check(bundle, name, folder / file))
    _write_check(bundle, folder / CHECK_FILE, checks)
    return checks


def _write_tower(bundle: ClipBundle, name: str, input_name: str, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.onnx and onnxscript warn of each other's insides
        program = trace_tower(bundle, name).run_decompositions(dict(DECOMPOSITIONS))
        exported = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            input_names=[input_name],
            output_names=[f"{name}_features"],
            dynamic_shapes=({0: "batch"},),
        )
    assert exported is not None
    exported.save(path)


def _check(bundle: ClipBundle, name: str, file: Path) -> TowerCheck:
    import onnxruntime

    tower = Tower(bundle.model, f"encode_{name}")
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (given,), (made,) = session.get_inputs(), session.get_outputs()
    difference = 0.0
    for batch in _CHECKED_BATCHES:
        example = _example(bundle, name, batch, seed=batch)
        with torch.inference_mode():
            expected = tower(example)
        found = torch.from_numpy(session.run([made.name], {given.name: example.numpy()})[0])
        difference = max(difference, (found - expected).abs().max().item())
    if not difference <= TOLERANCE:
        raise ValueError(
            f"the {name} tower computes something else in onnxruntime than in torch: features differ by up "
            f"to {difference:.3g}, allowed {TOLERANCE:.3g}; nothing was kept. Please report this with the "
            "versions of torch, onnx, onnxscript and onnxruntime"
        )
    return TowerCheck(
        file=file.name,
        input=given.name,
        output=made.name,
        input_shape=["batch", *example.shape[1:]],
        input_dtype=str(example.dtype).removeprefix("torch."),
        embed_dim=expected.shape[-1],
        max_abs_difference=difference,
        tolerance=TOLERANCE,
    )


def _write_check(bundle: ClipBundle, path: Path, checks: list[TowerCheck]) -> None:
    model: Any = bundle.model
    content = {
        "features": "L2-normalised; logits = logit_scale * image_features @ text_features.T (+ logit_bias)",
        "logit_scale": model.logit_scale.exp().item(),
        "logit_bias": None if model.logit_bias is None else model.logit_bias.item(),
        "preprocess": bundle.preprocess_config,
        "towers": [asdict(check) for check in checks],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def require_packages() -> None:
    """Raises:
    ValueError: names the packages that are missing, and how to install them.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(f"ONNX export needs {', '.join(missing)}: pip install 'clip_la[onnx]'")
