"""Put what `clip-la reproduce` made into the documentation: docs/reproduction.md and its figures.

    python benchmarks/reproduction_page.py OUT

Only the part of the page between its two marks is replaced.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
START, END = "<!-- made by benchmarks/reproduction_page.py -->", "<!-- end of what it made -->"
_FIGURE = re.compile(r"(?<=\]\()([\w/-]+\.png)(?=\))")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the folder of clip-la reproduce")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page (default: %(default)s)")
    arguments = parser.parse_args()
    for path in write_page(arguments.out, arguments.docs):
        print(path)


def write_page(out: Path, docs: Path) -> list[Path]:
    """Replace the made part of docs/reproduction.md, and the figures that it shows; the files written."""
    page = docs / "reproduction.md"
    made = (out / "reproduction.md").read_text(encoding="utf-8")
    written = [page]
    for figure in _FIGURE.findall(made):
        target = docs / "images" / f"reproduction-{Path(figure).parent.name}.png"
        shutil.copyfile(out / figure, target)
        made = made.replace(f"({figure})", f"(images/{target.name})")
        written.append(target)
    before, rest = page.read_text(encoding="utf-8").split(START)
    _, after = rest.split(END)
    page.write_text(f"{before}{START}\n\n{made}\n{END}{after}", encoding="utf-8")
    return written


if __name__ == "__main__":
    main()
