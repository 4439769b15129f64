"""Which folder or label means which class: by folder, name or WordNet id, never by position.

A folder is a folder of an image tree or a label of a shard; messages call it what it is.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

from clip_la.evaluate import wordnet
from clip_la.evaluate.classes import ClassSet

_MAX_LISTED = 10
_T = TypeVar("_T")


@dataclass(frozen=True)
class FolderMapping:
    """Folder name -> index into a `ClassSet`, and what was left out because the caller allowed it.

    Attributes:
        class_of: in the order of the folders given.
        missing_classes: indices of classes without a folder.
        unknown_folders: folders that are no class.
    """

    class_of: dict[str, int]
    missing_classes: tuple[int, ...]
    unknown_folders: tuple[str, ...]


def normalise_name(name: str) -> str:
    """The form in which names are compared: case, Unicode form, `_`, `-` and runs of spaces don't count."""
    return re.sub(r"[\s_-]+", " ", unicodedata.normalize("NFKC", name)).strip().casefold()


def map_folders(
    folders: Sequence[str],
    classes: ClassSet,
    *,
    noun: str = "folder",
    allow_missing_classes: bool = False,
    allow_unknown_folders: bool = False,
) -> FolderMapping:
    """Find the class of every folder.

    A folder is compared, in this order, with the folders stated for the classes, with their names, with
    either in normalised form, and, if it is a WordNet id, with all names of that id.

    Args:
        folders: names of the class folders, in any order.
        noun: what messages call them.
        allow_missing_classes: accept classes without a folder; they stay among the possible answers.
        allow_unknown_folders: leave out folders that are no class.

    Raises:
        ValueError: unknown or numeric folders, classes without a folder, a folder that fits several
            classes, or several folders for one class. All are listed in one message.
    """
    index = _ClassIndex(classes)
    candidates = {folder: index.find(folder) for folder in folders}
    class_of = {folder: found[0] for folder, found in candidates.items() if len(found) == 1}
    unknown = tuple(folder for folder, found in candidates.items() if not found)
    missing = tuple(sorted(set(range(len(classes))) - set(class_of.values())))
    problems = [
        *_ambiguous(candidates, classes, noun),
        *_shared(class_of, classes, noun),
        *([] if allow_unknown_folders else _unknown(unknown, classes, noun)),
        *([] if allow_missing_classes else _missing(missing, classes, noun)),
    ]
    if not class_of and not problems:
        problems = [f"no {noun} is a class"]
    if problems:
        details = "\n  ".join(problems)
        raise ValueError(
            f"{len(folders)} {noun}s don't fit the {len(classes)} classes of {classes.source}:\n  {details}"
        )
    return FolderMapping(class_of, missing, unknown)


class _ClassIndex:
    """Finds the classes that a folder name may mean."""

    def __init__(self, classes: ClassSet) -> None:
        self._by_folder: defaultdict[str, set[int]] = defaultdict(set)
        self._by_name: defaultdict[str, set[int]] = defaultdict(set)
        self._by_normalised: defaultdict[str, set[int]] = defaultdict(set)
        for index, (name, folder) in enumerate(zip(classes.names, classes.folders, strict=True)):
            self._by_name[name].add(index)
            self._by_normalised[normalise_name(name)].add(index)
            if folder is not None:
                self._by_folder[folder].add(index)
                self._by_normalised[normalise_name(folder)].add(index)

    def find(self, folder: str) -> list[int]:
        """Indices of the classes that the folder may mean, by the strictest comparison that finds any."""
        for table, text in (
            (self._by_folder, folder),
            (self._by_name, folder),
            (self._by_normalised, normalise_name(folder)),
        ):
            if text in table:
                return sorted(table[text])
        alternatives = wordnet.names_of(folder) if wordnet.is_wordnet_id(folder) else ()
        return sorted(
            set().union(*(self._by_normalised.get(normalise_name(name), set()) for name in alternatives))
        )


def _ambiguous(candidates: dict[str, list[int]], classes: ClassSet, noun: str) -> list[str]:
    ambiguous = [folder for folder, found in candidates.items() if len(found) > 1]

    def describe(folder: str) -> str:
        """A folder, and the classes that it may be."""
        return f"{folder} ({' or '.join(_name_class(classes, i) for i in candidates[folder][:_MAX_LISTED])})"

    advice = f"give a file of `{noun}<TAB>name` lines"
    return _problem(ambiguous, f"{noun}(s) fit several classes", describe, advice)


def _shared(class_of: dict[str, int], classes: ClassSet, noun: str) -> list[str]:
    folders_of: defaultdict[int, list[str]] = defaultdict(list)
    for folder, index in class_of.items():
        folders_of[index].append(folder)
    shared = [index for index, folders in folders_of.items() if len(folders) > 1]

    def describe(index: int) -> str:
        """A class, and the folders that it has."""
        return f"{_name_class(classes, index)} ({', '.join(folders_of[index][:_MAX_LISTED])})"

    return _problem(shared, f"class(es) have several {noun}s", describe, f"rename or merge the {noun}s")


def _unknown(folders: Sequence[str], classes: ClassSet, noun: str) -> list[str]:
    names = [normalise_name(name) for name in classes.names]

    def describe(folder: str) -> str:
        """A folder, and the class name that is nearest."""
        near = get_close_matches(normalise_name(folder), names, n=1, cutoff=0.75)
        return f"{folder} (near {near[0]!r})" if near else folder

    numeric = [folder for folder in folders if folder.isdecimal()]
    others = [folder for folder in folders if not folder.isdecimal()]
    if classes.is_by_index:
        about_numbers = (
            f"{noun}(s) are out of the range 0 to {len(classes) - 1}",
            "give the class list that they count",
        )
    else:
        about_numbers = (
            f"{noun}(s) are mere numbers, which don't say the class (positions are never used)",
            f"give a file of `{noun}<TAB>name` lines, or --numeric-labels if they count the list from 0",
        )
    return [
        *_problem(numeric, about_numbers[0], str, about_numbers[1]),
        *_problem(
            others,
            f"{noun}(s) are no class",
            describe,
            "rename them or the classes, or leave them out with --allow-unknown-folders",
        ),
    ]


def _missing(missing: Sequence[int], classes: ClassSet, noun: str) -> list[str]:
    return _problem(
        missing,
        f"class(es) have no {noun}",
        lambda index: _name_class(classes, index),
        "give a file of the classes that are there, or keep these as answers with --allow-missing-classes",
    )


def _name_class(classes: ClassSet, index: int) -> str:
    folder = classes.folders[index]
    return repr(classes.names[index]) + (f" of folder {folder}" if folder else "")


def _problem(items: Sequence[_T], what: str, describe: Callable[[_T], str], advice: str) -> list[str]:
    """One line on the items, the first few described; nothing for no items."""
    if not items:
        return []
    more = f", and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return [f"{len(items)} {what}: {', '.join(map(describe, items[:_MAX_LISTED]))}{more}; {advice}"]
