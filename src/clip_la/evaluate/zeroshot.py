"""Zero-shot classification of an image-folder tree (Radford et al., arXiv 2103.00020)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clip_la.bundle import ClipBundle
from clip_la.evaluate import ranks
from clip_la.evaluate.classes import load_classes
from clip_la.evaluate.features import encode_class_names, evaluation_mode, progress, refuse_non_finite
from clip_la.evaluate.images import list_image_tree, load_images
from clip_la.evaluate.mapping import map_folders
from clip_la.evaluate.results import ZeroShotResult, format_class_rows, write_whole
from clip_la.evaluate.tally import Tally
from clip_la.evaluate.templates import load_templates

_logger = logging.getLogger(__name__)
_MAX_EXAMPLES = 5


class ZeroShotFolder:
    """Evaluator of a tree with one folder of images a class.

    The tree is listed and its folders mapped to the classes when this is built, so that what doesn't fit is
    refused before anything is computed.

    Args:
        root: the tree.
        classnames: a class-name file or a release such as "imagenet-1k"; see `clip_la.evaluate.classes`.
        templates: a named set of prompt templates or a file; see `clip_la.evaluate.templates`.
        batch_size: images a batch, a rank.
        workers: processes that decode images, a rank; 0 decodes in this one.
        allow_missing_classes: accept classes without a folder; they stay among the possible answers.
        allow_unknown_folders: leave out folders that are no class.
        per_class_csv: where `run` writes a row a class, if anywhere.
        name: of the evaluation; by default "zeroshot/<folder name>".

    Raises:
        ValueError: the tree, the class names or the templates can't be used; the message lists why.
    """

    def __init__(
        self,
        root: str | Path,
        classnames: str | Path,
        templates: str | Path = "openai-80",
        *,
        batch_size: int = 64,
        workers: int = 2,
        allow_missing_classes: bool = False,
        allow_unknown_folders: bool = False,
        per_class_csv: str | Path | None = None,
        name: str | None = None,
    ) -> None:
        if batch_size < 1 or workers < 0:
            raise ValueError(f"batch_size is {batch_size} and workers {workers}; expected at least 1 and 0")
        self.name = name or f"zeroshot/{Path(root).resolve().name}"
        self.templates = load_templates(templates)
        self.classes = load_classes(classnames)
        self.tree = list_image_tree(root)
        self.mapping = map_folders(
            list(self.tree.files),
            self.classes,
            allow_missing_classes=allow_missing_classes,
            allow_unknown_folders=allow_unknown_folders,
        )
        self._files = [
            (path, label)
            for folder, label in self.mapping.class_of.items()
            for path in self.tree.files[folder]
        ]
        if not self._files:
            raise ValueError(
                f"no images in the {len(self.mapping.class_of)} class folders of {root} that are used"
            )
        self._batch_size = batch_size
        self._workers = workers
        self._per_class_csv = None if per_class_csv is None else Path(per_class_csv)

    def run(self, bundle: ClipBundle) -> dict[str, Any]:
        """The metrics, see `ZeroShotResult.metrics`; rank 0 writes the per-class CSV if it is asked for."""
        result = self.evaluate(bundle)
        if self._per_class_csv is not None and ranks.rank_and_world_size()[0] == 0:
            write_whole(self._per_class_csv, format_class_rows(result.class_rows()))
        return result.metrics()

    def evaluate(self, bundle: ClipBundle) -> ZeroShotResult:
        """Classify all images, each rank its share; every rank gets the whole result.

        Raises:
            ValueError: no image could be read, or the model's features are not finite.
            RuntimeError: on all ranks, where it happened on one of several.
        """
        tally = Tally.empty(len(self.classes))
        with ranks.failing_together(), evaluation_mode(bundle.model):
            self._count(bundle, tally)
        tally = tally.over_ranks()
        self._report_unreadable(tally.unreadable)
        return ZeroShotResult(self.classes, self.mapping, self.templates, tally, self.tree.num_other_files)

    @torch.inference_mode()
    def _count(self, bundle: ClipBundle, tally: Tally) -> None:
        score = self._build_classifier(bundle)
        rank, world_size = ranks.rank_and_world_size()
        batches = load_images(
            self._files,
            bundle.preprocess_val,
            batch_size=self._batch_size,
            num_workers=self._workers,
            rank=rank,
            world_size=world_size,
        )
        for batch in progress(batches, self.name):
            tally.unreadable += batch.unreadable
            if len(batch.labels):
                features = refuse_non_finite(bundle.encode_image(batch.images), "image")
                tally.add(score(features), batch.labels)

    def _build_classifier(self, bundle: ClipBundle) -> Callable[[Tensor], Tensor]:
        """A function from image features (n, embed_dim) to scores (n, classes).

        Each distinct name is encoded once, so that classes of equal names have equal scores to the bit.
        """
        distinct = list(dict.fromkeys(self.classes.names))
        weights = encode_class_names(bundle, distinct, self.templates)
        column_of = {name: column for column, name in enumerate(distinct)}
        columns = torch.tensor([column_of[name] for name in self.classes.names], device=weights.device)
        return lambda features: (features @ weights.T)[:, columns]

    def _report_unreadable(self, unreadable: list[str]) -> None:
        if not unreadable:
            return
        examples = "\n  ".join(unreadable[:_MAX_EXAMPLES])
        share = f"{len(unreadable)} of {len(self._files)} images"
        message = f"{share} of {self.tree.root} could not be read:\n  {examples}"
        if len(unreadable) == len(self._files):
            raise ValueError(message)
        if ranks.rank_and_world_size()[0] == 0:
            _logger.warning(message)
