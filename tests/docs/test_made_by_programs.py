"""What pages show of programs is what the programs make: the template of the model card, the figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from docs_blocks import REPO_ROOT

from clip_la.export.card import publisher_template

DOCS = REPO_ROOT / "docs"


def test_the_template_is_the_product_s() -> None:
    assert publisher_template() in (DOCS / "model_card.md").read_text(encoding="utf-8")


def test_figures_are_drawn_by_their_script(tmp_path: Path) -> None:
    subprocess.run([sys.executable, DOCS / "images" / "draw.py", tmp_path], check=True)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert set(drawn) == {"order.svg", "share.svg"}
    assert drawn == {name: (DOCS / "images" / name).read_text(encoding="utf-8") for name in drawn}
