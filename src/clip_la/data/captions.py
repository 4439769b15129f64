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
        self._empty_row: list[int] = tokenize([""])[0].tolist()
        self._special_tokens = _SpecialTokens(self._empty_row)

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
        if self._special_tokens.are_in(row):
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


class _SpecialTokens:
    """What a tokenizer puts around a text: start, end, padding, as the row of "" shows.

    Rows of another form have no start token, and only CLIP's have tokens that a text can spell.
    """

    def __init__(self, empty_row: list[int]) -> None:
        self._start, self._end, self._padding = empty_row[0], empty_row[1], empty_row[-1]
        is_clips = self._start != self._end and len(set(empty_row[2:])) == 1
        self.are_in = self._are_in if is_clips else _never

    def _are_in(self, row: list[int]) -> bool:
        """Whether a start or end token stands inside a caption's row."""
        if row.count(self._start) != 1 or self._end not in row:
            return True
        behind = row[row.index(self._end) + 1 :]
        return behind.count(self._padding) != len(behind)


def _never(_: list[int]) -> bool:
    return False
