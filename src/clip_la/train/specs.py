"""What a run's config says of its data."""

from __future__ import annotations

from dataclasses import replace

from clip_la.config import ConfigError, RunConfig
from clip_la.data.spec import DataSpec, Limits


def train_spec(config: RunConfig, rank: int, world_size: int) -> DataSpec:
    """What one rank reads to train.

    Raises:
        ConfigError: no training data.
    """
    if config.train_data is None:
        raise ConfigError("no training data; give --train-data")
    return replace(
        data_spec(config, config.train_data),
        num_samples=config.train_num_samples,
        rank=rank,
        world_size=world_size,
        resampled=config.dataset_resampled,
        upsampling_factors=config.train_data_upsampling_factors,
    )


def data_spec(config: RunConfig, data: str) -> DataSpec:
    """What training and validation data have in common."""
    return DataSpec(
        train_data=data,
        batch_size=config.batch_size,
        dataset_type=config.dataset_type,  # type: ignore[arg-type]
        seed=config.seed,
        workers=config.workers,
        shuffle_block=config.shuffle_block,
        csv_img_key=config.csv_img_key,
        csv_caption_key=config.csv_caption_key,
        csv_separator=config.csv_separator,
        empty_caption=config.empty_caption,  # type: ignore[arg-type]
        exif_orientation=config.exif_orientation,
        allow_pipe=config.allow_pipe,
        retries=config.read_retries,
        timeout_seconds=config.read_timeout_seconds,
        limits=Limits(
            member_bytes=config.max_member_bytes,
            pixels=config.max_pixels,
            aspect_ratio=config.max_aspect_ratio,
            caption_chars=config.max_caption_chars,
        ),
    )
