from __future__ import annotations

from pathlib import Path

import pytest
from shard_builders import numbers_of, pair, picture, read_bytes, tar_bytes, text

from clip_la.data.losses import Cause, Loss
from clip_la.data.samples import RawSample, read_shard, split_name
from clip_la.data.spec import Limits
from clip_la.data.storage import OpenOptions


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("000.jpg", ("000", "jpg")),
        ("./a.b/000.JPG", ("./a.b/000", "jpg")),
        ("x.input.jpg", ("x", "input.jpg")),
        ("../x.txt", ("../x", "txt")),
        ("/etc/x.txt", ("/etc/x", "txt")),
        ("a\nb.txt", ("a\nb", "txt")),
        ("README", (None, "")),
        (".hidden", (None, "")),
        ("dir.d/README", (None, "")),
    ],
)
def test_split_name(name: str, expected: tuple[str | None, str]) -> None:
    assert split_name(name) == expected


def test_names_are_grouped_as_in_webdataset() -> None:
    tariterators = pytest.importorskip("webdataset.tariterators")
    for name in ("a.jpg", "d/a.jpg", "d.e/a.seg.png", "../a.txt", "a", ".a", "d.e/a", "./a.JPG"):
        key, suffix = tariterators.base_plus_ext(name)
        assert split_name(name) == (key, (suffix or "").lower())


def test_missing_partners(tmp_path: Path) -> None:
    entries = [*pair(0), ("1.jpg", picture(1)), ("2.txt", text(2)), ("3.x.jpg", b""), *pair(4)]
    samples, losses = read_bytes(tmp_path, tar_bytes(entries))
    assert numbers_of(samples) == [0, 4]
    assert losses.to_counts() == {"no_image": 2, "no_text": 1}
    assert losses.first[Cause.NO_TEXT].key == "1"
    assert losses.first[Cause.NO_IMAGE].detail == "has only .txt"


def test_json_is_not_needed(tmp_path: Path) -> None:
    entries = [("a.jpg", picture(0)), ("a.txt", text(0)), ("b.json", b"{" * 99999), ("b.jpg", picture(1))]
    samples, losses = read_bytes(tmp_path, tar_bytes([*entries, ("b.txt", text(1))]))
    assert numbers_of(samples) == [0, 1]
    assert not losses


def test_first_image_suffix_is_used(tmp_path: Path) -> None:
    entries = [("k.png", picture(5)), ("k.jpg", picture(1)), ("k.txt", text(1))]
    samples, losses = read_bytes(tmp_path, tar_bytes(entries))
    assert numbers_of(samples) == [1]
    assert losses.to_counts() == {"extra_image": 1}


def test_repeated_key_begins_a_new_sample(tmp_path: Path) -> None:
    samples, losses = read_bytes(tmp_path, tar_bytes([*pair(0, "k"), *pair(1, "k")]))
    assert numbers_of(samples) == [0, 1]
    assert not losses


def test_members_without_a_key_are_counted(tmp_path: Path) -> None:
    samples, losses = read_bytes(tmp_path, tar_bytes([("README", b"hello"), *pair(0)]))
    assert numbers_of(samples) == [0]
    assert losses.to_counts() == {"bad_name": 1}


def test_nothing_is_written_outside(tmp_path: Path) -> None:
    entries = [entry for key in ("../../x", "/etc/x", "a/b/x") for entry in pair(1, key)]
    samples, _ = read_bytes(tmp_path, tar_bytes(entries))
    assert [sample.key for sample in samples] == ["../../x", "/etc/x", "a/b/x"]
    assert [path.name for path in tmp_path.iterdir()] == ["shard.tar"]


def test_names_in_messages_cannot_steer_a_terminal() -> None:
    loss = Loss(Cause.NO_TEXT, "s.tar", "\x1b[2J" + "k" * 10_000, "line\nbreak")
    assert str(loss).isprintable()
    assert len(str(loss)) < 400


def test_images_alone_need_no_text_and_bring_their_metadata(tmp_path: Path) -> None:
    members = [("a.jpg", picture(1)), ("a.json", b'{"url": "x"}'), ("b.jpg", picture(2)), ("b.txt", b"two")]
    members += [("c.txt", b"no image")]
    shard = tmp_path / "0.tar"
    shard.write_bytes(tar_bytes(members))
    items = list(read_shard(str(shard), Limits(), OpenOptions(), images_alone=True))
    found = [(item.key, item.text, item.metadata) for item in items if isinstance(item, RawSample)]
    assert found == [("a", b"", b'{"url": "x"}'), ("b", b"two", b"")]
    assert [item.cause for item in items if isinstance(item, Loss)] == [Cause.NO_IMAGE]
