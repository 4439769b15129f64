"""Zero-shot classification of a tree of image folders, or of shards (Radford et al., arXiv 2103.00020)."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clip_la.bundle import ClipBundle
from clip_la.data.losses import printable
from clip_la.evaluate import ranks
from clip_la.evaluate.cache import EvaluationCache, hash_of_text
from clip_la.evaluate.classes import ClassSet, load_classes
from clip_la.evaluate.features import (
    class_features,
    encode_class_names,
    evaluation_mode,
    progress,
    refuse_non_finite,
)
from clip_la.evaluate.images import FolderImages, ImageSource, hash_of_list
from clip_la.evaluate.journal import Journal
from clip_la.evaluate.loading import load_batches, num_batches
from clip_la.evaluate.mapping import map_folders
from clip_la.evaluate.results import ZeroShotResult, format_class_rows, write_whole
from clip_la.evaluate.shards import ShardImages, find_shards, name_of
from clip_la.evaluate.tally import Answers, Tally
from clip_la.evaluate.templates import load_templates

_logger = logging.getLogger(__name__)
CLASSES_FILE = "classnames.txt"
TEMPLATES_FILE = "zeroshot_classification_templates.txt"
_MAX_EXAMPLES = 5
_DEFAULT_TEMPLATES = "openai-80"


class ZeroShot:
    """Evaluator of labelled images.

    The images are listed and their folders or labels mapped to the classes when this is built, by all ranks
    together, so that what doesn't fit is refused before anything is computed.

    Args:
        data: a tree with one folder of images a class, or webdataset shards with `.cls` labels: a shard list,
            or a folder of shards.
        classnames: a class-name file or a list such as "imagenet-1k", see `clip_la.evaluate.classes`; by
            default `classnames.txt` in the tree, or in the shards' folder or the one above.
        templates: a named set of prompt templates or a file, see `clip_la.evaluate.templates`; by default
            `zeroshot_classification_templates.txt` beside the shards, else "openai-80".
        batch_size: images a batch, a rank.
        workers: processes that decode images, a rank; 0 decodes in this one.
        numeric_labels: folders called by numbers count the class list from 0. Numeric labels of shards do so
            anyway: that is what they mean in webdataset sets.
        allow_missing_classes: accept classes without a folder; they stay among the possible answers.
        allow_unknown_folders: leave out folders that are no class.
        per_class_csv: where `run` writes a row a class, if anywhere.
        name: of the evaluation; by default "zeroshot/<folder name>".
        cache: where text features are kept, and how far an evaluation has come; None for nowhere.

    Raises:
        ValueError: the data, the class names or the templates can't be used; the message lists why.
        RanksError: on all ranks, where it happened on one of several.
    """

    def __init__(
        self,
        data: str | Path,
        classnames: str | Path | None = None,
        templates: str | Path | None = None,
        *,
        batch_size: int = 64,
        workers: int = 2,
        numeric_labels: bool = False,
        allow_missing_classes: bool = False,
        allow_unknown_folders: bool = False,
        per_class_csv: str | Path | None = None,
        name: str | None = None,
        cache: EvaluationCache | None = None,
    ) -> None:
        if batch_size < 1 or workers < 0:
            raise ValueError(f"batch_size is {batch_size} and workers {workers}; expected at least 1 and 0")
        self.name = name or f"zeroshot/{name_of(str(data))}"
        self.source = open_images(data)
        with ranks.failing_together():
            self.templates = load_templates(
                templates or self.source.file_beside(TEMPLATES_FILE) or _DEFAULT_TEMPLATES
            )
            self.classes = _classes_for(self.source, classnames, numeric_labels)
            self.mapping = map_folders(
                self.source.labels,
                self.classes,
                noun=self.source.noun,
                allow_missing_classes=allow_missing_classes,
                allow_unknown_folders=allow_unknown_folders,
            )
            self._distinct_names = list(dict.fromkeys(self.classes.names))
            self._numbers, self._true_classes = self._images_of_classes()
        self._batch_size = batch_size
        self._workers = workers
        self._per_class_csv = None if per_class_csv is None else Path(per_class_csv)
        self._cache = cache

    def _images_of_classes(self) -> tuple[Sequence[int], Tensor]:
        """Numbers of the images whose folder is a class, and their classes, int64."""
        class_of = [self.mapping.class_of.get(label, -1) for label in self.source.labels]
        true_classes = torch.tensor(class_of)[torch.tensor(self.source.label_of, dtype=torch.int64)]
        numbers = array("q", torch.nonzero(true_classes >= 0).flatten().tolist())
        if not numbers:
            raise ValueError(
                f"no images in the {len(self.mapping.class_of)} class {self.source.noun}s of "
                f"{self.source.name} that are used"
            )
        return numbers, true_classes[true_classes >= 0]

    def run(self, bundle: ClipBundle) -> dict[str, Any]:
        """The metrics, see `ZeroShotResult.metrics`; rank 0 writes the per-class CSV if it is asked for."""
        result = self.evaluate(bundle)
        if self._per_class_csv is not None and ranks.rank_and_world_size()[0] == 0:
            write_whole(self._per_class_csv, format_class_rows(result.class_rows()))
        return result.metrics()

    def evaluate(self, bundle: ClipBundle) -> ZeroShotResult:
        """Classify all images, each rank its share; every rank gets the whole result.

        With a cache, an evaluation that was interrupted continues: batches that were finished are taken over.

        Raises:
            ValueError: no image could be read, or the model's features are not finite.
            RanksError: on all ranks, where it happened on one of several.
        """
        text_key = self._hash_of_text(bundle)
        score = self._build_classifier(bundle, text_key)
        journal = self._open_journal(text_key)
        tally, todo = self._take_over(journal)
        with ranks.failing_together(), evaluation_mode(bundle.model):
            self._count(bundle, score, todo, tally, journal)
        tally = tally.over_ranks()
        if journal is not None and ranks.rank_and_world_size()[0] == 0:
            journal.remove()
        self._report_unreadable(tally.unreadable)
        return ZeroShotResult(self.classes, self.mapping, self.templates, tally, self.source.num_other_files)

    def _hash_of_text(self, bundle: ClipBundle) -> str:
        """Of all that the text features are a function of; empty without a cache, which alone needs it."""
        if self._cache is None:
            return ""
        with ranks.failing_together():
            is_first = ranks.rank_and_world_size()[0] == 0
            key = hash_of_text(bundle, self._distinct_names, self.templates) if is_first else ""
        return ranks.from_rank_0(key)

    def _build_classifier(self, bundle: ClipBundle, text_key: str) -> Callable[[Tensor], Tensor]:
        """A function from image features (n, embed_dim) to scores (n, classes).

        Each distinct name is encoded once, so that classes of equal names have equal scores to the bit.
        """
        names = self._distinct_names
        if self._cache is None:
            weights = encode_class_names(bundle, names, self.templates)
        else:
            weights = class_features(bundle, names, self.templates, self._cache, text_key)
        if len(names) == len(self.classes):
            return lambda features: features @ weights.T
        column_of = {name: column for column, name in enumerate(names)}
        columns = torch.tensor([column_of[name] for name in self.classes.names], device=weights.device)
        return lambda features: (features @ weights.T)[:, columns]

    def _open_journal(self, text_key: str) -> Journal | None:
        """The answers so far of the same model on the same images in the same batches."""
        if self._cache is None:
            return None
        digest = hashlib.sha256(f"{text_key} {hash_of_list(self.source)} {self._batch_size}".encode())
        digest.update("\0".join(self.classes.names).encode())
        digest.update(self._true_classes.numpy().tobytes())
        return self._cache.journal(digest.hexdigest())

    def _take_over(self, journal: Journal | None) -> tuple[Tally, Sequence[int]]:
        """A tally that holds the finished batches, on rank 0, and this rank's share of the others."""
        tally = Tally.empty(len(self.classes))
        total = num_batches(len(self._numbers), self._batch_size)
        rank, world_size = ranks.rank_and_world_size()
        with ranks.failing_together():
            finished = journal.read() if journal is not None and rank == 0 else {}
        if rank == 0:
            tally.unreadable += self.source.unusable
            for answers in finished.values():
                tally.add(answers)
            if finished:
                _logger.info("%s: %d of %d batches were finished before", self.name, len(finished), total)
        done = ranks.from_rank_0(set(finished))
        return tally, ranks.split([batch for batch in range(total) if batch not in done], rank, world_size)

    @torch.inference_mode()
    def _count(
        self,
        bundle: ClipBundle,
        score: Callable[[Tensor], Tensor],
        todo: Sequence[int],
        tally: Tally,
        journal: Journal | None,
    ) -> None:
        batches = load_batches(
            self.source,
            self._numbers,
            bundle.preprocess_val,
            batch_size=self._batch_size,
            batches=todo,
            num_workers=self._workers,
        )
        for batch in progress(batches, self.name, total=len(todo)):
            answers = Answers(batch.number, [], [], [], batch.unreadable)
            if len(batch.places):
                features = refuse_non_finite(bundle.encode_image(batch.images), "image")
                answers = Answers.of(
                    batch.number, score(features), self._true_classes[batch.places], batch.unreadable
                )
            tally.add(answers)
            if journal is not None:
                journal.append(answers)
        if journal is not None:
            journal.close()

    def _report_unreadable(self, unreadable: list[str]) -> None:
        if not unreadable:
            return
        examples = "\n  ".join(printable(example) for example in unreadable[:_MAX_EXAMPLES])
        num_images = len(self._numbers) + len(self.source.unusable)
        message = (
            f"{len(unreadable)} of {num_images} images of {self.source.name} could not be read:\n  {examples}"
        )
        if len(unreadable) == num_images:
            raise ValueError(message)
        if ranks.rank_and_world_size()[0] == 0:
            _logger.warning(message)


def open_images(data: str | Path) -> ImageSource:
    """The images of a tree or of shards. Called by all ranks together.

    Raises:
        ValueError: neither is there, or it holds no image; says what is there.
        RanksError: on all ranks, where it happened on one of several.
    """
    shards = find_shards(str(data))
    if shards is not None:
        return ShardImages(shards)
    with ranks.failing_together():
        return FolderImages(data)


def _classes_for(source: ImageSource, classnames: str | Path | None, numeric_labels: bool) -> ClassSet:
    """The class set; where the labels count it, with its places as folders."""
    chosen = classnames or source.file_beside(CLASSES_FILE)
    if chosen is None:
        raise ValueError(f"no class names: {source.name} has no {CLASSES_FILE} beside it; give --classnames")
    labels_count = source.noun == "label" and all(label.isdecimal() for label in source.labels)
    by_index = numeric_labels or labels_count
    classes = load_classes(chosen, by_index=by_index, labels=source.labels)
    if classes.is_by_index:
        _refuse_numbers_that_are_names(source, classes)
    return classes


def _refuse_numbers_that_are_names(source: ImageSource, classes: ClassSet) -> None:
    """Digits, say: where the label 3 is both a place in the list and another class's name, nothing tells."""
    place_of = {name: place for place, name in enumerate(classes.names)}
    for label in source.labels:
        if label.isdecimal() and place_of.get(label, int(label)) != int(label):
            raise ValueError(
                f"the {source.noun} {label} may be the class at place {label} of {classes.source} "
                f"or the class of that name; give a file of `{source.noun}<TAB>name` lines"
            )
