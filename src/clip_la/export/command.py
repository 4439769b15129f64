"""`clip-la export`: options, and the order in which things are written."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clip_la import checkpoint
from clip_la.bundle import ClipBundle
from clip_la.config import ConfigError
from clip_la.export.card import write_card
from clip_la.export.facts import Facts, read_facts
from clip_la.export.hub import CARD_FILE, refuse_occupied, write_hub_folder, write_safetensors
from clip_la.export.onnx import TowerCheck, require_packages, write_onnx
from clip_la.export.push import check_login, push_folder
from clip_la.model_choice import HUB_CONFIG_FILE, ModelChoice, add_model_arguments, load_model

ONNX_FOLDER = "onnx"
_EXAMPLES = """examples:
  clip-la export logs/my-run --out hub/my-model                  newest checkpoint of a run
  clip-la export logs/my-run/checkpoints/FILE.pt --out hub/my-model --onnx
  clip-la export logs/my-run --safetensors my-model.safetensors  the weights alone
  clip-la export logs/my-run --out hub/my-model --push-to-hub me/my-model

load it with (a linear model needs `import clip_la` first):
  open_clip.create_model_and_transforms("local-dir:hub/my-model")"""


@dataclass(frozen=True)
class ExportOptions:
    """What `clip-la export` is told beside the model; see `add_arguments` for the meanings."""

    out: Path | None = None
    safetensors: Path | None = None
    onnx: bool = False
    push_to_hub: str | None = None
    public: bool = False
    force: bool = False
    about: Path | None = None

    def __post_init__(self) -> None:
        if self.out is None and self.safetensors is None:
            raise ConfigError("nothing to write: give --out DIR, --safetensors FILE, or both")
        if self.out is None and (self.onnx or self.push_to_hub):
            raise ConfigError("--onnx and --push-to-hub need --out DIR")
        if self.about is not None and not self.about.is_file():
            raise ConfigError(f"--about: there is no file at {self.about}")
        if self.public and not self.push_to_hub:
            raise ConfigError("--public belongs to --push-to-hub OWNER/NAME")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ExportOptions:
        """What the command line says."""
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ModelChoice` and `ExportOptions`."""
    parser.description = f"{parser.description}\n\n{_EXAMPLES}"
    add_model_arguments(parser, positional=True)
    add = parser.add_argument
    add(
        "--out", type=Path, metavar="DIR", help="OpenCLIP hub folder to make: config, safetensors, model card"
    )
    add("--safetensors", type=Path, metavar="FILE", help="write the weights alone, for pretrained=FILE")
    add("--onnx", action="store_true", help="both towers as ONNX in DIR/onnx, checked in onnxruntime")
    add(
        "--push-to-hub",
        metavar="OWNER/NAME",
        help="upload DIR to this Hugging Face repository, made private if it is new (needs `hf auth login`)",
    )
    add("--public", action="store_true", help="make the new repository public")
    add("--force", action="store_true", help="replace an earlier export")
    add(
        "--about",
        type=Path,
        metavar="FILE",
        help="Markdown for the model card: intended use, data, limits, licence (default: a form to fill in)",
    )


def run_export(choice: ModelChoice, options: ExportOptions) -> list[str]:
    """Write what is asked for.

    Returns:
        One line for people for each thing made.

    Raises:
        ValueError, CheckpointError, WeightsError, OSError: nothing half-written is left.
    """
    _check_targets(options)
    file = _checkpoint_file(choice.checkpoint)
    if file is not None:
        choice = ModelChoice(file, precision=choice.precision)
    bundle = load_model(choice, "cpu")
    made = []
    if options.safetensors is not None:
        write_safetensors(bundle, options.safetensors, force=options.force)
        made.append(f"weights: {options.safetensors}")
    if options.out is not None:
        checks = _write_folder(bundle, read_facts(file) if file else None, options.out, options)
        made.append(
            f"hub folder: {options.out} (open_clip.create_model_and_transforms('local-dir:{options.out}'))"
        )
        if options.about is None:
            made.append(f"model card: {options.out / CARD_FILE} has sections to fill in (see --about)")
        made += [f"ONNX: {check.file}, within {check.max_abs_difference:.1e} of torch" for check in checks]
    if options.push_to_hub and options.out is not None:
        made.append(f"pushed: {push_folder(options.out, options.push_to_hub, private=not options.public)}")
    return made


def _check_targets(options: ExportOptions) -> None:
    """What can be known to fail fails before the work."""
    if options.out is not None:
        refuse_occupied(options.out, options.force)
    if options.onnx:
        require_packages()
    if options.push_to_hub:
        check_login(options.push_to_hub)


def _checkpoint_file(path: Path | None) -> Path | None:
    """The file of this package's that `path` stands for: of a run's folder its newest readable checkpoint."""
    if path is None or not path.is_dir() or (path / HUB_CONFIG_FILE).is_file():
        return path if path is not None and path.is_file() else None
    found = checkpoint.newest_readable(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    return found[0] if found else None


def _write_folder(
    bundle: ClipBundle, facts: Facts | None, out: Path, options: ExportOptions
) -> Sequence[TowerCheck]:
    checks: list[TowerCheck] = []
    about = None if options.about is None else options.about.read_text(encoding="utf-8")

    def fill(partial: Path) -> str:
        """Write what lies beside the weights; the text of the model card."""
        if options.onnx:
            checks.extend(write_onnx(bundle, partial / ONNX_FOLDER))
        return write_card(bundle, facts, repo=options.push_to_hub, checks=checks, about=about)

    write_hub_folder(bundle, out, fill, force=options.force)
    return checks


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    print("\n".join(run_export(ModelChoice.from_args(args), ExportOptions.from_args(args))))
    return 0
