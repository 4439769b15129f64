from __future__ import annotations

import os
from pathlib import Path

import pytest
from shard_builders import picture

from clip_la.data.losses import Loss
from clip_la.data.samples import RawSample
from clip_la.data.spec import Limits
from clip_la.data.tables import Table, TableError


def write_table(folder: Path, rows: str, header: str = "filepath\ttitle\n") -> str:
    path = folder / "table.tsv"
    path.write_text(header + rows)
    return str(path)


def test_rows(tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(picture(1))
    table = Table(write_table(tmp_path, f'{image}\t"two\nlines"\n{image}\tcafé\n'))
    assert len(table) == table.count_samples() == 2
    samples = [item for row in range(2) for item in table.read(row)]
    assert [sample.text.decode() for sample in samples if isinstance(sample, RawSample)] == [
        "two\nlines",
        "café",
    ]
    assert all(isinstance(sample, RawSample) and sample.image == picture(1) for sample in samples)


def test_losses_are_named(tmp_path: Path) -> None:
    big = tmp_path / "big.png"
    big.write_bytes(bytes(100))
    os.mkfifo(tmp_path / "fifo.png")
    paths = ("/no/such.png", "", big, tmp_path, tmp_path / "fifo.png", "pipe:touch x")
    rows = "".join(f"{path}\tcaption\n" if path else "only-one-column\n" for path in paths)
    table = Table(write_table(tmp_path, rows), limits=Limits(member_bytes=99))
    losses = [item for row in range(len(table)) for item in table.read(row)]
    assert [loss.cause.value for loss in losses if isinstance(loss, Loss)] == [
        "no_image",
        "bad_row",
        "member_too_large",
        "no_image",
        "no_image",
        "image_unreadable",
    ]


def test_a_huge_caption_is_one_bad_row(tmp_path: Path) -> None:
    table = Table(
        write_table(tmp_path, "a.png\t" + "x" * 5000 + "\nb.png\tb\n"), limits=Limits(caption_bytes=1000)
    )
    assert len(table) == 2
    (loss,) = table.read(0)
    assert isinstance(loss, Loss)
    assert loss.cause.value == "bad_row"


def test_an_open_quote_swallows_no_rows_unnoticed(tmp_path: Path) -> None:
    path = write_table(tmp_path, 'a.png\t"two\nlines"\nb.png\t"open\n' + "c.png\tlost\n" * 2000)
    with pytest.raises(TableError, match=r"the row at line 4 runs on for 2,001 lines: a quote"):
        Table(path)


@pytest.mark.parametrize(("header", "message"), [("a\tb\n", "no column filepath, title"), ("", "no column")])
def test_missing_columns(tmp_path: Path, header: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        Table(write_table(tmp_path, "", header))


def test_no_rows(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="no rows"):
        Table(write_table(tmp_path, ""))
