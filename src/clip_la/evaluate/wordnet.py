"""Names of WordNet ids (n01440764, ...), from timm's metadata and OpenCLIP's ImageNet-1k list."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import open_clip
from timm.data import ImageNetInfo

_WORDNET_ID = re.compile(r"n\d{8}")
_TIMM_SUBSETS = {
    "imagenet-1k": "imagenet-1k",
    "imagenet-21k-p": "imagenet-21k-miil",
    "imagenet-22k": "imagenet-22k",
}
RELEASES = tuple(_TIMM_SUBSETS)
"""Known lists of ids: ImageNet-1k; the 11,221 ids of ImageNet-21K-P (Ridnik et al., arXiv 2104.10972) for the
fall 2011 release; all 21,841 ids of that release."""


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


def names_of_release(release: str) -> dict[str, str]:
    """WordNet id -> name for prompts (the first of `names_of`) of one of `RELEASES`, in timm's order."""
    ids = ImageNetInfo(_TIMM_SUBSETS[release]).label_names()
    return {wordnet_id: names_of(wordnet_id)[0] for wordnet_id in ids}


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
