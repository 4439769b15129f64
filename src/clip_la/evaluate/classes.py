"""The classes of a zero-shot evaluation: what a prompt calls them, and their folders or WordNet ids.

A class-name file is one of

    .txt, .tsv   one class a line: `name`, `folder<TAB>name`, `n01440764 name` or a bare WordNet id
    .json        {folder: name}, {index: [WordNet id, name]}, or a list of names or of [folder, name]
    .csv         `name` or `folder,name`; with a header, the columns so called (or wnid, label, ...)

or, by WordNet id, one of `wordnet.RELEASES`, "imagenet-v2" (ImageNet-1k's classes in folders 0 to 999), or
"wordnet" (the ids that the data itself states, as its folders or labels).

Numbers. A class list may be told to be `by_index`: its classes are then called 0, 1, ... in the list's order.
Otherwise a number is a name like any other, and never a position.

Rules for duplicates. A folder (or WordNet id) given twice is an error. A name given twice without folders is
one class: nothing could tell the two apart. A name given to two different folders stays two classes with
the same prompts, as in OpenCLIP; the tie between them always goes to the first, and the number of classes
concerned is reported with the result.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from clip_la.evaluate import wordnet

WORDNET_OF_DATA = "wordnet"
IMAGENET_V2 = "imagenet-v2"
CLASS_LISTS = (*wordnet.RELEASES, IMAGENET_V2, WORDNET_OF_DATA)
"""The class lists that need no file."""

_LINE_WITH_WORDNET_ID = re.compile(r"(n\d{8})\s+(\S.*)")
_CSV_COLUMNS = {
    "folder": ("folder", "directory", "wnid", "synset", "id"),
    "name": ("name", "class_name", "classname", "class", "label"),
}


@dataclass(frozen=True)
class ClassSet:
    """The classes among which a model chooses; a class's index is its place in these tuples.

    Attributes:
        names: as put into the prompts.
        folders: the folder name or WordNet id stated for the class, None where only its name is known.
        source: where the classes come from, for messages.
        num_merged: entries of the source that repeated a name without a folder, and so made no class.
        is_by_index: `folders` are the places in the source's list: "0", "1", ...
    """

    names: tuple[str, ...]
    folders: tuple[str | None, ...]
    source: str
    num_merged: int = 0
    is_by_index: bool = False

    def __len__(self) -> int:
        return len(self.names)

    @property
    def hash(self) -> str:
        """Twelve hex digits of the SHA-256 of the sorted names: equal for the same problem in any order."""
        return hashlib.sha256("\n".join(sorted(self.names)).encode()).hexdigest()[:12]

    @property
    def num_duplicate_names(self) -> int:
        """How many classes share their name with another, plus the entries that were merged."""
        return sum(count for count in Counter(self.names).values() if count > 1) + self.num_merged


class _Entry(NamedTuple):
    """One class as read; `place` says where, for messages."""

    place: str
    folder: str | None
    name: str


def load_classes(
    source: str | Path, *, by_index: bool = False, labels: Sequence[str] | None = None
) -> ClassSet:
    """Read a class-name file, or take one of `CLASS_LISTS`, such as "imagenet-1k".

    Args:
        by_index: the data calls the classes by their place in the list, from 0, unless a file states other
            numbers as its folders. Every entry is then a class.
        labels: the data's own folders or labels, for "wordnet".

    Raises:
        ValueError: nothing there, a file that can't be understood, or one that contradicts itself; the
            message names the line.
    """
    if str(source) == WORDNET_OF_DATA:
        return _classes_of_wordnet_ids(labels or ())
    if str(source) == IMAGENET_V2:
        return _by_index(list(wordnet.imagenet_1k().values()), IMAGENET_V2)
    if str(source) in wordnet.RELEASES:
        names = wordnet.names_of_release(str(source))
        if by_index:
            return _by_index(list(names.values()), str(source))
        return ClassSet(tuple(names.values()), tuple(names), str(source))
    path = Path(source)
    entries = _read_entries(path, by_index)
    states_numbers = any(entry.folder is not None and entry.folder.isdecimal() for entry in entries)
    if by_index and not states_numbers:
        return _by_index([entry.name for entry in entries], str(path))
    return _class_set(entries, path)


def _classes_of_wordnet_ids(labels: Sequence[str]) -> ClassSet:
    """The WordNet ids among the labels, by id, with their names."""
    names = {label: wordnet.names_of(label) for label in sorted(labels) if wordnet.is_wordnet_id(label)}
    known = {label: found[0] for label, found in names.items() if found}
    if not known:
        raise ValueError(
            f"class names: {WORDNET_OF_DATA!r} takes them from the data's own WordNet ids, and none of its "
            f"{len(labels)} folders or labels is one; give a class-name file"
        )
    return ClassSet(tuple(known.values()), tuple(known), f"the data's own {len(known)} WordNet ids")


def _by_index(names: Sequence[str], source: str) -> ClassSet:
    return ClassSet(tuple(names), tuple(map(str, range(len(names)))), source, is_by_index=True)


def _read_entries(path: Path, by_index: bool) -> list[_Entry]:
    if not path.is_file():
        found = "a folder" if path.is_dir() else "nothing"
        raise ValueError(
            f"class names: expected a .txt, .tsv, .json or .csv file, or {' or '.join(CLASS_LISTS)}; "
            f"found {found} at {path}"
        )
    readers = {".json": _read_json, ".csv": _read_csv}
    reader = readers.get(path.suffix.lower(), _read_lines)
    text = read_text(path)
    try:
        entries = [_complete(entry) for entry in reader(text)]
        if not entries:
            raise ValueError("no class in it")
        _refuse_repeated_folders(entries)
        if by_index and reader is _read_lines:
            _refuse_empty_lines(text)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"class names of {path}: {error}") from error
    return entries


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark.

    Raises:
        ValueError: another encoding.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error


def _read_lines(text: str) -> Iterator[_Entry]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"line {number}"
        if "\t" in line:
            yield _entry_of_cells(place, line.split("\t"))
        elif match := _LINE_WITH_WORDNET_ID.fullmatch(line.strip()):
            yield _Entry(place, match[1], match[2])
        else:
            yield _Entry(place, None, line.strip())


def _refuse_empty_lines(text: str) -> None:
    lines = text.rstrip().splitlines()
    empty = [number for number, line in enumerate(lines, start=1) if not line.strip()]
    if empty:
        raise ValueError(f"line {empty[0]} is empty, so that the numbers of the classes after it are unclear")


def _entry_of_cells(place: str, cells: Sequence[Any]) -> _Entry:
    texts = [cell.strip() for cell in cells if isinstance(cell, str)]
    if len(texts) != len(cells) or not 1 <= len(cells) <= 2:
        raise ValueError(f"{place}: expected a name, or a folder and a name; found {list(cells)!r}")
    return _Entry(place, texts[0] if len(texts) == 2 else None, texts[-1])


def _read_json(text: str) -> Iterator[_Entry]:
    try:
        content = json.loads(text, object_pairs_hook=_refuse_repeated_keys)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if isinstance(content, dict):
        for key, value in _in_order_of_numbers(content):
            # {index: [WordNet id, name]} is Keras's imagenet_class_index.json.
            cells = value if isinstance(value, list) else [key, value]
            yield _entry_of_cells(f"key {key!r}", cells)
    elif isinstance(content, list):
        for index, value in enumerate(content):
            yield _entry_of_cells(f"item {index}", value if isinstance(value, list) else [value])
    else:
        raise ValueError(f"expected a JSON object or list; found {type(content).__name__}")


def _in_order_of_numbers(content: dict[str, Any]) -> list[tuple[str, Any]]:
    """The items by number where all keys are numbers, as the file lists them otherwise."""
    if all(key.isdecimal() for key in content):
        return sorted(content.items(), key=lambda item: int(item[0]))
    return list(content.items())


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        raise ValueError(f"keys given more than once: {', '.join(map(repr, repeated[:5]))}")
    return dict(pairs)


def _read_csv(text: str) -> Iterator[_Entry]:
    rows = [row for row in csv.reader(io.StringIO(text, newline="")) if any(cell.strip() for cell in row)]
    columns = _columns_of_header(rows[0]) if rows else None
    for number, row in enumerate(rows[1:] if columns else rows, start=2 if columns else 1):
        if columns and max(columns) >= len(row):
            raise ValueError(f"row {number} has {len(row)} column(s), the header {len(rows[0])}: {row!r}")
        yield _entry_of_cells(f"row {number}", [row[column] for column in columns] if columns else row)


def _columns_of_header(row: Sequence[str]) -> list[int] | None:
    """The columns of (folder, name), or of the name alone; None where the row isn't a header."""
    cells = [cell.strip().lower().replace(" ", "_") for cell in row]
    found = {
        role: next((cells.index(title) for title in titles if title in cells), None)
        for role, titles in _CSV_COLUMNS.items()
    }
    if found["name"] is None:
        return None
    return [column for column in (found["folder"], found["name"]) if column is not None]


def _complete(entry: _Entry) -> _Entry:
    """The entry with the name of a bare WordNet id filled in.

    Raises:
        ValueError: an empty name, an unknown id without a name, or an id where the name belongs.
    """
    place, folder, name = entry
    if not name or folder == "":
        raise ValueError(f"{place}: the {'folder' if name else 'name'} is empty")
    if not wordnet.is_wordnet_id(name):
        return entry
    if folder is not None:
        raise ValueError(
            f"{place}: the name of {folder!r} is the WordNet id {name}; "
            "expected `folder<TAB>name`, in that order"
        )
    names = wordnet.names_of(name)
    if not names:
        raise ValueError(f"{place}: timm's metadata has no WordNet id {name}; give it as `{name}<TAB>name`")
    return _Entry(place, name, names[0])


def _class_set(entries: Sequence[_Entry], path: Path) -> ClassSet:
    source = str(path)
    imagenet_1k = wordnet.imagenet_1k()
    if [(None, name) for name in imagenet_1k.values()] == [(entry.folder, entry.name) for entry in entries]:
        # OpenCLIP's list itself: two names occur twice in it, and its order tells their ids.
        return ClassSet(tuple(imagenet_1k.values()), tuple(imagenet_1k), source)
    distinct = dict.fromkeys((entry.folder, entry.name) for entry in entries)
    folders, names = zip(*distinct, strict=True)
    return ClassSet(names, folders, source, num_merged=len(entries) - len(distinct))


def _refuse_repeated_folders(entries: Sequence[_Entry]) -> None:
    first: dict[str, _Entry] = {}
    for entry in entries:
        if entry.folder is not None and entry.folder in first:
            raise ValueError(
                f"{entry.place}: folder {entry.folder!r} was given at {first[entry.folder].place} already"
            )
        if entry.folder is not None:
            first[entry.folder] = entry
