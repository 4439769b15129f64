"""A trained model at another resolution: its position embeddings are resized, its transform too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from clip_la.export.hub import write_hub_folder
from clip_la.model_choice import ModelChoice, load_model


@pytest.fixture(scope="module")
def hub_folder(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    write_hub_folder(load_model(ModelChoice(run_folder), "cpu"), folder, lambda _: "a card")
    return folder


@pytest.mark.parametrize("kind", ["run", "hub"])
def test_a_model_of_32_pixels_takes_images_of_64(kind: str, run_folder: Path, hub_folder: Path) -> None:
    path = run_folder if kind == "run" else hub_folder
    own, larger = (load_model(ModelChoice(path, image_size=size), "cpu") for size in (None, 64))
    picture = Image.new("RGB", (50, 50), (200, 30, 30))
    shapes = [tuple(bundle.preprocess_val(picture).shape) for bundle in (own, larger)]
    assert shapes == [(3, 32, 32), (3, 64, 64)]
    positions = [bundle.model.visual.positional_embedding for bundle in (own, larger)]
    assert [len(rows) for rows in positions] == [1 + 4 * 4, 1 + 8 * 8]
    torch.testing.assert_close(positions[1][0], positions[0][0])  # of the class token
    images = larger.preprocess_val(picture)[None]
    assert larger.encode_image(images).shape == own.encode_image(own.preprocess_val(picture)[None]).shape
