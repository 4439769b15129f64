"""Names and definitions of WordNet ids (n01440764, ...): timm's metadata and OpenCLIP's ImageNet-1k list."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.resources import files
from typing import Any

import open_clip
from timm.data import ImageNetInfo

_WORDNET_ID = re.compile(r"n\d{8}")
_TIMM_LISTS = {
    "imagenet-1k": "imagenet_synsets.txt",
    "imagenet-a": "imagenet_a_synsets.txt",
    "imagenet-r": "imagenet_r_synsets.txt",
    "imagenet-21k-p": "imagenet21k_miil_synsets.txt",
    "imagenet-21k-p-winter21": "imagenet21k_miil_w21_synsets.txt",
    "imagenet-22k": "imagenet22k_synsets.txt",
}
RELEASES = tuple(_TIMM_LISTS)
"""Known lists of ids: ImageNet-1k; the 200 of ImageNet-A and of -R; ImageNet-21K-P (Ridnik et al., arXiv
2104.10972) for the fall 2011 release (11,221 ids) and for winter 2021 (10,450); all 21,841 of fall 2011."""


def is_wordnet_id(text: str) -> bool:
    """Whether the text has the form of an ImageNet WordNet id: n and eight digits."""
    return _WORDNET_ID.fullmatch(text) is not None


def names_of(wordnet_id: str) -> tuple[str, ...]:
    """All names of a WordNet id, the one for prompts first; empty for an unknown id.

    The first is OpenCLIP's name for the 1,000 ids of ImageNet-1k, else WordNet's first lemma. The lemmas
    follow ("crane bird", "crane"). timm knows the 21,844 ids of all ImageNet releases.
    """
    lemmas = _lemmas(wordnet_id)
    curated = imagenet_1k().get(wordnet_id)
    return lemmas if curated is None else (curated, *(lemma for lemma in lemmas if lemma != curated))


def definition_of(wordnet_id: str) -> str:
    """WordNet's definition of an id; empty for an unknown one."""
    try:
        described: str = _metadata().label_name_to_description(wordnet_id, detailed=True)
    except KeyError:
        return ""
    return described.partition(": ")[2]


def names_of_release(release: str) -> dict[str, str]:
    """WordNet id -> name for prompts (the first of `names_of`) of one of `RELEASES`, in timm's order.

    Raises:
        ValueError: the installed timm doesn't ship the list.
    """
    # ImageNetInfo offers three of these lists by name; the files lie beside one another.
    path = files("timm.data") / "_info" / _TIMM_LISTS[release]
    if not path.is_file():
        raise ValueError(f"the installed timm has no list of {release}; pip install 'timm>=1.0.17'")
    return {wordnet_id: names_of(wordnet_id)[0] for wordnet_id in path.read_text().split()}


@lru_cache(maxsize=1)
def imagenet_1k() -> dict[str, str]:
    """WordNet id -> OpenCLIP's class name, in ImageNet-1k's order."""
    ids = ImageNetInfo("imagenet-1k").label_names()
    return dict(zip(ids, open_clip.IMAGENET_CLASSNAMES, strict=True))


def _lemmas(wordnet_id: str) -> tuple[str, ...]:
    try:
        description = _metadata().label_name_to_description(wordnet_id)
    except KeyError:
        return ()
    return tuple(lemma.strip() for lemma in description.split(","))


@lru_cache(maxsize=1)
def _metadata() -> Any:
    return ImageNetInfo("imagenet-22k")
