"""What a run will take, from its config alone: estimates by formulas, nothing is measured."""

from __future__ import annotations

from dataclasses import dataclass

from clip_la.bundle import resolve_model_config
from clip_la.config import RunConfig
from clip_la.model_size import Shape, count_parameters, model_shape, training_flops

H200_BF16_FLOPS = 989e12  # a second, dense, from NVIDIA's data sheet
# OpenCLIP's docs/PRETRAINED.md gives GPU-hours of its LAION-400M runs on A100 (312e12 bf16 FLOPs a second):
# with model_size's FLOPs, ViT-B/16's 10,700 hours are 13 % of the peak, ViT-L/14's 50,800 hours 16 %.
PUBLISHED_UTILISATION = 0.15

OPTIMIZER_BYTES = 20  # a parameter: fp32 weight, gradient, DDP's bucket, Adam's two moments
CHECKPOINT_BYTES = 12  # a parameter on disk: fp32 weight and Adam's two moments
LOGIT_BYTES = 12  # an entry of a logit matrix: 16-bit logits, fp32 log-softmax and gradient, 16-bit gradient
FIXED_BYTES = 3 * 2**30  # CUDA context, NCCL buffers, allocator's slack


def checkpoint_bytes(num_parameters: int) -> int:
    """Size of one checkpoint file with Adam's moments."""
    return CHECKPOINT_BYTES * num_parameters


def num_kept_checkpoints(config: RunConfig) -> int:
    """Files at the run's end: one every --save-frequency epochs, the rolling ones, one being written."""
    kept = config.epochs // config.save_frequency if config.save_frequency else 1
    return kept + config.keep_last + 1


@dataclass(frozen=True)
class Plan:
    """What a run comes to on `num_gpus` GPUs. All but the first four are estimates.

    Attributes:
        global_batch: samples a step.
        num_steps, num_samples: of the whole run; None where sizes.json must be read first.
        num_parameters: of the model.
        sample_flops: floating-point operations of one training sample, recomputing included.
        gpu_bytes: memory a GPU.
        checkpoint_bytes: one file.
        num_kept_checkpoints: files at the end.
    """

    global_batch: int
    num_steps: int
    num_samples: int
    num_parameters: int
    sample_flops: float
    gpu_bytes: float
    checkpoint_bytes: int
    num_kept_checkpoints: int

    def hours(self, num_gpus: int, utilisation: float) -> float:
        """samples x FLOPs / (GPUs x peak x utilisation)."""
        rate = num_gpus * H200_BF16_FLOPS * utilisation
        return self.num_samples * self.sample_flops / rate / 3600


def make_plan(config: RunConfig, num_gpus: int, epoch_samples: int) -> Plan:
    """The plan of a run.

    Args:
        config: the run.
        num_gpus: one rank each.
        epoch_samples: global samples of a virtual epoch.
    """
    model = resolve_model_config(
        config.model,
        attention=config.attention,
        force_image_size=config.force_image_size,
        force_context_length=config.force_context_length,
    )
    shape, num_parameters = model_shape(model), count_parameters(model)
    global_batch = config.batch_size * config.accum_freq * num_gpus
    steps_an_epoch = -(-epoch_samples // global_batch)
    num_steps = config.epochs * steps_an_epoch
    return Plan(
        global_batch=global_batch,
        num_steps=num_steps,
        num_samples=num_steps * global_batch,
        num_parameters=num_parameters,
        sample_flops=training_flops(shape, global_batch, config.grad_checkpointing),
        gpu_bytes=memory_bytes(config, shape, num_parameters, global_batch),
        checkpoint_bytes=checkpoint_bytes(num_parameters),
        num_kept_checkpoints=num_kept_checkpoints(config),
    )


def memory_bytes(config: RunConfig, shape: Shape, num_parameters: int, global_batch: int) -> float:
    """Weights, gradients and moments; activations of a micro-batch; logits; a fixed part."""
    towers = (shape.image, shape.text)
    if config.grad_checkpointing:
        sample = sum(tower.checkpointed_bytes for tower in towers)
    else:
        sample = sum(tower.activation_bytes for tower in towers)
    if config.precision == "fp32":
        sample *= 2
    columns = global_batch if config.local_loss else global_batch * global_batch / config.batch_size
    logits = 2 * LOGIT_BYTES * config.batch_size * columns
    return OPTIMIZER_BYTES * num_parameters + sample * config.batch_size + logits + FIXED_BYTES
