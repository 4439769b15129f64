"""A second set of real pictures with real names: icons, drawn from the fonts of the package `qtawesome`.

    pip install qtawesome
    python benchmarks/icon_data.py icons

    icons/train/00000.tar ...  Material Design, Phosphor and Remix icons with captions made of their names
    icons/val/00000.tar        icons of the same families whose names training never shows
    icons/zeroshot/bell/       the same things as other families draw them (Font Awesome, Codicons, Elusive)

Names are made of words (`bell plus outline`), so a held-out name is a new combination of mostly known words.
The icons aren't part of this project: their licences are MIT, Apache 2.0, CC BY 4.0 and SIL OFL 1.1.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import webdataset
from PIL import Image, ImageDraw, ImageFont

SHARDS = 8
NUM_VAL_PAIRS = 1024
TRAIN_FAMILIES = ("materialdesignicons6", "phosphor", "remixicon")
OTHER_FAMILIES = ("fontawesome6-solid", "fontawesome6-regular", "codicon", "elusiveicons")
STYLES = {"bold", "duotone", "fill", "light", "line", "outline", "thin"}
CAPTIONS = ("{}", "{} icon", "an icon of {}", "a pictogram: {}", "{} symbol")
HELD_OUT_SHARE = 12  # one in so many names


class Icon(NamedTuple):
    """A named glyph of a font file."""

    font: Path
    name: str
    code: int

    @property
    def words(self) -> str:
        """The name as it is spoken."""
        return self.name.replace("-", " ")

    @property
    def thing(self) -> str:
        """The name without what only says how the thing is drawn."""
        return " ".join(word for word in self.name.split("-") if word not in STYLES)

    @property
    def held_out(self) -> bool:
        """Whether training leaves the thing out."""
        return zlib.crc32(self.thing.encode()) % HELD_OUT_SHARE == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--image-size", type=int, default=64, help="pixels a side (default: %(default)s)")
    arguments = parser.parse_args()
    counts = write_set(arguments.out, arguments.image_size)
    print(", ".join(f"{count:,} {what}" for what, count in counts.items()))


def write_set(out: Path, image_size: int) -> dict[str, int]:
    """Write the set; how many training pairs, validation pairs, classes and pictures of them it has."""
    icons = _unique(icon for family in TRAIN_FAMILIES for icon in read_family(family))
    random.Random(0).shuffle(icons)
    train = [icon for icon in icons if not icon.held_out]
    val = [icon for icon in icons if icon.held_out][:NUM_VAL_PAIRS]
    for shard in range(SHARDS):
        _write_shard(out / "train" / f"{shard:05d}.tar", train[shard::SHARDS], image_size)
    _write_shard(out / "val" / "00000.tar", val, image_size)
    known = {icon.thing for icon in train}
    others = [icon for family in OTHER_FAMILIES for icon in read_family(family) if icon.thing in known]
    for icon in others:
        folder = out / "zeroshot" / icon.thing.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        draw(icon, image_size).save(folder / f"{icon.font.stem}-{icon.name}.png")
    classes = sorted({icon.thing for icon in others})
    (out / "zeroshot" / "classnames.txt").write_text("\n".join(classes) + "\n", encoding="utf-8")
    return {"training pairs": len(train), "validation pairs": len(val), "classes": len(classes),
            "pictures of them": len(others)}  # fmt: skip


def read_family(name: str) -> Iterator[Icon]:
    """The icons of a font in the package, by name."""
    spec = importlib.util.find_spec("qtawesome")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the icons are in the package qtawesome: pip install qtawesome")
    folder = Path(spec.submodule_search_locations[0]) / "fonts"
    (font,) = folder.glob(f"{name}*.ttf")
    (names,) = folder.glob(f"{name}*charmap*.json")
    for icon, code in sorted(json.loads(names.read_text(encoding="utf-8")).items()):
        yield Icon(font, icon, int(code, 16))


def _unique(icons: Iterable[Icon]) -> list[Icon]:
    """One icon a glyph: fonts keep old names beside new ones."""
    return list({(icon.font, icon.code): icon for icon in icons}.values())


def draw(icon: Icon, image_size: int) -> Image.Image:
    """The icon in black on white, in the middle, with a margin."""
    picture = Image.new("RGB", (image_size, image_size), "white")
    font = ImageFont.truetype(str(icon.font), round(0.8 * image_size))
    middle = (image_size / 2, image_size / 2)
    left, top, right, bottom = font.getbbox(chr(icon.code))
    corner = (middle[0] - (left + right) / 2, middle[1] - (top + bottom) / 2)
    ImageDraw.Draw(picture).text(corner, chr(icon.code), font=font, fill="black")
    return picture


def _write_shard(path: Path, icons: Sequence[Icon], image_size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path), encoder=False, mtime=0) as tar:
        for index, icon in enumerate(icons):
            picture = io.BytesIO()
            draw(icon, image_size).save(picture, "PNG")
            caption = random.Random(f"{icon.font.stem}/{icon.name}").choice(CAPTIONS).format(icon.words)
            tar.write(
                {
                    "__key__": f"{path.stem}{index:04d}",
                    "png": picture.getvalue(),
                    "txt": caption.encode(),
                    "json": json.dumps({"caption": caption, "family": icon.font.stem}).encode(),
                }
            )


if __name__ == "__main__":
    main()
