"""What a continued run takes from its checkpoint and what from its config."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from clip_la.config import RunConfig
from clip_la.distributed import World
from clip_la.train import resume

CONFIG = RunConfig(batch_size=32, warmup=10, epochs=5)


def world(size: int = 1, rank: int = 0) -> World:
    return World(rank, rank, size, torch.device("cpu"))


def saved(config: RunConfig = CONFIG, epoch_samples: int = 3200, **overrides: Any) -> resume.Saved:
    clock = resume.clock(None, config, world(), epoch_samples)
    ranks = [{"loader": {"rank": 0}, "lost": {"no_text": 3}}, {"loader": {"rank": 1}, "lost": {"no_text": 4}}]
    return {"config": resume.plain(vars(config)), "clock": vars(clock), "ranks": ranks, **overrides}


def test_warm_up_keeps_its_samples_when_batch_or_ranks_change() -> None:
    first = resume.clock(None, CONFIG, world(), 3200)
    assert (first.warmup_samples, first.total_samples) == (320, 16000)
    for config, size in (
        (replace(CONFIG, batch_size=64), 1),
        (CONFIG, 4),
        (replace(CONFIG, accum_freq=2), 1),
    ):
        assert resume.clock(saved(), config, world(size), 3200) == first


def test_a_changed_warm_up_is_taken_over() -> None:
    assert resume.clock(saved(), replace(CONFIG, warmup=20), world(), 3200).warmup_samples == 640


def test_a_changed_horizon_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="clip_la"):
        clock = resume.clock(saved(), replace(CONFIG, epochs=8), world(), 3200)
    assert clock.total_samples == 25600
    assert "planned for 16,000 samples, now for 25,600" in caplog.text


def test_other_settings_that_change_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="clip_la"):
        resume._warn_of_changes(saved()["config"], replace(CONFIG, lr=1e-2, keep_last=9))
    assert "--lr was 0.0005 when this run was saved and is 0.01 now" in caplog.text
    assert "keep-last" not in caplog.text


def test_each_rank_goes_on_where_it_was_and_new_ranks_learn_the_epoch() -> None:
    assert resume.loader_state(saved(), world(2, 1)) == {"rank": 1}
    assert resume.loader_state(saved(), world(4, 3)) == {"rank": 0}
    assert resume.loader_state(None, world()) is None


def test_no_lost_sample_is_forgotten_when_ranks_change() -> None:
    assert resume.lost_samples(saved(), world(2, 1)) == Counter(no_text=4)
    assert resume.lost_samples(saved(), world(1)) == Counter(no_text=7)
    assert sum(resume.lost_samples(saved(), world(4, rank)).total() for rank in range(4)) == 7


def test_random_numbers_go_on_where_they_were() -> None:
    resume.seed_everything(3)
    state = {"ranks": [{"rng": resume.rng_state(world())}]}
    expected = torch.rand(4)
    torch.rand(7)
    resume.restore_rng(state, world())
    assert torch.equal(torch.rand(4), expected)
