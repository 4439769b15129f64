"""Images of webdataset shards with a text each: `KEY.jpg` with `KEY.cls` (a label) or `KEY.txt` (captions).

The shards are read through once to list the texts, so that what doesn't fit is refused before anything is
computed, and so that the images have numbers; then each process reads the part it was given.
"""

from __future__ import annotations

import glob
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from clip_la.data.losses import Cause, Loss
from clip_la.data.samples import RawSample, read_shard
from clip_la.data.spec import Limits
from clip_la.data.storage import OpenOptions, is_remote, local_path
from clip_la.data.urls import expand_shards
from clip_la.evaluate import ranks
from clip_la.evaluate.features import progress
from clip_la.evaluate.images import RawImage

_MAX_LISTED = 10


def find_shards(data: str) -> str | None:
    """The shard list that `data` means, if any: one itself, or a folder with shards in it or in its `test`.

    `test` is where CLIP_benchmark's sets have them.
    """
    folder = Path(local_path(data))
    if is_remote(data) or not folder.is_dir():
        return data if data.endswith(".tar") or is_remote(data) or "::" in data else None
    # A tree of class folders may still hold the archive that it came from.
    has_folders = any(entry.is_dir() and not entry.name.startswith(".") for entry in folder.iterdir())
    place = folder / "test" if has_folders else folder
    return f"{glob.escape(str(place))}/*.tar" if any(place.glob("*.tar")) else None


def name_of(data: str) -> str:
    """A short name for a file, folder or shard list; CLIP_benchmark's `test` gives way to its parent."""
    path = Path(data.split("::")[0])
    if path.suffix in (".json", ".csv", ".tsv"):
        return path.stem
    folder = path.parent if path.suffix == ".tar" else path.resolve()
    return folder.parent.name if folder.name == "test" else folder.name


class NumberedShards:
    """Images of shards that have a text, numbered through all shards. Built by all ranks together.

    Args:
        shards: as in training: "dir/{00000..00007}.tar", globs, "::" between lists.
        suffix: of the text member, "cls" or "txt".

    Attributes:
        urls: of the shards.
        texts: of the images, without white space around them; none is empty.
        unusable: a line on each thing that is no image with a text.

    Raises:
        ValueError: no shard, a shard that isn't there, or no such image in any.
        RanksError: on all ranks, where it happened on one of several.
    """

    def __init__(self, shards: str, suffix: str) -> None:
        self._suffix = suffix
        with ranks.failing_together():
            self.urls = tuple(expand_shards(shards))
            listing = [self._list(url) for url in progress(ranks.share(self.urls), "listing shards")]
        listings = ranks.interleave(ranks.gather_over_ranks(listing), len(self.urls))
        self.texts = [text for texts, _ in listings for text in texts]
        self.unusable = tuple(line for _, lines in listings for line in lines)
        self._starts = [0, *accumulate(len(texts) for texts, _ in listings)]
        if not self.texts:
            found = "\n  ".join(self.unusable[:_MAX_LISTED])
            raise ValueError(f"no image with a .{suffix} member in {shards}; found:\n  {found}")

    def read(self, numbers: Iterable[int]) -> Iterator[RawImage]:
        """The images of the given numbers, which ascend. A shard is read from its start to the last wanted.

        Raises:
            ValueError: a shard has changed since it was listed.
        """
        wanted = iter(numbers)
        number = next(wanted, None)
        for shard, url in enumerate(self.urls):
            start, stop = self._starts[shard], self._starts[shard + 1]
            if number is None or number >= stop:
                continue
            for place, item in enumerate(self._samples(url), start=start):
                if place == number:
                    yield RawImage(f"{url}: {item.key}", item.image)
                    number = next(wanted, None)
                if number is None or number >= stop:
                    break
            else:
                raise ValueError(f"{url} had {stop - start} images with a .{self._suffix}, and has fewer now")

    def _samples(self, url: str) -> Iterator[RawSample]:
        return (item[0] for item in self._items(url) if not isinstance(item, Loss))

    def _list(self, url: str) -> tuple[list[str], list[str]]:
        """The texts of one shard's images, and a line for each thing that is none."""
        texts: list[str] = []
        unusable: list[str] = []
        for item in self._items(url):
            if not isinstance(item, Loss):
                texts.append(item[1])
            elif item.cause is Cause.SHARD_MISSING:
                raise ValueError(f"there is no shard {url}; name the shards that are there")
            elif item.cause is not Cause.EXTRA_IMAGE:  # one of the two is used
                unusable.append(str(item))
        return texts, unusable

    def _items(self, url: str) -> Iterator[tuple[RawSample, str] | Loss]:
        for item in read_shard(url, Limits(), OpenOptions(), self._suffix):
            yield item if isinstance(item, Loss) else _with_text(item)


def _with_text(sample: RawSample) -> tuple[RawSample, str] | Loss:
    try:
        text = sample.text.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        return Loss(Cause.TEXT_ENCODING, sample.shard, sample.key, str(error))
    return (sample, text) if text else Loss(Cause.TEXT_EMPTY, sample.shard, sample.key)


class ShardImages:
    """The labelled images of shards: `.cls` holds a class's index, name or WordNet id; see `ImageSource`.

    Raises:
        ValueError, RanksError: as `NumberedShards`.
    """

    noun = "label"
    num_other_files = 0

    def __init__(self, shards: str) -> None:
        self.name = shards
        self._shards = NumberedShards(shards, "cls")
        self.urls: Sequence[str] = self._shards.urls
        self.unusable = self._shards.unusable
        self.labels = tuple(sorted(set(self._shards.texts)))
        number_of = {label: number for number, label in enumerate(self.labels)}
        self.label_of: Sequence[int] = array("l", (number_of[text] for text in self._shards.texts))

    def read(self, numbers: Iterable[int]) -> Iterator[RawImage]:
        """The images of the given numbers, which ascend."""
        return self._shards.read(numbers)

    def file_beside(self, name: str) -> Path | None:
        """A file of that name in the local shards' folder or the one above it, if there is one."""
        url = self.urls[0]
        folder = Path(local_path(url)).parent
        places = () if is_remote(url) else (folder / name, folder.parent / name)
        return next((place for place in places if place.is_file()), None)
