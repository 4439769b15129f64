"""What a zero-shot evaluation found: metrics, a row a class, the wrong answers given most often."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from clip_la.evaluate import wordnet
from clip_la.evaluate.classes import ClassSet
from clip_la.evaluate.mapping import FolderMapping
from clip_la.evaluate.tally import Tally, wilson_interval
from clip_la.evaluate.templates import Templates


@dataclass(frozen=True)
class Confusion:
    """A wrong answer: `num_images` images of class `true`, a `share` of all its images, got `predicted`."""

    true: str
    predicted: str
    num_images: int
    share: float


@dataclass(frozen=True)
class ClassRow:
    """One class's result; the shares are None for a class without images, the definition is WordNet's."""

    index: int
    name: str
    folder: str
    definition: str
    num_images: int
    num_top1: int
    num_top5: int
    top1: float | None
    top5: float | None
    commonest_wrong_answer: str
    num_commonest_wrong_answer: int


@dataclass(frozen=True)
class ZeroShotResult:
    """The exact counts of an evaluation and what they belong to."""

    classes: ClassSet
    mapping: FolderMapping
    templates: Templates
    tally: Tally
    num_other_files: int

    def metrics(self) -> dict[str, Any]:
        """Flat and JSON-safe. Accuracies are shares of 1; top1_low to top1_high is Wilson's 95 % interval.

        Unreadable images count in `num_unreadable` alone, and files that are no images by their suffix in
        `num_other_files`. `mean_per_class` is over the classes that have
        images. With fewer than five classes, `top5` is over all of them.
        """
        tally, num_classes = self.tally, len(self.classes)
        num_images, num_top1, num_top5 = (
            int(counts.sum()) for counts in (tally.num_images, tally.num_top1, tally.num_top5)
        )
        top1_low, top1_high = wilson_interval(num_top1, num_images)
        has_images = tally.num_images > 0
        recalls = tally.num_top1[has_images].double() / tally.num_images[has_images]
        return {
            "top1": num_top1 / num_images,
            "top1_low": top1_low,
            "top1_high": top1_high,
            "top5": num_top5 / num_images,
            "mean_per_class": recalls.mean().item(),
            "chance": 1 / num_classes,
            "num_images": num_images,
            "num_top1": num_top1,
            "num_top5": num_top5,
            "num_unreadable": len(tally.unreadable),
            "num_other_files": self.num_other_files,
            "num_classes": num_classes,
            "num_classes_without_images": num_classes - int(has_images.sum()),
            "num_missing_classes": len(self.mapping.missing_classes),
            "num_unknown_folders": len(self.mapping.unknown_folders),
            "num_duplicate_names": self.classes.num_duplicate_names,
            "templates": self.templates.name,
            "templates_hash": self.templates.hash,
            "class_list": self.classes.source,
            "class_list_hash": self.classes.hash,
        }

    def confusions(self) -> list[Confusion]:
        """All wrong answers, those given most often first; ties in order of the classes."""
        names = self.classes.names
        return [
            Confusion(names[true], names[predicted], count, count / int(self.tally.num_images[true]))
            for (true, predicted), count in self._sorted_confusions()
        ]

    def class_rows(self) -> list[ClassRow]:
        """A row a class, in order of the class set."""
        folder_of = {index: folder for folder, index in self.mapping.class_of.items()}
        wrong: dict[int, tuple[str, int]] = {}
        for (true, predicted), count in self._sorted_confusions():
            wrong.setdefault(true, (self.classes.names[predicted], count))
        counts = zip(
            *(c.tolist() for c in (self.tally.num_images, self.tally.num_top1, self.tally.num_top5)),
            strict=True,
        )
        return [
            ClassRow(
                index,
                self.classes.names[index],
                folder_of.get(index, ""),
                self._definition(index),
                *(num_images, num_top1, num_top5),
                num_top1 / num_images if num_images else None,
                num_top5 / num_images if num_images else None,
                *wrong.get(index, ("", 0)),
            )
            for index, (num_images, num_top1, num_top5) in enumerate(counts)
        ]

    def _definition(self, index: int) -> str:
        folder = self.classes.folders[index]
        return wordnet.definition_of(folder) if folder is not None and wordnet.is_wordnet_id(folder) else ""

    def _sorted_confusions(self) -> list[tuple[tuple[int, int], int]]:
        return sorted(self.tally.confusions.items(), key=lambda item: (-item[1], item[0]))


def format_class_rows(rows: list[ClassRow]) -> str:
    """The rows as CSV with a header."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [field.name for field in fields(ClassRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file under a temporary name, then rename it, so that no reader meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    temporary.write_text(text, encoding="utf-8", newline="")
    os.replace(temporary, path)
