"""A run is one frozen config. Names are OpenCLIP's flag names; what OpenCLIP lacks says so in its help.

`config_sources` builds it from a YAML file and command-line flags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clip_la.attention.spec import AttentionSpec
from clip_la.data.spec import Limits
from clip_la.errors import ExpectedError
from clip_la.evaluate.spec import read_specs
from clip_la.exit_codes import EXIT_USAGE

UNSUPPORTED_FLAGS = {
    "horovod": "this trainer uses torch.distributed only",
    "distill_model": "distillation is not part of this trainer",
    "distill_pretrained": "distillation is not part of this trainer",
    "coca_caption_loss_weight": "CoCa models keep softmax attention and OpenCLIP's own trainer",
    "coca_contrastive_loss_weight": "CoCa models keep softmax attention and OpenCLIP's own trainer",
    "use_bn_sync": "native ViTs have no batch norm",
    "lock_image_freeze_bn_stats": "native ViTs have no batch norm",
    "lock_text_freeze_layer_norm": "OpenCLIP's native text tower doesn't support it either",
    "pretrained_image": "it loads timm weights; timm towers keep softmax attention",
    "torchscript": "use --torchcompile",
    "trace": "use --torchcompile",
    "use_bnb_linear": "bitsandbytes layers are not supported",
    "remote_sync": "sync the logs folder with the storage's own tool",
    "remote_sync_frequency": "sync the logs folder with the storage's own tool",
    "remote_sync_protocol": "sync the logs folder with the storage's own tool",
    "delete_previous_checkpoint": "use --keep-last",
    "save_most_recent": "always on: see --save-every-samples and --save-every-minutes",
    "copy_codebase": "the run's config.yaml records the package version instead",
    "dist_url": "set MASTER_ADDR and MASTER_PORT (torchrun and the Slurm scripts do)",
    "no_set_device_rank": "set CUDA_VISIBLE_DEVICES instead",
    "log_local": "every rank's warnings reach the log of rank 0's launcher",
    "debug": "use --log-level debug",
    "cache_dir": "set HF_HUB_CACHE instead",
    "imagenet_val": "use --zeroshot DIR with --classnames",
    "imagenet_v2": "use --zeroshot DIR with --classnames",
}


class ConfigError(ExpectedError, ValueError):
    """A config file or flag that can't be used; the message says what to change."""

    exit_code = EXIT_USAGE


def _flag(default: Any, help: str, group: str, choices: Sequence[str] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "group": group, "choices": choices})


@dataclass(frozen=True)
class RunConfig:
    """Everything that a training run is a function of; each field's help is its documentation."""

    # What is trained
    model: str = _flag("ViT-B-16-LA", "model name (clip-la models), or a .json model config", "model")
    attention: Mapping[str, Any] | None = _flag(
        None,
        'attention of both towers instead of the model\'s own, e.g. \'{"kind": "eq7"}\' (not in OpenCLIP)',
        "model",
    )
    pretrained: str | None = _flag(
        None, "checkpoint file to start the weights from (same attention)", "model"
    )
    pretrained_softmax: str | None = _flag(
        None, "softmax checkpoint to start a linear model from, on purpose (not in OpenCLIP)", "model"
    )
    precision: str = _flag(
        "amp_bf16",
        "floating-point precision; amp_* keep fp32 weights",
        "model",
        ("fp32", "amp", "amp_bf16", "amp_bfloat16", "bf16", "fp16"),
    )
    device: str = _flag("auto", "auto (cuda where there is one), cuda or cpu", "model")
    force_image_size: tuple[int, ...] | None = _flag(None, "image size instead of the model's own", "model")
    force_context_length: int | None = _flag(
        None, "text length instead of the model's own (not in OpenCLIP)", "model"
    )
    force_patch_dropout: float | None = _flag(None, "share of image patches dropped in training", "model")
    force_quick_gelu: bool = _flag(False, "use OpenAI's QuickGELU", "model")
    force_custom_text: bool = _flag(False, "build the text tower as a module of its own", "model")
    grad_checkpointing: bool = _flag(
        False, "recompute activations in the backward pass: less memory, more time", "model"
    )
    torchcompile: bool = _flag(False, "torch.compile the model", "model")
    lock_image: bool = _flag(False, "freeze the image tower", "model")
    lock_image_unlocked_groups: int = _flag(0, "image layer groups to leave unfrozen, from the end", "model")
    lock_text: bool = _flag(False, "freeze the text tower", "model")
    lock_text_unlocked_layers: int = _flag(0, "text layers to leave unfrozen, from the end", "model")

    # Data
    train_data: str | None = _flag(
        None, "shards 'dir/{00000..00099}.tar' (:: joins lists), or a CSV file", "data"
    )
    train_num_samples: int | None = _flag(
        None, "samples in one (virtual) epoch; read from sizes.json beside the shards when not given", "data"
    )
    val_data: str | None = _flag(None, "shards or CSV for the validation loss", "data")
    val_num_samples: int | None = _flag(None, "use at most this many validation samples", "data")
    dataset_type: str = _flag("auto", "kind of --train-data", "data", ("auto", "webdataset", "csv"))
    dataset_resampled: bool = _flag(False, "draw shards with replacement", "data")
    train_data_upsampling_factors: str | None = _flag(
        None, "weights of :: lists, e.g. 1::2; needs --dataset-resampled", "data"
    )
    csv_separator: str = _flag("\t", "column separator of CSV files", "data")
    csv_img_key: str = _flag("filepath", "CSV column of image paths", "data")
    csv_caption_key: str = _flag("title", "CSV column of captions", "data")
    workers: int = _flag(4, "loader processes a rank; 0 reads in the training process", "data")
    shuffle_block: int = _flag(4096, "samples shuffled together in each worker (not in OpenCLIP)", "data")
    empty_caption: str = _flag(
        "drop", "what to do with empty captions (not in OpenCLIP)", "data", ("drop", "keep")
    )
    max_member_bytes: int = _flag(Limits.member_bytes, "drop larger images (not in OpenCLIP)", "data")
    max_pixels: int = _flag(
        Limits.pixels, "drop images of more pixels, before decoding (not in OpenCLIP)", "data"
    )
    max_aspect_ratio: float = _flag(Limits.aspect_ratio, "drop longer strips (not in OpenCLIP)", "data")
    max_caption_chars: int = _flag(
        Limits.caption_chars, "cut longer captions before the tokenizer (not in OpenCLIP)", "data"
    )
    exif_orientation: bool = _flag(
        False, "turn pictures as their EXIF tag says; OpenCLIP doesn't (not in OpenCLIP)", "data"
    )
    read_retries: int = _flag(5, "how often a remote read is tried again (not in OpenCLIP)", "data")
    read_timeout_seconds: float = _flag(
        30.0, "how long a remote read may make no progress (not in OpenCLIP)", "data"
    )
    allow_pipe: bool = _flag(False, "allow shard lists to run commands with pipe: (not in OpenCLIP)", "data")
    aug_cfg: Mapping[str, Any] | None = _flag(None, "augmentation options, e.g. scale='(0.9, 1.0)'", "data")
    image_mean: tuple[float, ...] | None = _flag(None, "image mean instead of OpenAI's", "data")
    image_std: tuple[float, ...] | None = _flag(None, "image standard deviation instead of OpenAI's", "data")
    image_interpolation: str | None = _flag(
        None, "image resampling", "data", ("bicubic", "bilinear", "random")
    )
    image_resize_mode: str | None = _flag(
        None, "resizing at inference", "data", ("shortest", "longest", "squash")
    )

    # Optimisation
    epochs: int = _flag(32, "(virtual) epochs to train for", "optimisation")
    batch_size: int = _flag(64, "samples a rank and micro-step", "optimisation")
    accum_freq: int = _flag(1, "micro-steps whose samples form one batch", "optimisation")
    lr: float = _flag(5e-4, "peak learning rate", "optimisation")
    beta1: float = _flag(0.9, "Adam's beta1", "optimisation")
    beta2: float = _flag(0.98, "Adam's beta2", "optimisation")
    eps: float = _flag(1e-6, "Adam's epsilon", "optimisation")
    wd: float = _flag(0.2, "weight decay (not on biases, norms, gains)", "optimisation")
    momentum: float | None = _flag(None, "momentum, for timm/ optimizers", "optimisation")
    opt: str = _flag("adamw", "adamw, or timm/NAME", "optimisation")
    warmup: int = _flag(10000, "warm-up in steps of the first start's global batch", "optimisation")
    lr_scheduler: str = _flag(
        "cosine", "shape after warm-up", "optimisation", ("cosine", "const", "const-cooldown")
    )
    epochs_cooldown: int | None = _flag(
        None, "const-cooldown: epochs of the cooldown at the end", "optimisation"
    )
    lr_cooldown_end: float = _flag(0.0, "const-cooldown: final learning rate", "optimisation")
    lr_cooldown_power: float = _flag(1.0, "const-cooldown: power of the decay", "optimisation")
    skip_scheduler: bool = _flag(False, "constant learning rate, no warm-up", "optimisation")
    grad_clip_norm: float | None = _flag(None, "clip the gradient's global norm", "optimisation")
    siglip: bool = _flag(False, "SigLIP's sigmoid loss", "optimisation")
    loss_dist_impl: str | None = _flag(None, "SigLIP's distributed implementation", "optimisation")
    local_loss: bool = _flag(
        True, "each rank computes the loss of its own samples only (OpenCLIP: false)", "optimisation"
    )
    gather_with_grad: bool = _flag(
        True,
        "gather features with their gradient: the one process's gradient on any number (OpenCLIP: false)",
        "optimisation",
    )
    max_bad_steps: int = _flag(
        20, "stop after this many non-finite steps in a row (not in OpenCLIP)", "optimisation"
    )
    seed: int = _flag(0, "seed of weights, data order and augmentation", "optimisation")

    # The run
    logs: str = _flag("logs", "folder of all runs", "run")
    name: str | None = _flag(None, "the run's folder under --logs; default: the config file's name", "run")
    resume: str | None = _flag(None, "checkpoint to continue from when the run has none of its own", "run")
    save_frequency: int = _flag(1, "keep a checkpoint every so many epochs; 0 keeps only the last", "run")
    save_every_samples: int | None = _flag(None, "also save every so many samples (not in OpenCLIP)", "run")
    save_every_minutes: float | None = _flag(30.0, "also save every so many minutes (not in OpenCLIP)", "run")
    keep_last: int = _flag(2, "how many of the in-between checkpoints to keep (not in OpenCLIP)", "run")
    log_every_n_steps: int = _flag(100, "steps a log line", "run")
    log_level: str = _flag("info", "least level that is logged", "run", ("debug", "info", "warning"))
    report_to: str = _flag(
        "",
        "also log to: wandb, tensorboard or all",
        "run",
        ("", "wandb", "tensorboard", "wandb,tensorboard", "tensorboard,wandb", "all"),
    )
    wandb_project_name: str = _flag("clip_la", "Weights & Biases project", "run")
    wandb_notes: str = _flag("", "Weights & Biases notes", "run")
    dist_backend: str | None = _flag(None, "nccl or gloo; default by device", "run")
    dist_timeout_minutes: float = _flag(30.0, "how long ranks wait for each other (not in OpenCLIP)", "run")
    ddp_static_graph: bool = _flag(False, "DDP's static graph optimisation", "run")

    # Evaluation while training
    zeroshot: str | None = _flag(None, "zero-shot tree or shards (not in OpenCLIP)", "evaluation")
    classnames: str | None = _flag(
        None,
        "class names of --zeroshot: a file, or a list's name; by default classnames.txt in the tree, "
        "beside the shards or above them (not in OpenCLIP)",
        "evaluation",
    )
    templates: str = _flag(
        "openai-80", "prompt templates: a set's name or a file (not in OpenCLIP)", "evaluation"
    )
    zeroshot_frequency: int = _flag(
        2, "epochs between zero-shot evaluations; 0 for the last epoch only", "evaluation"
    )
    zeroshot_every_samples: int | None = _flag(
        None, "samples between zero-shot evaluations, in place of epochs (not in OpenCLIP)", "evaluation"
    )
    val_block_size: int = _flag(
        256, "pairs that the validation loss tells apart at a time (not in OpenCLIP)", "evaluation"
    )
    val_frequency: int = _flag(1, "epochs between validation losses; 0 for the last epoch only", "evaluation")
    val_every_samples: int | None = _flag(
        None, "samples between validation losses, in place of epochs (not in OpenCLIP)", "evaluation"
    )
    diagnostics: bool = _flag(
        False,
        "measure every attention layer on a few pairs, and gradients by tower, for clip-la report "
        "(not in OpenCLIP)",
        "evaluation",
    )
    diagnostics_frequency: int = _flag(
        1, "epochs between --diagnostics; 0 for the start and the end only (not in OpenCLIP)", "evaluation"
    )
    evaluators: Sequence[Mapping[str, Any]] = _flag(
        (),
        "more evaluations, a list of settings each: kind (zeroshot, retrieval or validation), data, name, "
        "every_epochs or every_samples, and those of the kind (not in OpenCLIP)",
        "evaluation",
    )

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_positive(
            self,
            "batch_size",
            "accum_freq",
            "epochs",
            "log_every_n_steps",
            "max_bad_steps",
            "shuffle_block",
            "keep_last",
            "max_member_bytes",
            "max_pixels",
            "max_aspect_ratio",
            "max_caption_chars",
            "save_every_samples",
            "zeroshot_every_samples",
            "val_every_samples",
        )
        _check_not_negative(
            self,
            "workers",
            "warmup",
            "save_frequency",
            "zeroshot_frequency",
            "val_frequency",
            "diagnostics_frequency",
            "lr",
            "wd",
        )
        if self.local_loss and not self.gather_with_grad:
            raise ConfigError(
                "--local-loss needs --gather-with-grad: without it each rank's gradient misses the others'"
            )
        if self.pretrained and self.pretrained_softmax:
            raise ConfigError(
                "--pretrained and --pretrained-softmax exclude each other; give the one you mean"
            )
        if self.lr_scheduler == "const-cooldown" and self.epochs_cooldown is None:
            raise ConfigError("--lr-scheduler const-cooldown needs --epochs-cooldown")
        if self.classnames is not None and self.zeroshot is None:
            raise ConfigError("--classnames belongs to --zeroshot DATA; give both or neither")
        try:
            read_specs(self.evaluators)
            if self.attention is not None:
                AttentionSpec.from_config(self.attention)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _check_choices(config: RunConfig) -> None:
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        choices = entry.metadata["choices"]
        if choices and value is not None and value not in choices:
            raise ConfigError(
                f"{flag_name(entry.name)} is {value!r}; expected one of {', '.join(map(repr, choices))}"
            )


def _check_positive(config: RunConfig, *names: str) -> None:
    for name in names:
        if getattr(config, name) is not None and getattr(config, name) <= 0:
            raise ConfigError(f"{flag_name(name)} is {getattr(config, name)}; expected more than 0")


def _check_not_negative(config: RunConfig, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 0:
            raise ConfigError(f"{flag_name(name)} is {getattr(config, name)}; expected 0 or more")


def flag_name(name: str) -> str:
    """The command-line spelling of a setting: `batch_size` -> `--batch-size`."""
    return "--" + name.replace("_", "-")
