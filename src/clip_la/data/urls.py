"""Shard lists: from what a person types to the URLs of shards, and how many samples they hold."""

from __future__ import annotations

import glob
import json
import logging
import os
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

import braceexpand
import fsspec

from clip_la.data.remote import check_scheme
from clip_la.data.storage import PIPE, OpenOptions, is_remote, local_path, read_small

MAX_SHARDS = 1_000_000
MAX_SIZES_BYTES = 2**28
BRACE_RANGE = re.compile(r"{(-?\d+)\.\.(-?\d+)[.}]")


class ShardListError(ValueError):
    """A shard list that can't be used, with what to do about it."""


def expand_shards(shards: str) -> list[str]:
    """URLs of "a/{00000..00007}.tar::b/*.tar": brace ranges, globs and "::" lists, in that order.

    Raises:
        ShardListError: nothing is named, a glob matches nothing, or a directory is named.
    """
    return [url for part in split_parts(shards) for url in expand_part(part)]


def sample_shards(shards: str, num_shards: int) -> str:
    """A shard list of `num_shards` of the shards, spread evenly over the list; all where there are fewer.

    Raises:
        ShardListError: as `expand_shards`.
    """
    urls = expand_shards(shards)
    step = max(1.0, len(urls) / num_shards)
    return "::".join(urls[int(n * step)] for n in range(min(num_shards, len(urls))))


def split_parts(shards: str) -> list[str]:
    """The "::" parts of a shard list."""
    parts = [part.strip() for part in shards.split("::")]
    if not all(parts):
        raise ShardListError(f"shard list {shards!r} has an empty part; expected URLs joined by '::'")
    return parts


def expand_part(part: str) -> list[str]:
    """URLs that one part of a shard list stands for."""
    if part.startswith(PIPE):
        return _expand_braces(part)
    urls = [url for pattern in _expand_braces(part) for url in _expand_glob(pattern)]
    for url in urls:
        if is_remote(url):
            _check_remote(url)
        elif not url.endswith(".tar") and os.path.isdir(local_path(url)):
            raise ShardListError(
                f"{url} is not a tar but a directory; name its shards, as {url.rstrip('/')}/*.tar"
            )
    return urls


def _check_remote(url: str) -> None:
    try:
        check_scheme(url)
    except ValueError as error:
        raise ShardListError(str(error)) from error


def _expand_braces(pattern: str) -> list[str]:
    for first, last in BRACE_RANGE.findall(pattern):
        if abs(int(last) - int(first)) >= MAX_SHARDS:  # braceexpand would hold them all first
            raise ShardListError(f"shard list {pattern!r} names more than {MAX_SHARDS:,} shards")
    try:
        urls = list(islice(braceexpand.braceexpand(pattern), MAX_SHARDS + 1))
    except ValueError as error:
        raise ShardListError(f"shard list {pattern!r} has unbalanced braces: {error}") from error
    if len(urls) > MAX_SHARDS:
        raise ShardListError(f"shard list {pattern!r} names more than {MAX_SHARDS:,} shards")
    return urls


def _expand_glob(pattern: str) -> list[str]:
    if not set(pattern) & set("*[" if is_remote(pattern) else "*?["):
        return [pattern]
    if is_remote(pattern):
        _check_remote(pattern)
        filesystem, path = fsspec.core.url_to_fs(pattern)
        found = [filesystem.unstrip_protocol(name) for name in filesystem.glob(path)]
    else:
        found = [pattern] if os.path.exists(pattern) else glob.glob(local_path(pattern), recursive=True)
    if not found:
        raise ShardListError(f"no shard matches {pattern!r}; check the path")
    return sorted(found)


def shard_weights(shards: str, factors: str) -> list[float]:
    """One weight a shard from upsampling factors such as "2::1", one factor a part of the list."""
    parts, texts = split_parts(shards), factors.split("::")
    if len(parts) != len(texts):
        raise ShardListError(
            f"{len(texts)} upsampling factors ({factors}) for {len(parts)} parts of the shard list; "
            "expected as many, joined by '::'"
        )
    try:
        values = [float(text) for text in texts]
    except ValueError as error:
        raise ShardListError(f"upsampling factors {factors!r} are not numbers joined by '::'") from error
    if not (all(0 <= value < float("inf") for value in values) and any(values)):
        raise ShardListError(f"upsampling factors {factors!r}; expected numbers >= 0, not all 0")
    return [value for part, value in zip(parts, values, strict=True) for _ in expand_part(part)]


def count_samples(urls: Sequence[str], options: OpenOptions) -> int:
    """Samples in the shards as their makers recorded them.

    OpenCLIP's sizes.json in the shard's folder, else img2dataset's NNNNN_stats.json beside it. A
    local shard that doesn't exist counts 0.

    Raises:
        ShardListError: a shard with neither.
    """
    sizes: dict[str, dict[str, Any]] = {}
    return sum(_count_shard(url, sizes, options) for url in urls)


def _count_shard(url: str, sizes: dict[str, dict[str, Any]], options: OpenOptions) -> int:
    folder, name = os.path.split(url)
    if url.startswith(PIPE):
        raise ShardListError(f"unknown number of samples in {url}; give --train-num-samples")
    if folder not in sizes:
        sizes[folder] = _read_object(os.path.join(folder, "sizes.json"), options)
    if name in sizes[folder]:
        return _size(sizes[folder][name], f"sizes.json beside {url}")
    stats = _read_object(os.path.splitext(url)[0] + "_stats.json", options)
    if "successes" in stats:
        return _size(stats["successes"], f"the _stats.json of {url}")
    if not is_remote(url) and not os.path.exists(local_path(url)):
        logging.warning("shard %s does not exist; counted as 0 samples", url)
        return 0
    raise ShardListError(
        f"unknown number of samples in {url}: neither sizes.json in its folder nor "
        f"{os.path.splitext(name)[0]}_stats.json beside it says; give --train-num-samples"
    )


def _size(value: Any, where: str) -> int:
    if not isinstance(value, int) or value < 0:
        raise ShardListError(
            f"{where} says {value!r} samples; expected a whole number: mend it, or give --train-num-samples"
        )
    return value


def _read_object(url: str, options: OpenOptions) -> dict[str, Any]:
    """A small JSON file's object; {} where there is no such file."""
    try:
        content = json.loads(read_small(url, MAX_SIZES_BYTES, options))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ShardListError(
            f"{url} can't be read ({error}); mend that, or give --train-num-samples"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ShardListError(f"{url} is not valid JSON ({error}); mend or remove it") from error
    if not isinstance(content, dict):
        raise ShardListError(f"{url} holds a {type(content).__name__}; expected an object of numbers")
    return content
