"""Retrieval over captioned images: the forms of caption files, many captions an image, several processes."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image
from torch.nn.functional import normalize
from toy_clip import ToyClip, to_tensor, tokenize, toy_bundle
from toy_shards import write_tar

from clip_la.evaluate.caption_retrieval import CaptionRetrieval
from clip_la.evaluate.captions import load_captioned_images
from clip_la.evaluate.retrieval import retrieval_metrics

NUM_CAPTIONS = (5, 1, 2, 5, 3, 1, 1, 4, 2, 5, 1)


@pytest.fixture
def pictures(tmp_path: Path) -> dict[str, list[str]]:
    """Pictures of one colour in `tmp_path/images`, and their captions by file name."""
    rng = random.Random(0)
    (tmp_path / "images").mkdir()
    captions = {}
    for index, count in enumerate(NUM_CAPTIONS):
        name = f"{index:04}.png"
        Image.new("RGB", (8, 8), tuple(rng.randrange(256) for _ in range(3))).save(tmp_path / "images" / name)
        captions[name] = [f"number {rng.randrange(1000)}, seen {time} times" for time in range(count)]
    return captions


def write_table(path: Path, captions: dict[str, list[str]], columns: tuple[str, str], separator: str) -> Path:
    rows = [f'{name}{separator}"{caption}"' for name, own in captions.items() for caption in own]
    random.Random(1).shuffle(rows)  # captions of one image needn't follow each other
    path.write_text("\n".join([separator.join(columns), *rows]))
    return path


def write_coco(path: Path, captions: dict[str, list[str]]) -> Path:
    ids = {name: 1000 - index for index, name in enumerate(captions)}
    images = [{"id": number, "file_name": name} for name, number in ids.items()]
    annotations = [{"image_id": ids[name], "caption": c} for name, own in captions.items() for c in own]
    path.write_text(json.dumps({"images": images, "annotations": annotations}))
    return path


def write_karpathy(path: Path, captions: dict[str, list[str]]) -> Path:
    images = [
        {"filepath": "images", "filename": name, "split": "test", "sentences": [{"raw": c} for c in own]}
        for name, own in captions.items()
    ]
    images.append({"filename": "absent.png", "split": "train", "sentences": [{"raw": "never read"}]})
    path.write_text(json.dumps({"images": images}))
    return path


def write_shards(folder: Path, captions: dict[str, list[str]], images: Path) -> str:
    names = list(captions)
    for shard, part in enumerate((names[:4], names[4:5], names[5:])):
        members = [
            member
            for name in part
            for member in (
                (f"{name[:-4]}.png", (images / name).read_bytes()),
                (f"{name[:-4]}.txt", "\n".join(captions[name]).encode()),
            )
        ]
        write_tar(folder / f"{shard}.tar", members)
    return f"{folder}/{{0..2}}.tar"


def brute_force(captions: dict[str, list[str]], images: Path) -> dict[str, Any]:
    """The N x M computation, with one image and one caption at a time."""
    pixels = [to_tensor(Image.open(images / name)).mean(dim=(1, 2)) - 0.3 for name in captions]
    texts = [tokenize(caption)[0].float() / 255 - 0.3 for own in captions.values() for caption in own]
    owner = [index for index, own in enumerate(captions.values()) for _ in own]
    scores = (normalize(torch.stack(pixels), dim=1) @ normalize(torch.stack(texts), dim=1).T).tolist()
    of_images = [
        min(sorted(row, reverse=True).index(row[i]) for i, own in enumerate(owner) if own == image) + 1
        for image, row in enumerate(scores)
    ]
    columns = list(zip(*scores, strict=True))
    of_texts = [sorted(columns[i], reverse=True).index(columns[i][own]) + 1 for i, own in enumerate(owner)]
    found: dict[str, Any] = {"num_images": len(pixels), "num_texts": len(texts)}
    for direction, places in (("image_to_text", of_images), ("text_to_image", of_texts)):
        for k in (1, 5, 10):
            found[f"{direction}_recall@{k}"] = sum(place <= k for place in places) / len(places)
        found[f"{direction}_mean_rank"] = sum(places) / len(places)
        found[f"{direction}_median_rank"] = torch.tensor(places).double().quantile(0.5).item()
    return found


@pytest.mark.parametrize("form", ["csv", "tsv", "coco", "karpathy", "shards"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_form_equals_brute_force(
    pictures: dict[str, list[str]], tmp_path: Path, form: str, workers: int
) -> None:
    images = tmp_path / "images"
    data: Path | str = {
        "csv": lambda: write_table(images / "captions.csv", pictures, ("image", "caption"), ","),
        "tsv": lambda: write_table(tmp_path / "pairs.tsv", pictures, ("filepath", "title"), "\t"),
        "coco": lambda: write_coco(tmp_path / "captions_val2017.json", pictures),
        "karpathy": lambda: write_karpathy(tmp_path / "dataset_coco.json", pictures),
        "shards": lambda: write_shards(tmp_path / "shards", pictures, images),
    }[form]()
    options = {"images": images} if form in ("tsv", "coco") else {}
    evaluator = CaptionRetrieval(data, batch_size=3, workers=workers, **options)
    metrics = evaluator.run(toy_bundle())
    assert (metrics.pop("num_unreadable"), metrics.pop("num_captions_left_out")) == (0, 0)
    assert metrics == pytest.approx(brute_force(pictures, images))
    assert 0 < metrics["image_to_text_recall@1"] < metrics["image_to_text_recall@5"]
    assert metrics["num_texts"] == sum(NUM_CAPTIONS)


def test_unreadable_images_and_empty_captions_are_left_out_counted_and_named(
    pictures: dict[str, list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = tmp_path / "images"
    (images / "0003.png").write_bytes(b"broken")
    (images / "0007.png").unlink()
    rest = {name: own for name, own in pictures.items() if name not in ("0003.png", "0007.png")}
    given = {name: [*own, " "] if name == "0001.png" else own for name, own in pictures.items()}
    with caplog.at_level(logging.WARNING):
        metrics = CaptionRetrieval(write_coco(images / "c.json", given), workers=0).run(toy_bundle())
    assert (metrics.pop("num_unreadable"), metrics.pop("num_captions_left_out")) == (3, 9)
    assert metrics == pytest.approx(brute_force(rest, images))
    for name in ("0001.png", "0003.png", "0007.png"):
        assert name in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "has the columns none; expected"),
        ("a.csv", "url,caption\nx,y\n", "has the columns url, caption; expected for the image"),
        ("a.csv", "image,caption\n,y\n", "no caption with an image"),
        ("a.json", "{", "neither COCO's captions"),
        ("a.json", "[1]", "neither COCO's captions"),
        ("a.json", '{"images": [], "annotations": [{"image_id": 3, "caption": "x"}]}', "KeyError: 3"),
        ("a.json", '{"images": [{"split": "val"}]}', "has no split 'test'; it has val"),
        ("b.json", "", "found no file at"),
    ],
)
def test_what_is_no_set_of_captions(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / f"a{name[1:]}").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_captioned_images(tmp_path / name)


def test_no_readable_image(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("image,caption\nabsent.png,a cat\n")
    with pytest.raises(ValueError, match="none of the 1 images could be read"):
        CaptionRetrieval(tmp_path / "a.csv", workers=0).run(toy_bundle())


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    metrics = CaptionRetrieval(folder / "images" / "c.json", batch_size=2, workers=0).run(toy_bundle())
    generator = torch.Generator().manual_seed(0)
    images, texts = torch.randn(40, 8, generator=generator), torch.randn(90, 8, generator=generator)
    chunked = retrieval_metrics(images, texts, torch.arange(90) % 40, scores_at_once=500)
    (folder / f"rank{rank}.json").write_text(json.dumps([metrics, chunked]))
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_processes_give_what_one_gives(
    pictures: dict[str, list[str]], tmp_path: Path, world_size: int
) -> None:
    data = write_coco(tmp_path / "images" / "c.json", pictures)
    (tmp_path / "images" / "0004.png").write_bytes(b"broken")
    alone = CaptionRetrieval(data, batch_size=2, workers=0).run(toy_bundle(ToyClip()))
    mp.start_processes(run_rank, (world_size, tmp_path), nprocs=world_size, start_method="fork")
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(world_size)]
    generator = torch.Generator().manual_seed(0)
    images, texts = torch.randn(40, 8, generator=generator), torch.randn(90, 8, generator=generator)
    chunked = retrieval_metrics(images, texts, torch.arange(90) % 40, scores_at_once=500)
    assert found == [[alone, chunked]] * world_size
