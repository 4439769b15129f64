"""From bytes to tokens: UTF-8 only, bounded before the tokenizer, no special tokens from the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from clip_la.data.decode import Unusable
from clip_la.data.losses import Cause
from clip_la.data.spec import Limits

Tokenize = Callable[[list[str]], torch.Tensor]


class CaptionEncoder:
    """Captions to rows of tokens.

    Empty is a caption of which the tokenizer leaves nothing. The text is cut at
    `limits.caption_chars` after white space is collapsed, as the tokenizer collapses it, so the cut
    lies beyond the tokenizer's own, but for words that are no words.
    Special tokens are looked for in the tokens, not in the text, because a tokenizer's cleaning can
    make one out of "&lt;end_of_text&gt;" or full-width brackets.

    Args:
        tokenize: OpenCLIP's tokenizer: list of str -> (n, L) int64.
        limits: caption_chars.
        empty: whether a caption without text is dropped or kept.
    """

    def __init__(self, tokenize: Tokenize, limits: Limits, empty: Literal["drop", "keep"]) -> None:
        self._tokenize = tokenize
        self._max_chars = limits.caption_chars
        self._keep_empty = empty == "keep"
        self._empty_row = tokenize([""])[0].tolist()

    def __call__(self, data: bytes) -> torch.Tensor:
        """Tokens of one caption, (L,) int64.

        Raises:
            Unusable: not UTF-8, empty, or holding a special token.
        """
        text = " ".join(decode_caption(data).split())[: self._max_chars]
        try:
            tokens = self._tokenize([text])[0]
        except Exception as error:
            raise Unusable(Cause.TEXT_TOKENIZER, repr(error)) from error
        row = tokens.tolist()
        if row == self._empty_row and not self._keep_empty:
            raise Unusable(Cause.TEXT_EMPTY, repr(text[:80]))
        if has_special_token(row, self._empty_row):
            raise Unusable(Cause.TEXT_SPECIAL_TOKEN, repr(text[:80]))
        return tokens


def decode_caption(data: bytes) -> str:
    """The text of a UTF-8 caption, without its byte-order mark.

    Raises:
        Unusable: not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unusable(Cause.TEXT_ENCODING, f"not UTF-8: {error.reason} at byte {error.start}") from error


def has_special_token(row: list[int], empty_row: list[int]) -> bool:
    """Whether a start or end token stands inside a caption's row.

    `empty_row`, the row of "", shows what the tokenizer puts around a text: start, end, padding. Rows
    of another form have no start token, and only CLIP's have tokens that a text can spell.
    """
    start, end, *padding = empty_row
    if start == end or len(set(padding)) != 1:
        return False
    body = row[1:]
    first_end = body.index(end) if end in body else len(body)
    return start in body or any(token != padding[0] for token in body[first_end + 1 :])
