from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

from clip_la.data.storage import OpenOptions
from clip_la.data.urls import MAX_SHARDS, ShardListError, count_samples, expand_shards, shard_weights

OPTIONS = OpenOptions()


def test_braces_globs_and_parts(tmp_path: Path) -> None:
    for name in ("b1.tar", "b0.tar", "b10.tar"):
        (tmp_path / name).touch()
    found = expand_shards(f"a/{{08..10}}.tar::{tmp_path}/b?.tar::s3x.tar")
    assert found == [
        "a/08.tar",
        "a/09.tar",
        "a/10.tar",
        f"{tmp_path}/b0.tar",
        f"{tmp_path}/b1.tar",
        "s3x.tar",
    ]


def test_a_file_named_like_a_glob(tmp_path: Path) -> None:
    (tmp_path / "x[1].tar").touch()
    assert expand_shards(f"{tmp_path}/x[1].tar") == [f"{tmp_path}/x[1].tar"]


def test_a_directory_is_not_a_tar(tmp_path: Path) -> None:
    with pytest.raises(ShardListError, match="not a tar"):
        expand_shards(str(tmp_path))


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ("", "empty part"),
        ("a.tar::", "empty part"),
        ("a{1..3.tar", "braces"),
        ("/no/such/folder/*.tar", "no shard matches"),
        ("ftp://host/a.tar", "scheme"),
        ("simplecache://bucket/a.tar", "scheme"),
        (f"{{0..{MAX_SHARDS}}}.tar", "more than"),
        ("{0..99999999999999}.tar", "more than"),
        ("{5..-99999999999999..1}.tar", "more than"),
        ("{0..1000}{0..1000}.tar", "more than"),
    ],
)
def test_unusable_lists(shards: str, message: str) -> None:
    with pytest.raises(ShardListError, match=message):
        expand_shards(shards)


def test_remote_glob() -> None:
    store = fsspec.filesystem("memory")
    for name in ("b", "a"):
        store.pipe_file(f"/globbed/{name}.tar", b"")
    assert expand_shards("memory://globbed/*.tar") == ["memory:///globbed/a.tar", "memory:///globbed/b.tar"]


def test_weights() -> None:
    assert shard_weights("a{0..1}.tar::b.tar", "2::0.5") == [2.0, 2.0, 0.5]
    for factors in ("1", "1::x", "1::-1", "0::0", "1::nan", "1::inf"):
        with pytest.raises(ShardListError):
            shard_weights("a.tar::b.tar", factors)


def test_counts_from_sizes_then_stats(tmp_path: Path) -> None:
    urls = [str(tmp_path / f"{index:05d}.tar") for index in range(3)]
    for url in urls[:2]:
        Path(url).touch()
    (tmp_path / "sizes.json").write_text(json.dumps({"00000.tar": 7}))
    with pytest.raises(ShardListError, match="--train-num-samples"):
        count_samples(urls, OPTIONS)
    (tmp_path / "00001_stats.json").write_text(json.dumps({"successes": 5, "count": 9}))
    assert count_samples(urls, OPTIONS) == 12  # the third does not exist


@pytest.mark.parametrize("size", ["-5", '"x"', "1e400", "null", "1.5", "[1]"])
def test_sizes_that_are_no_numbers_of_samples(tmp_path: Path, size: str) -> None:
    url = str(tmp_path / "0.tar")
    (tmp_path / "0_stats.json").write_text(f'{{"successes": {size}}}')
    with pytest.raises(ShardListError, match=r"_stats.json of .* expected a whole number"):
        count_samples([url], OPTIONS)
    (tmp_path / "sizes.json").write_text(f'{{"0.tar": {size}}}')
    with pytest.raises(ShardListError, match=r"sizes.json beside .* expected a whole number"):
        count_samples([url], OPTIONS)


@pytest.mark.parametrize("content", ["[1]", "{", "[" * 100_000])
def test_broken_sizes(tmp_path: Path, content: str) -> None:
    (tmp_path / "sizes.json").write_text(content)
    with pytest.raises(ShardListError, match=r"sizes\.json"):
        count_samples([str(tmp_path / "0.tar")], OPTIONS)
