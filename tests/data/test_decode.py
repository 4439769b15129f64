from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from shard_builders import encode_image

from clip_la.data.decode import Unusable, decode_image
from clip_la.data.losses import Cause
from clip_la.data.spec import Limits

GREEN = (0, 200, 0)
LIMITS = Limits()


def pixels(data: bytes, **options: object) -> np.ndarray:
    image = decode_image(data, LIMITS, **options)
    assert image.mode == "RGB"
    return np.asarray(image)


def noisy_jpeg() -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    return encode_image(Image.fromarray(noise), "JPEG")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to nothing."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"0"))
        + chunk(b"IEND", b"")
    )


def with_parts(kind: str, count: int) -> bytes:
    """A good picture with `count` more parts of a kind."""
    if kind == "chunks":
        data = encode_image(Image.new("RGB", (8, 8), GREEN))
        return data[:33] + chunk(b"prVt", b"") * count + data[33:]
    data = encode_image(Image.new("RGB", (8, 8), GREEN), "JPEG", progressive=True)
    if kind == "scans":
        last_scan = data[data.rindex(b"\xff\xda") : -2]
        return data[:-2] + last_scan * count + data[-2:]
    return data[:2] + {"segments": b"\xff\xef\x00\x02", "fill": b"\xff"}[kind] * count + data[2:]


@pytest.mark.parametrize(
    ("kind", "allowed", "excess"),
    [("chunks", 9000, 10_000), ("segments", 9000, 10_000), ("fill", 9000, 10_000), ("scans", 80, 101)],
)
def test_pictures_of_too_many_parts_are_refused_before_a_decoder_sees_them(
    kind: str, allowed: int, excess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert np.abs(pixels(with_parts(kind, allowed)).astype(int) - GREEN).max() < 8
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises(Unusable, match="more than") as caught:
        decode_image(with_parts(kind, excess), LIMITS)
    assert caught.value.cause == Cause.IMAGE_TOO_MANY_PARTS


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_formats(image_format: str) -> None:
    found = pixels(encode_image(Image.new("RGB", (16, 8), GREEN), image_format))
    assert found.shape == (8, 16, 3)
    assert np.abs(found.astype(int) - GREEN).max() < 8


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_laid_on_the_background(mode: str) -> None:
    image = Image.new("RGBA", (4, 2), (0, 0, 0, 0))
    image.paste((200, 200, 200, 255), (0, 0, 2, 2))
    if mode == "P":
        palette = Image.new("P", (4, 2), 1)
        palette.putpalette([0, 0, 0, 200, 200, 200])
        palette.paste(0, (2, 0, 4, 2))
        data = encode_image(palette, transparency=0)
    else:
        data = encode_image(image.convert(mode))
    assert pixels(data)[0].tolist() == [[200] * 3] * 2 + [[255] * 3] * 2
    assert pixels(data, background=(1, 2, 3))[0, 3].tolist() == [1, 2, 3]


def test_transparent_colour_of_an_rgb_png() -> None:
    image = Image.new("RGB", (2, 1), GREEN)
    image.putpixel((1, 0), (9, 9, 9))
    assert pixels(encode_image(image, transparency=(9, 9, 9)))[0].tolist() == [list(GREEN), [255] * 3]


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (1000, 3), (32768, 128), (65535, 255)])
def test_16_bit_grey_is_scaled(value: int, expected: int) -> None:
    image = Image.fromarray(np.full((4, 4), value, dtype=np.uint16))
    assert pixels(encode_image(image))[0, 0].tolist() == [expected] * 3


def test_16_bit_grey_can_be_transparent() -> None:
    image = Image.fromarray(np.array([[0x8000, 0x4000]], dtype=np.uint16))
    data = encode_image(image)
    data = data[:33] + chunk(b"tRNS", b"\x80\x00") + data[33:]
    assert pixels(data)[0].tolist() == [[255] * 3, [0x40] * 3]


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_that_claims_more_pixels_than_it_holds_is_corrupt(progressive: bool) -> None:
    data = encode_image(Image.new("RGB", (800, 800), GREEN), "JPEG", progressive=progressive)
    assert np.abs(pixels(data)[0, 0].astype(int) - GREEN).max() < 8
    frame = data.index(b"\xff\xc2" if progressive else b"\xff\xc0")
    for height, width in ((8000, 8000), (8000, 7999)):
        claimed = data[: frame + 5] + struct.pack(">HH", height, width) + data[frame + 9 :]
        with pytest.raises(Unusable, match=f"can't hold {width} x {height} pixels") as caught:
            decode_image(claimed, LIMITS)
        assert caught.value.cause == Cause.IMAGE_CORRUPT


def test_odd_exif_data_leaves_no_warning_behind(recwarn: pytest.WarningsRecorder) -> None:
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x09\0\0\0\xff\xff\xff\xff\0\0\0\0"
    assert pixels(encode_image(Image.new("RGB", (8, 8)), "JPEG", exif=exif)).shape == (8, 8, 3)
    assert not recwarn.list


def test_cmyk_and_grey() -> None:
    assert pixels(encode_image(Image.new("CMYK", (8, 8), (255, 0, 255, 0)), "JPEG"))[0, 0, 1] > 200
    assert pixels(encode_image(Image.new("L", (8, 8), 77)))[0, 0].tolist() == [77] * 3
    assert pixels(encode_image(Image.new("1", (8, 8), 1)))[0, 0].tolist() == [255] * 3


def test_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (GREEN, (200, 0, 0))]
    data = encode_image(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert pixels(data)[0, 0].tolist() == list(GREEN)


def test_exif_orientation_only_by_flag() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode_image(Image.new("RGB", (16, 8)), "JPEG", exif=exif)
    assert pixels(data).shape == (8, 16, 3)
    assert pixels(data, exif_orientation=True).shape == (16, 8, 3)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", Cause.IMAGE_EMPTY),
        (b"<!DOCTYPE html><html></html>", Cause.IMAGE_FORMAT),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", Cause.IMAGE_FORMAT),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", Cause.IMAGE_FORMAT),
        (encode_image(Image.new("RGB", (8, 8)), "TIFF"), Cause.IMAGE_FORMAT),
        (noisy_jpeg()[:2000], Cause.IMAGE_CORRUPT),
        (encode_image(Image.new("RGB", (64, 64), GREEN))[:60], Cause.IMAGE_CORRUPT),
        (png_header(50_000, 50_000), Cause.IMAGE_TOO_MANY_PIXELS),
        (png_header(9400, 9400), Cause.IMAGE_TOO_MANY_PIXELS),
        (png_header(1, 20_000), Cause.IMAGE_ASPECT_RATIO),
        (png_header(20_000, 1), Cause.IMAGE_ASPECT_RATIO),
    ],
)
def test_unusable_images(data: bytes, cause: Cause) -> None:
    with pytest.raises(Unusable) as caught:
        decode_image(data, LIMITS)
    assert caught.value.cause == cause


def test_overwritten_scan_is_found() -> None:
    data = bytearray(noisy_jpeg())
    data[2000:2150] = b"\xff\x01" * 75
    with pytest.raises(Unusable) as caught:
        decode_image(bytes(data), LIMITS)
    assert caught.value.cause == Cause.IMAGE_CORRUPT
