"""How a documented command is run in a small world, and how one that can't be is held against the parsers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec

from docs_blocks import REPO_ROOT
from torch.distributed.run import get_args_parser

from clip_la.cli import build_parser, main
from clip_la.config_sources import flags_given, load_run_config, refuse_unknown_flags

NOT_RUN = {
    "install": "changes the machine, or fetches something",
    "data": "names data sets that are too large or not ours to have here",
    "cluster": "needs Slurm; tests/slurm runs the same files on a cluster",
    "gpus": "needs GPUs; tests/train/test_train_ranks.py runs two ranks on CPUs",
    "hub": "uploads; tests/export/test_push.py does it with a hub of its own",
    "minutes": "takes minutes to hours",
}
"""Why a block is only parsed."""

SMALLER = {
    "demo-data": "--num-pairs 64 --num-val-pairs 16 --images-per-class 1 --image-size 32",
    "train": "--train-num-samples 32 --batch-size 16 --epochs 1 --warmup 1 --force-context-length 16 "
    "--val-block-size 8 --precision fp32 --device cpu",
    "eval": "--workers 0 --device cpu",
    "classify": "--device cpu",
    "embed": "--device cpu",
    "check": "--workers 0",
    "bench": "--level operator --lengths 16 --heads 1 --dtype float32 --seconds 0.01 --device cpu",
}
"""Flags that the tests put behind a documented command, so that it takes a second; the last given counts."""

NEEDS = {
    "--onnx": "onnxruntime",
    "--benchmark": "clip_benchmark",
    "embed": "pyarrow",
}
"""Words of a command, and the optional package without which it can't run."""

HARMLESS = {"cat", "cp", "head", "ls", "mkdir", "tail"}
FOREIGN = {
    ".", "cd", "cp", "git", "hf", "img2dataset", "pip", "pytest", "python", "python3", "scancel",
    "scontrol", "srun", "tail", "tensorboard", "wandb",
}  # fmt: skip
"""Programs whose command lines are not checked."""


def run_command(words: Sequence[str], variables: dict[str, str]) -> set[str]:
    """Run one command of a page in the working folder; assignments are kept in `variables`.

    Returns:
        Packages without which the command, or for ONNX a part of it, could not be run.
    """
    absent = {word: package for word, package in NEEDS.items() if find_spec(package) is None}
    missing = {word: absent[word] for word in words if word in absent}
    if set(missing) <= {"--onnx"}:
        _run([_expand(word, variables) for word in words if word not in missing], variables)
    return set(missing.values())


def _run(words: Sequence[str], variables: dict[str, str]) -> None:
    if (assignment := re.fullmatch(r"(\w+)=(.*)", words[0])) and len(words) == 1:
        variables[assignment[1]] = assignment[2]
    elif words[0] == "clip-la":
        assert main([*words[1:], *SMALLER.get(words[1], "").split()]) == 0, words
    else:
        assert words[0] in HARMLESS, (
            f"{words[0]} is run by no test: mark the block `<!-- not run: REASON -->`"
        )
        subprocess.run(words, check=True)


def check_command(words: Sequence[str], variables: dict[str, str]) -> None:
    """Hold a command that isn't run against the parser of its program; `…` stands for any value."""
    words = [_expand(word, variables) for word in words]
    if (assignment := re.fullmatch(r"(\w+)=(.*)", words[0])) is not None:
        variables[assignment[1]] = assignment[2]
        words = words[1:]
    if not words or words[0] in FOREIGN:
        return
    program, *rest = words
    if program == "clip-la":
        _check_clip_la(rest)
    elif program == "torchrun":
        called = get_args_parser().parse_args(rest)
        assert called.training_script == "clip-la", words
        _check_clip_la(called.training_script_args)
    elif program in ("sbatch", "bash"):
        _check_batch(rest)
    else:
        assert (REPO_ROOT / program).is_file(), (
            f"{program} is neither known to the tests nor a file of the repository"
        )


def _expand(word: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$(\w+)", lambda found: variables.get(found[1], found[0]), word)


def _check_clip_la(argv: Sequence[str]) -> None:
    args, rest = build_parser(*argv[:1]).parse_known_args(argv)
    if args.command == "submit":
        _check_clip_la(["train", "--config", str(args.config), *rest])
    elif args.command == "train":
        refuse_unknown_flags(rest)
        load_run_config(
            None if args.config is None or str(args.config) == "…" else args.config, flags_given(args)
        )
    else:
        assert not rest, rest


def _check_batch(words: Sequence[str]) -> None:
    """`sbatch [options] FILE ARGUMENTS`, or the same with bash; the arguments are the file's command's."""
    place = next(n for n, word in enumerate(words) if word.endswith((".sbatch", ".sh")))
    file, arguments = REPO_ROOT / words[place], list(words[place + 1 :])
    assert file.is_file(), file
    if file.name == "train.sbatch":
        _check_clip_la(["train", "--config", *arguments])
    elif file.name == "eval.sbatch":
        is_watch = arguments[0] == "--watch"
        _check_clip_la(["watch", *arguments[1:]] if is_watch else ["eval", "--checkpoint", *arguments])
    elif file.name == "compare.sbatch":
        _check_clip_la(["train", *arguments[arguments.index("--") + 1 :]])
