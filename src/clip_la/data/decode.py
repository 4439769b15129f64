"""From bytes to a picture: bounded before decoding, whole or not at all, RGB on a plain ground."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from clip_la.data.image_parts import find_excess_parts
from clip_la.data.jpeg import find_jpeg_damage
from clip_la.data.losses import Cause
from clip_la.data.spec import Limits

# Formats of the web whose decoders run no other program and read no other file.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


class Unusable(Exception):  # noqa: N818 - an outcome, not an error
    """A sample that can't be used; says the cause and what was found."""

    def __init__(self, cause: Cause, detail: str = "") -> None:
        super().__init__(cause, detail)
        self.cause = cause
        self.detail = detail


def decode_image(
    data: bytes,
    limits: Limits,
    *,
    background: tuple[int, int, int] = (255, 255, 255),
    exif_orientation: bool = False,
) -> Image.Image:
    """The first frame as an RGB picture, transparent parts on `background`, 16-bit grey scaled to 8.

    Raises:
        Unusable: empty, of an unknown format, over a limit, corrupt or cut short.
    """
    with warnings.catch_warnings():
        # Python remembers each warning for good, and those of odd EXIF data differ from picture to picture.
        warnings.simplefilter("ignore")
        image = _open(data, limits)
        try:
            image.load()
            if exif_orientation:
                image = ImageOps.exif_transpose(image)
            return to_rgb(image, background)
        except Exception as error:  # Pillow's decoders raise whatever their input provokes
            raise Unusable(Cause.IMAGE_CORRUPT, str(error)) from error


def _open(data: bytes, limits: Limits) -> Image.Image:
    if not data:
        raise Unusable(Cause.IMAGE_EMPTY, "zero bytes")
    if (excess := find_excess_parts(data)) is not None:
        raise Unusable(Cause.IMAGE_TOO_MANY_PARTS, excess)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise Unusable(Cause.IMAGE_TOO_MANY_PIXELS, str(error)) from error
    except UnidentifiedImageError as error:
        raise Unusable(Cause.IMAGE_FORMAT, f"begins {data[:16]!r}") from error
    except Exception as error:
        raise Unusable(Cause.IMAGE_CORRUPT, str(error)) from error
    check_size(image.size, limits)
    if (damage := find_jpeg_damage(data)) is not None:
        raise Unusable(Cause.IMAGE_CORRUPT, damage)
    return image


def check_size(size: Sequence[int], limits: Limits) -> None:
    """Refuse a (width, height) over the limits.

    Raises:
        Unusable: too many pixels, or too long a strip.
    """
    width, height = size
    if width * height > limits.pixels:
        raise Unusable(Cause.IMAGE_TOO_MANY_PIXELS, f"{width} x {height}, limit {limits.pixels:,} pixels")
    if max(width, height) > limits.aspect_ratio * min(width, height):
        raise Unusable(Cause.IMAGE_ASPECT_RATIO, f"{width} x {height}, limit {limits.aspect_ratio:g}:1")


def to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """`image` in mode RGB: transparency laid on `background`, more than 8 bits scaled, not clipped."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):
        image = _scale_16_bits(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(ground, image)
    return image.convert("RGB")


def _scale_16_bits(image: Image.Image) -> Image.Image:
    """16-bit grey in mode L, or LA where a PNG names one grey as transparent."""
    grey = np.asarray(image).clip(0, 65535)
    scaled = Image.fromarray((grey >> 8).astype(np.uint8))
    if "transparency" in image.info:
        opaque = np.where(grey == image.info["transparency"], 0, 255).astype(np.uint8)
        scaled.putalpha(Image.fromarray(opaque))
    return scaled
