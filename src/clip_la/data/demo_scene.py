"""The demo set's little world: what a scene holds, how one is drawn at random, how it is put into words.

Everything here is a pure function of its arguments and of the ``random.Random`` handed in. Coordinates and
lengths are fractions of the picture's side, x to the right and y downwards.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 32, 38),
    "orange": (245, 130, 20),
    "yellow": (246, 220, 40),
    "lime": (150, 225, 50),
    "green": (20, 120, 50),
    "cyan": (40, 200, 225),
    "blue": (30, 70, 205),
    "purple": (120, 35, 160),
    "pink": (250, 120, 185),
    "brown": (115, 65, 30),
    "black": (18, 18, 18),
    "white": (250, 250, 250),
}
SHAPES: tuple[str, ...] = (
    "circle",
    "square",
    "triangle",
    "star",
    "heart",
    "cross",
    "crown",
    "diamond",
    "moon",
    "arrow",
    "hourglass",
    "flower",
    "house",
)
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "grey": (150, 150, 150),
    "beige": (222, 203, 168),
    "lavender": (196, 184, 226),
    "slate": (84, 98, 112),
}
PATTERNS: tuple[str, ...] = ("plain", "striped", "dotted", "checked")

RELATIONS: dict[str, tuple[int, int]] = {
    "to the left of": (-1, 0),
    "to the right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}
"""Relation of the first thing to the second, and the direction from the second to the first."""

SINGLE_TEMPLATES: tuple[str, ...] = (
    "{thing}",
    "a photo of {thing}",
    "a picture of {thing}",
    "{thing} on {background}",
    "a photo of {thing} on {background}",
    "{background} with {thing}",
)
PAIR_TEMPLATES: tuple[str, ...] = (
    "{first} {relation} {second}",
    "a photo of {first} {relation} {second}",
    "{first} is {relation} {second}",
    "{first} {relation} {second} on {background}",
    "on {background}, {first} {relation} {second}",
)

_RADII: dict[tuple[str, str], tuple[float, float]] = {
    ("small", "single"): (0.24, 0.28),
    ("large", "single"): (0.36, 0.42),
    ("small", "pair"): (0.13, 0.15),
    ("large", "pair"): (0.18, 0.20),
}
_SHARE_SINGLE = 0.75
_SHARE_SIZE_TOLD = 0.3
_SHARE_PATTERN_TOLD = 0.5
_MAX_ANGLE = 8
_MAX_OFF_CENTRE = 0.03
"""Shapes are hard to learn in a minute on a CPU, and harder still the more they turn and move."""


@dataclass(frozen=True)
class Thing:
    """One coloured shape. ``radius`` is that of the circle around it; ``angle`` is in degrees."""

    colour: str
    shape: str
    size: str
    x: float
    y: float
    radius: float
    angle: float

    @property
    def combination(self) -> tuple[str, str]:
        """(colour, shape); some are held out of training."""
        return self.colour, self.shape


@dataclass(frozen=True)
class Scene:
    """One thing, or two and the relation of the first to the second, on a patterned background.

    ``grain`` seeds what no caption tells: shades of the colours and where the pattern starts.
    """

    things: tuple[Thing, ...]
    relation: str | None
    background: str
    pattern: str
    grain: int


def combinations(*, held_out: bool) -> list[tuple[str, str]]:
    """All (colour, shape) that are kept out of training, or all that are in it, colour by colour.

    Four of the thirteen diagonals of the colour-by-shape table are held out: every colour misses four
    shapes and is seen with nine. The four are a difference set, so any two colours miss exactly one shape
    together.
    """
    return [
        (colour, shape)
        for row, colour in enumerate(COLOURS)
        for column, shape in enumerate(SHAPES)
        if ((column - row) % len(SHAPES) in (0, 1, 3, 9)) == held_out
    ]


TRAINED = combinations(held_out=False)
HELD_OUT = combinations(held_out=True)


def sample_scene(rng: random.Random) -> Scene:
    """A scene of the training distribution: one or two things, never of a held-out combination."""
    if rng.random() < _SHARE_SINGLE:
        return sample_single(rng, rng.choice(TRAINED))
    return _sample_pair(rng)


def sample_single(rng: random.Random, combination: tuple[str, str]) -> Scene:
    """A scene with one thing of the given (colour, shape); all else is drawn as in training."""
    size = rng.choice(("small", "large"))
    radius = rng.uniform(*_RADII[size, "single"])
    centre = 0.5 + _shift(rng), 0.5 + _shift(rng)
    return _scene(rng, (_thing(rng, combination, size, centre, radius),), relation=None)


def _sample_pair(rng: random.Random) -> Scene:
    relation = rng.choice(list(RELATIONS))
    dx, dy = RELATIONS[relation]
    things = []
    for combination, side in zip(rng.sample(TRAINED, 2), (1, -1), strict=True):
        size = rng.choice(("small", "large"))
        radius = rng.uniform(*_RADII[size, "pair"])
        centre = 0.5 + side * dx * 0.25 + _shift(rng), 0.5 + side * dy * 0.25 + _shift(rng)
        things.append(_thing(rng, combination, size, centre, radius))
    return _scene(rng, tuple(things), relation)


def _shift(rng: random.Random) -> float:
    return rng.uniform(-_MAX_OFF_CENTRE, _MAX_OFF_CENTRE)


def _thing(
    rng: random.Random, combination: tuple[str, str], size: str, centre: tuple[float, float], radius: float
) -> Thing:
    colour, shape = combination
    x, y = centre
    angle = round(rng.uniform(-_MAX_ANGLE, _MAX_ANGLE), 1)
    return Thing(colour, shape, size, round(x, 4), round(y, 4), round(radius, 4), angle)


def _scene(rng: random.Random, things: tuple[Thing, ...], relation: str | None) -> Scene:
    return Scene(things, relation, rng.choice(list(BACKGROUNDS)), rng.choice(PATTERNS), rng.getrandbits(32))


def write_caption(scene: Scene, rng: random.Random) -> str:
    """The scene in words, by a template drawn at random. Sizes and the pattern are told or left out."""
    background = _with_article(
        scene.background, scene.pattern if rng.random() < _SHARE_PATTERN_TOLD else None, "background"
    )
    names = [
        _with_article(thing.size if rng.random() < _SHARE_SIZE_TOLD else None, thing.colour, thing.shape)
        for thing in scene.things
    ]
    if scene.relation is None:
        return rng.choice(SINGLE_TEMPLATES).format(thing=names[0], background=background)
    return rng.choice(PAIR_TEMPLATES).format(
        first=names[0], relation=scene.relation, second=names[1], background=background
    )


def _with_article(*words: str | None) -> str:
    phrase = " ".join(word for word in words if word)
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"
