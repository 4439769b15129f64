"""The plugin through OpenCLIP's public API: what works, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import load_file, save_file

import clip_la
from clip_la.attention import masks
from clip_la.attention.module import LinearAttention
from clip_la.openclip import WeightsError, spec_of_weights

KINDS = {
    "ViT-nano-8": "softmax",
    "ViT-nano-8-LA": "eq7",
    "ViT-nano-8-LA-eq4": "eq4",
    "ViT-nano-8-LA-gain": "eq7 (scale=length, gain=learned)",
    "ViT-nano-8-LA-centred": "eq7 (scale=length, gain=learned, centre_values=True)",
}
SIZES = {"ViT-S-16": 12 * 6 + 12 * 6, "ViT-B-16": 12 * 12 + 12 * 8, "ViT-L-16": 24 * 16 + 12 * 12}
TWINS = [
    (f"{size}-{suffix}", size)
    for size in [*SIZES, "ViT-nano-8"]
    for suffix in ("LA", "LA-eq4", "LA-gain", "LA-centred")
]


def nano(name: str = "ViT-nano-8-LA", **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return open_clip.create_model(name, **options)


def images_and_texts(size: int = 64, context_length: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, size, size, generator=generator)
    texts = open_clip.get_tokenizer("ViT-nano-8-LA", context_length=context_length)(
        ["a red circle", "two words"]
    )
    return images, texts


def test_registered_models_are_exactly_the_package_files() -> None:
    files = {path.stem for path in (Path(clip_la.__file__).parent / "model_configs").glob("*.json")}
    assert files == {name for name, _ in TWINS} | {"ViT-nano-8"}
    assert files <= set(open_clip.list_models())


@pytest.mark.parametrize(("name", "twin"), TWINS)
def test_config_differs_from_softmax_twin_in_attention_only(name: str, twin: str) -> None:
    config = open_clip.get_model_config(name)
    assert config.pop("attention")
    assert config == open_clip.get_model_config(twin)


@pytest.mark.parametrize(("name", "twin"), [pair for pair in TWINS if pair[1] != "ViT-L-16"])
def test_parameters_equal_softmax_twins(name: str, twin: str) -> None:
    with torch.device("meta"):
        shapes = {key: p.shape for key, p in open_clip.create_model(name, device="meta").named_parameters()}
        expected = {key: p.shape for key, p in open_clip.create_model(twin, device="meta").named_parameters()}
    gains = {key: shapes.pop(key) for key in list(shapes) if key.endswith(".gain")}
    assert shapes == expected
    if name.endswith(("gain", "centred")) and twin in SIZES:
        assert sum(shape.numel() for shape in gains.values()) == SIZES[twin]
    else:
        assert bool(gains) == name.endswith(("gain", "centred"))


@pytest.mark.parametrize("name", KINDS)
def test_attention_is_what_the_name_says(name: str) -> None:
    model = nano(name)
    assert str(model.attention_spec) == KINDS[name]
    blocks = [*model.visual.transformer.resblocks, *model.transformer.resblocks]
    assert len(blocks) == 10
    assert all(isinstance(block.attn, LinearAttention) == (KINDS[name] != "softmax") for block in blocks)
    if KINDS[name] != "softmax":
        assert [block.attn.causal for block in blocks] == [False] * 6 + [True] * 4


def test_same_seed_gives_the_softmax_twins_weights() -> None:
    softmax = nano("ViT-nano-8").state_dict()
    linear = nano("ViT-nano-8-LA").state_dict()
    assert all(torch.equal(value, linear[key]) for key, value in softmax.items())


def test_text_tower_is_causal_and_image_tower_is_not() -> None:
    model = nano().eval()
    images, texts = images_and_texts()
    changed = texts.clone()
    changed[:, -3] = 7  # behind the end of text, where the pooled token can't look
    assert torch.equal(model.encode_text(texts), model.encode_text(changed))
    moved = images.clone()
    moved[:, :, -1, -1] += 1.0
    assert not torch.equal(model.encode_image(images), model.encode_image(moved))


@pytest.mark.parametrize(
    "options", [{"force_image_size": 96}, {"force_context_length": 40}, {"force_custom_text": True}]
)
def test_openclip_overrides(options: dict[str, int]) -> None:
    model = nano(**options).eval()
    images, texts = images_and_texts(
        options.get("force_image_size", 64), options.get("force_context_length", 24)
    )
    assert model.encode_image(images).shape == model.encode_text(texts).shape == (2, 128)


def test_any_native_config_takes_an_attention() -> None:
    model = nano("ViT-nano-8", attention={"kind": "eq7"})
    assert torch.equal(model.encode_image(images_and_texts()[0]), nano().encode_image(images_and_texts()[0]))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "pure_bf16", "pure_fp16", "amp_bf16"])
def test_every_precision_agrees_with_float32(name: str, precision: str) -> None:
    images, texts = images_and_texts()
    expected = torch.nn.functional.normalize(nano(name).eval().encode_image(images), dim=-1)
    model = nano(name, precision=precision).eval()
    dtype = open_clip.get_input_dtype(precision) or torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision.startswith("amp")):
        out = model.encode_image(images.to(dtype), normalize=True)
        text = model.encode_text(texts, normalize=True)
    assert torch.isfinite(text).all()
    assert torch.nn.functional.cosine_similarity(out.float(), expected).min() > 0.99


@pytest.mark.parametrize("force_custom_text", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "pure_bf16", "pure_fp16", "amp_bf16"])
def test_the_causal_mask_is_read_once(
    precision: str, force_custom_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[torch.dtype] = []
    read = masks._is_causal

    def counting(mask: torch.Tensor) -> bool:
        reads.append(mask.dtype)
        return read(mask)

    monkeypatch.setattr(masks, "_is_causal", counting)
    model = nano(precision=precision, force_custom_text=force_custom_text)
    _, texts = images_and_texts()
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision.startswith("amp")):
                model.encode_text(texts).float().sum().backward()
    assert len(reads) == 1


@pytest.mark.parametrize("name", [twin[0] for twin in TWINS if twin[1] == "ViT-nano-8"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "pure_bf16", "pure_fp16", "amp_bf16"])
def test_gradient_checkpointing_changes_nothing(name: str, precision: str) -> None:
    images, texts = images_and_texts()

    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        model = nano(name, precision=precision, output_dict=True)
        model.set_grad_checkpointing(checkpointing)
        dtype = open_clip.get_input_dtype(precision) or torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision.startswith("amp")):
            out = model(images.to(dtype), texts)
        (out["image_features"] @ out["text_features"].T)[0, 0].backward()
        return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    plain, checkpointed = gradients(False), gradients(True)
    assert len(plain) > 100
    assert all(torch.equal(value, checkpointed[key]) for key, value in plain.items())


def test_forward_intermediates() -> None:
    images, texts = images_and_texts()
    out = nano().forward_intermediates(images, texts, image_indices=2, text_indices=2)
    assert [tuple(x.shape) for x in out["image_intermediates"]] == [(2, 128, 8, 8)] * 2
    assert [tuple(x.shape) for x in out["text_intermediates"]] == [(2, 24, 128)] * 2


@pytest.mark.slow
def test_torch_compile_gives_the_same_features() -> None:
    model = nano("ViT-nano-8-LA-gain").eval()
    images, texts = images_and_texts()
    compiled = torch.compile(model, fullgraph=True)
    for expected, found in zip(model(images, texts)[:2], compiled(images, texts)[:2], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("name", KINDS)
def test_weights_round_trip_through_openclip(name: str, suffix: str, tmp_path: Path) -> None:
    model = nano(name)
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save({"state_dict": model.state_dict()}, path)
    else:
        save_file(model.state_dict(), path)
        assert spec_of_weights(load_file(path)) == model.attention_spec
    torch.manual_seed(5)
    loaded = open_clip.create_model(name, pretrained=str(path))
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())


def test_weights_of_a_plain_text_tower_load_into_a_custom_one(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(nano().state_dict(), path)
    custom = nano(force_custom_text=True, pretrained=str(path)).eval()
    _, texts = images_and_texts()
    assert torch.equal(custom.encode_text(texts), nano().eval().encode_text(texts))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("built", KINDS)
def test_cross_loading_is_refused_and_names_both(
    saved: str, built: str, strict: bool, tmp_path: Path
) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"state_dict": nano(saved).state_dict()}, path)
    model = nano(built)
    if saved == built:
        open_clip.load_checkpoint(model, str(path), strict=strict)
        return
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(WeightsError) as caught:
        open_clip.load_checkpoint(model, str(path), strict=strict)
    assert f"with attention {KINDS[saved]}," in str(caught.value)
    assert f"the model uses {KINDS[built]};" in str(caught.value)
    towers = {key: value for key, value in before.items() if "resblocks" in key}
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in towers.items())


def test_a_single_tower_of_another_attention_is_refused() -> None:
    with pytest.raises(WeightsError, match="attention softmax, the model uses eq7"):
        nano().visual.load_state_dict(nano("ViT-nano-8").visual.state_dict(), strict=False)


@pytest.mark.parametrize("name", [twin[0] for twin in TWINS if twin[1] == "ViT-nano-8"])
def test_softmax_weights_start_a_linear_model_on_purpose(name: str, tmp_path: Path) -> None:
    path = tmp_path / "softmax.pt"
    softmax = nano("ViT-nano-8")
    torch.save({"state_dict": softmax.state_dict()}, path)
    torch.manual_seed(9)
    model = open_clip.create_model(name)
    clip_la.load_softmax_weights(model, path)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in softmax.state_dict().items())
    with pytest.raises(WeightsError):  # the permission was for that one call
        model.load_state_dict(softmax.state_dict(), strict=False)


def test_linear_weights_are_not_softmax_weights(tmp_path: Path) -> None:
    path = tmp_path / "linear.pt"
    torch.save({"state_dict": nano("ViT-nano-8-LA-eq4").state_dict()}, path)
    with pytest.raises(WeightsError, match=r"holds eq4; expected softmax weights"):
        clip_la.load_softmax_weights(nano(), path)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("coca_ViT-B-32", "CoCa"),
        ("convnext_base", "timm"),
        ("roberta-ViT-B-32", "Hugging Face"),
        ("RN50", "native ViT"),
    ],
)
def test_foreign_towers_are_refused(name: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        open_clip.create_model(name, attention={"kind": "eq7"})


@pytest.mark.parametrize(
    ("tower", "entry", "what"),
    [
        ("vision_cfg", {"attentional_pool": True}, "attentional pooler"),
        ("vision_cfg", {"qk_norm": True}, "default blocks"),
        ("text_cfg", {"embed_cls": True}, "class token"),
        ("text_cfg", {"block_type": "custom"}, "default blocks"),
    ],
)
def test_unsupported_options_of_native_towers_are_refused(
    tower: str, entry: dict[str, bool], what: str, tmp_path: Path
) -> None:
    config = open_clip.get_model_config("ViT-nano-8-LA")
    config[tower].update(entry)
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    with pytest.raises(ValueError, match=what):
        open_clip.create_model(f"local-dir:{tmp_path}")


def test_a_bidirectional_text_tower_is_not_causal(tmp_path: Path) -> None:
    config = open_clip.get_model_config("ViT-nano-8-LA")
    config["text_cfg"].update(no_causal_mask=True, pool_type="last")
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    model = open_clip.create_model(f"local-dir:{tmp_path}")
    assert not any(block.attn.causal for block in model.transformer.resblocks)
    assert torch.isfinite(model.encode_text(images_and_texts()[1])).all()


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_without_the_plugin_openclip_builds_nothing(tmp_path: Path) -> None:
    unknown = run_python("import open_clip; open_clip.create_model('ViT-B-16-LA')")
    assert unknown.returncode != 0
    assert "'ViT-B-16-LA' not found" in unknown.stderr
    package_file = Path(clip_la.__file__).parent / "model_configs" / "ViT-nano-8-LA.json"
    refused = run_python(
        f"import open_clip; open_clip.add_model_config({str(package_file)!r}); "
        "open_clip.create_model('ViT-nano-8-LA')"
    )
    assert refused.returncode != 0
    assert "attention" in refused.stderr.splitlines()[-1]


def test_without_the_plugin_linear_weights_do_not_load_as_softmax(tmp_path: Path) -> None:
    path = tmp_path / "linear.safetensors"
    save_file(nano("ViT-nano-8-LA-eq4").state_dict(), path)
    config = {"model_cfg": open_clip.get_model_config("ViT-nano-8"), "preprocess_cfg": {}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    refused = run_python(f"import open_clip; open_clip.create_model('local-dir:{tmp_path}')")
    assert refused.returncode != 0
    assert "attention_eq4" in refused.stderr
