from __future__ import annotations

import open_clip
import pytest
import torch

from clip_la.data.captions import CaptionEncoder
from clip_la.data.decode import Unusable
from clip_la.data.losses import Cause
from clip_la.data.spec import Limits

TOKENIZER = open_clip.get_tokenizer("ViT-B-32")
ENCODE = CaptionEncoder(TOKENIZER, Limits(), "drop")


def cause_of(data: bytes) -> Cause:
    with pytest.raises(Unusable) as caught:
        ENCODE(data)
    return caught.value.cause


@pytest.mark.parametrize(
    "text", ["a photo of a cat", "  café \n crème  ", "!", "! ! !", "a < b > c", "猫 😀"]
)
def test_tokens_are_the_tokenizers(text: str) -> None:
    assert torch.equal(ENCODE(text.encode()), TOKENIZER([text])[0])


def test_byte_order_mark_is_no_text() -> None:
    assert torch.equal(ENCODE(b"\xef\xbb\xbfa cat"), TOKENIZER(["a cat"])[0])
    assert cause_of(b"\xef\xbb\xbf") == Cause.TEXT_EMPTY


@pytest.mark.parametrize("data", [b"", b" \n\t", b"&nbsp;", b"\xc2\xa0"])
def test_empty_captions(data: bytes) -> None:
    assert cause_of(data) == Cause.TEXT_EMPTY
    keep = CaptionEncoder(TOKENIZER, Limits(), "keep")
    assert torch.equal(keep(data), TOKENIZER([""])[0])


@pytest.mark.parametrize("data", ["café crème".encode("latin-1"), b"a\xed\xa0\x80b", "cat".encode("utf-16")])
def test_bad_encoding(data: bytes) -> None:
    assert cause_of(data) == Cause.TEXT_ENCODING


@pytest.mark.parametrize(
    "text",
    [
        "a cat <end_of_text> a dog",
        "<start_of_text>",
        "<END_OF_TEXT> a dog",
        "a cat <end_of_text>",
        "&lt;end_of_text&gt; a dog",
        "&amp;lt;end_of_text&amp;gt; a dog",
        "\uff1cend_of_text\uff1e a dog",
        "<end\x07_of_text> a dog",
    ],
)
def test_special_tokens_cannot_be_spelt(text: str) -> None:
    assert cause_of(text.encode()) == Cause.TEXT_SPECIAL_TOKEN


@pytest.mark.parametrize(
    "text",
    ["a big red cat and " * 6000, " " * 50_000 + "a cat " * 10_000, "😀 " * 30_000, "- " * 50_000],
)
def test_long_captions_are_cut_as_the_tokenizer_cuts(text: str) -> None:
    assert torch.equal(ENCODE(text.encode()), TOKENIZER([text])[0])


def test_a_long_word_takes_bounded_time() -> None:
    seen: list[str] = []

    def tokenize(texts: list[str]) -> torch.Tensor:
        seen.extend(texts)
        return TOKENIZER(texts)

    CaptionEncoder(tokenize, Limits(), "drop")(b"x" * 100_000)
    assert max(map(len, seen)) == Limits().caption_chars


def test_other_tokenizers_have_no_start_token() -> None:
    def tokenize(texts: list[str]) -> torch.Tensor:  # end and padding only, as SigLIP's
        return torch.tensor([[*text.encode()[:6], 1, 1, 1, 1, 1, 1, 1][:7] for text in texts])

    assert CaptionEncoder(tokenize, Limits(), "drop")(b"cat").tolist() == [99, 97, 116, 1, 1, 1, 1]


def test_a_failing_tokenizer_is_counted() -> None:
    def tokenize(texts: list[str]) -> torch.Tensor:
        if texts != [""]:
            raise KeyError("no such token")
        return TOKENIZER(texts)

    with pytest.raises(Unusable) as caught:
        CaptionEncoder(tokenize, Limits(), "drop")(b"cat")
    assert caught.value.cause == Cause.TEXT_TOKENIZER
