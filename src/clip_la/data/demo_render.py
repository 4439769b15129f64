"""Draws the demo set's scenes with Pillow: polygons only, no fonts, no files."""

from __future__ import annotations

import random
from math import cos, pi, radians, sin
from typing import TypeAlias

from PIL import Image, ImageDraw

from clip_la.data.demo_scene import BACKGROUNDS, COLOURS, Scene, Thing

Polygon: TypeAlias = "list[tuple[float, float]]"
Colour: TypeAlias = "tuple[int, int, int]"

DARK, LIGHT = (20, 20, 20), (235, 235, 235)
_SUPERSAMPLE = 4
_OUTLINE = 1 / 16
"""Width of the line around a shape, of the picture's side; it helps a nano model to tell shapes."""

_SHADE = 14
"""Colours vary by so much either way, a channel, of 255."""


def _ellipse(radius: float = 1.0, *, x: float = 0.0, start: float = 0.0, end: float = 360.0) -> Polygon:
    """An arc around (x, 0) from angle start to end, degrees."""
    angles = [radians(start + (end - start) * step / 40) for step in range(41)]
    return [(x + radius * cos(a), radius * sin(a)) for a in angles]


def _regular(corners: int, inner: float = 1.0) -> Polygon:
    """A polygon with a corner at the top; every second corner at radius ``inner``."""
    angles = [pi * (2 * corner / corners - 0.5) for corner in range(corners)]
    return [
        ((1.0, inner)[corner % 2] * cos(a), (1.0, inner)[corner % 2] * sin(a))
        for corner, a in enumerate(angles)
    ]


def _flower() -> Polygon:
    angles = [2 * pi * step / 90 for step in range(90)]
    return [((0.68 + 0.32 * cos(5 * a)) * sin(a), -(0.68 + 0.32 * cos(5 * a)) * cos(a)) for a in angles]


def _heart() -> Polygon:
    angles = [2 * pi * step / 60 for step in range(60)]
    return [
        (
            sin(a) ** 3,
            -(13 * cos(a) - 5 * cos(2 * a) - 2 * cos(3 * a) - cos(4 * a)) / 16,
        )
        for a in angles
    ]


OUTLINES: dict[str, Polygon] = {
    "circle": _ellipse(0.9),
    "square": [(-0.75, -0.75), (0.75, -0.75), (0.75, 0.75), (-0.75, 0.75)],
    "triangle": _regular(3),
    "star": _regular(10, inner=0.42),
    "heart": _heart(),
    "cross": [
        *[(-0.28, -0.95), (0.28, -0.95), (0.28, -0.28), (0.95, -0.28), (0.95, 0.28), (0.28, 0.28)],
        *[(0.28, 0.95), (-0.28, 0.95), (-0.28, 0.28), (-0.95, 0.28), (-0.95, -0.28), (-0.28, -0.28)],
    ],
    "crown": [
        *[(-0.9, 0.7), (-0.95, -0.55), (-0.45, 0.0), (0.0, -0.8)],
        *[(0.45, 0.0), (0.95, -0.55), (0.9, 0.7)],
    ],
    "diamond": [(0.0, -1.0), (0.62, 0.0), (0.0, 1.0), (-0.62, 0.0)],
    "moon": _ellipse(0.95, start=50, end=310) + _ellipse(0.80, x=0.42, start=294, end=66),
    "arrow": [
        *[(-0.95, -0.25), (0.15, -0.25), (0.15, -0.75), (0.95, 0.0)],
        *[(0.15, 0.75), (0.15, 0.25), (-0.95, 0.25)],
    ],
    "hourglass": [(-0.7, -0.9), (0.7, -0.9), (-0.7, 0.9), (0.7, 0.9)],
    "flower": _flower(),
    "house": [
        (-0.7, 0.85),
        (-0.7, -0.1),
        (-0.95, -0.1),
        (0.0, -0.95),
        (0.95, -0.1),
        (0.7, -0.1),
        (0.7, 0.85),
    ],
}
"""Each shape within a circle of radius 1.2 or so, y downwards."""


def render(scene: Scene, image_size: int) -> Image.Image:
    """The scene as an RGB picture of (image_size, image_size) pixels, anti-aliased."""
    rng = random.Random(scene.grain)
    side = image_size * _SUPERSAMPLE
    image = Image.new("RGB", (side, side), _shade(rng, BACKGROUNDS[scene.background]))
    draw = ImageDraw.Draw(image)
    _draw_pattern(draw, scene, side, rng)
    for thing in scene.things:
        corners = _place(thing, side)
        draw.polygon(corners, fill=_shade(rng, COLOURS[thing.colour]))
        line = LIGHT if thing.colour == "black" else DARK
        draw.line(corners + corners[:2], fill=line, width=round(side * _OUTLINE), joint="curve")
    return image.resize((image_size, image_size), Image.Resampling.BOX)


def _shade(rng: random.Random, colour: Colour) -> Colour:
    red, green, blue = (min(255, max(0, channel + rng.randint(-_SHADE, _SHADE))) for channel in colour)
    return red, green, blue


def _place(thing: Thing, side: int) -> list[tuple[int, int]]:
    turn_x, turn_y = cos(radians(thing.angle)), sin(radians(thing.angle))
    return [
        (
            round(side * (thing.x + thing.radius * (x * turn_x - y * turn_y))),
            round(side * (thing.y + thing.radius * (x * turn_y + y * turn_x))),
        )
        for x, y in OUTLINES[thing.shape]
    ]


def _draw_pattern(draw: ImageDraw.ImageDraw, scene: Scene, side: int, rng: random.Random) -> None:
    """Lays the pattern, a little darker than the background, from a random start."""
    red, green, blue = BACKGROUNDS[scene.background]
    ink = _shade(rng, (red - 20, green - 20, blue - 20))
    step = side // 8
    start_x, start_y = -rng.randrange(2 * step), -rng.randrange(2 * step)
    cells = [(start_x + step * i, start_y + step * j, i, j) for i in range(11) for j in range(11)]
    if scene.pattern == "striped":
        for left, _, i, _ in cells:
            if i % 2:
                draw.rectangle((left, 0, left + step - 1, side), fill=ink)
    elif scene.pattern == "dotted":
        for left, top, _, _ in cells:
            draw.ellipse((left, top, left + step // 2, top + step // 2), fill=ink)
    elif scene.pattern == "checked":
        for left, top, i, j in cells:
            if (i + j) % 2:
                draw.rectangle((left, top, left + step - 1, top + step - 1), fill=ink)
