"""The model card (README.md) of an exported model: what it is, how to load it, and the run's own figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from clip_la.attention.spec import AttentionSpec
from clip_la.bundle import ClipBundle
from clip_la.data.losses import printable
from clip_la.export.facts import Facts
from clip_la.export.onnx import IMAGE_FILE, TEXT_FILE, TowerCheck
from clip_la.report.runs import EvalPoint
from clip_la.report.summary import attention_label, metric
from clip_la.report.text import number, percent, setting
from clip_la.version import __version__

PAPER = "https://arxiv.org/abs/2604.10064"
TO_FILL_IN = "TO FILL IN"
_PUBLISHER_SECTIONS = {
    "Intended use": "what the model is for, who should use it, and what it must not be used for",
    "Training data": "where the pairs come from, their licence, how they were filtered, what is known of the "
    "languages, people and biases in them",
    "Limits and risks": "what was tried and failed, groups or subjects that it serves badly, checks made",
    "Licence, authors, contact": "the licence of the weights, who made them, where to write, what to cite",
}
_HIDDEN_SETTINGS = {"logs", "name", "resume", "report_to", "wandb_notes", "wandb_project_name", "device"}


def equation(spec: AttentionSpec) -> str:
    """What one head computes, with hats for L2-normalised rows."""
    if spec.kind == "softmax":
        return "o_i = sum_n softmax_n(q_i.k_n / sqrt(D)) v_n"
    if spec.kind == "eq4":
        dot = "q^_i.k^_n" if spec.normalise_qk else "q_i.k_n"
        text = f"o_i = sum_n (1 + {dot}) v_n / sum_n (1 + {dot})"
    else:
        scale = {"none": "1/2", "length": "1/N"}.get(str(spec.scale), f"{spec.scale}")
        gain = {"none": "", "learned": "g_h "}.get(str(spec.gain), f"{spec.gain} ")
        text = f"o_i = {scale} sum_n (1 + {gain}q^_i.k^_n) v_n"
        if spec.centre_values:
            centred = f"o_i = {scale} sum_n {gain}q^_i.k^_n (v_n - mean v)"
            text = f"{centred} in the image tower, {text} in the text tower"
    return text + ("; each head's o_i divided by its RMS" if spec.output_norm == "rms" else "")


def write_card(
    bundle: ClipBundle,
    facts: Facts | None,
    *,
    repo: str | None = None,
    checks: Sequence[TowerCheck] = (),
    about: str | None = None,
) -> str:
    """The card as Markdown with the hub's front matter.

    Args:
        facts: of the run; None where nothing is known of the training.
        repo: the hub repository that it goes to, for the loading example.
        checks: of the ONNX files beside it, if any.
        about: the publisher's own sections, Markdown; None for `publisher_template()`.
    """
    title = repo.rpartition("/")[2] if repo else bundle.model_name
    sections = [
        _front_matter(bundle),
        f"# {title}",
        _what_it_is(bundle),
        _how_to_load(bundle, repo),
        _onnx(checks),
        (publisher_template() if about is None else about).strip(),
        _training(facts)
        if facts
        else "## Training\n\nThis model was exported without the run that trained it.",
        _results(facts) if facts else "",
        _known_limits(bundle, facts),
        _settings(facts) if facts else "",
        f"Exported by clip_la {__version__}.",
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _front_matter(bundle: ClipBundle) -> str:
    tags = ["clip", "open_clip", *(["linear-attention", "clip_la"] if bundle.spec.kind != "softmax" else [])]
    entries = {"tags": tags, "library_name": "open_clip", "pipeline_tag": "zero-shot-image-classification"}
    return "---\n" + yaml.safe_dump(entries, sort_keys=False) + "---"


def _what_it_is(bundle: ClipBundle) -> str:
    num_parameters = sum(parameter.numel() for parameter in bundle.model.parameters())
    size = bundle.preprocess_config["size"]
    pixels = f"{size} x {size}" if isinstance(size, int) else " x ".join(map(str, size))
    spec = bundle.spec
    source = "" if spec.kind == "softmax" else f" ([arXiv 2604.10064]({PAPER}))"
    return (
        f"A CLIP model, `{bundle.model_name}` ({num_parameters:,} parameters, {pixels} pixels), whose image "
        f"and text towers attend by {attention_label(spec)}{source}:\n\n    {equation(spec)}\n\n"
        "n runs over all tokens in the image tower and over n <= i in the text tower."
    )


def _how_to_load(bundle: ClipBundle, repo: str | None) -> str:
    reference = f"hf-hub:{repo}" if repo else "local-dir:PATH_OF_THIS_FOLDER"
    is_linear = bundle.spec.kind != "softmax"
    first = "import clip_la  # adds linear attention to OpenCLIP; must come before the model is built\n"
    note = (
        "\n\nWithout `import clip_la` OpenCLIP stops with *unexpected keyword argument "
        "'requires_import_clip_la'*: it has no linear attention and must not build a softmax model of these "
        "weights."
    )
    precision = f', precision="{bundle.precision}"' if _holds_low_precision(bundle) else ""
    return (
        f"## Load\n\n```python\n{first if is_linear else ''}import open_clip\n\n"
        f'name = "{reference}"\n'
        f"model, _, preprocess = open_clip.create_model_and_transforms(name{precision})\n"
        f"tokenizer = open_clip.get_tokenizer(name)\n```" + (note if is_linear else "")
    )


def _holds_low_precision(bundle: ClipBundle) -> bool:
    return any(not value.dtype.itemsize >= 4 for value in bundle.model.parameters())


def _onnx(checks: Sequence[TowerCheck]) -> str:
    if not checks:
        return ""
    rows = [
        f"| `onnx/{check.file}` | `{check.input}` {check.input_dtype} {check.input_shape} | `{check.output}` "
        f"(batch, {check.embed_dim}) | {check.max_abs_difference:.1e} |"
        for check in checks
    ]
    return (
        f"## ONNX\n\n`{IMAGE_FILE}` and `{TEXT_FILE}` compute L2-normalised float32 features from plain "
        "operations, for any batch size; `onnx/check.json` has the logit scale and the preprocessing.\n\n"
        "| File | Input | Output | Largest difference from torch |\n|---|---|---|---:|\n" + "\n".join(rows)
    )


def publisher_template() -> str:
    """The sections that only the person who publishes the model can write, each with what belongs in it."""
    sections = [f"## {title}\n\n**{TO_FILL_IN}:** {what}." for title, what in _PUBLISHER_SECTIONS.items()]
    return "\n\n".join(sections)


def _known_limits(bundle: ClipBundle, facts: Facts | None) -> str:
    """What follows from the facts, so that a reader doesn't take the figures for more than they are."""
    size = bundle.preprocess_config["size"]
    known = [f"Made for pictures of {size} pixels; nothing is said here of other sizes."]
    if facts is None or not facts.evaluations:
        known.append("No evaluation comes with it.")
    else:
        known.append("Nothing is known of tasks and sets other than those above.")
    if facts is not None:
        known.append(f"One run with seed {facts.config.get('seed')}: another seed gives other figures.")
        if facts.samples < facts.samples_total:
            known.append("Its training was not finished: see the samples seen.")
    return "## Limits that follow from the above\n\n" + "\n".join(f"- {line}" for line in known)


def _training(facts: Facts) -> str:
    config = facts.config
    rows = [
        ("Samples seen", f"{facts.samples:,} of {facts.samples_total:,} planned"),
        ("Data", str(config.get("train_data"))),
        ("Samples dropped as unusable", f"{facts.lost_samples:,}"),
        ("Training loss, smoothed", number(facts.train_loss)),
        ("Steps skipped as not finite", "-" if facts.skipped_steps is None else str(facts.skipped_steps)),
        ("Batch a process, accumulation", f"{config.get('batch_size')}, {config.get('accum_freq')}"),
        ("Precision", str(config.get("precision"))),
        ("Checkpoint", facts.file),
        ("Versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items())),
    ]
    return "## Training\n\n" + _table(("What", "Value"), rows)


def _results(facts: Facts) -> str:
    rows = list(_result_rows(facts.evaluations))
    if not rows:
        return "## Evaluations\n\nNone was logged up to this checkpoint."
    return "## Evaluations\n\n" + _table(("Evaluation", "Samples seen", "Result"), rows)


def _result_rows(evaluations: Sequence[EvalPoint]) -> Iterator[tuple[str, str, str]]:
    for point in evaluations:
        yield point.name, f"{point.samples:,}", _result(point)


def _result(point: EvalPoint) -> str:
    metrics: dict[str, Any] = dict(point.metrics)
    if "top1" in metrics:
        interval = ""
        if metrics.get("top1_low") is not None:
            interval = (
                f" [95 %: {percent(metric(point, 'top1_low'))} to {percent(metric(point, 'top1_high'))}]"
            )
        counts = f"; {metrics.get('num_images')} images, {metrics.get('num_classes')} classes"
        return f"top-1 {percent(metric(point, 'top1'))}{interval}{counts}"
    shown = [(key, value) for key, value in metrics.items() if isinstance(value, (int, float))]
    return ", ".join(f"{key} {value:.4g}" for key, value in shown[:8])


def _settings(facts: Facts) -> str:
    shown = {key: value for key, value in facts.config.items() if key not in _HIDDEN_SETTINGS}
    rows = [(key, setting(value)) for key, value in sorted(shown.items()) if value is not None]
    return (
        "<details><summary>All settings of the run</summary>\n\n"
        + _table(("Setting", "Value"), rows)
        + ("\n\n</details>")
    )


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    """Text that can't break out of a table's cell."""
    shown = printable(text, limit=4096)
    return shown.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
