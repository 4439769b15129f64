"""Which attention a model uses, as a value: parsed from a model config, stored with the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

Kind = Literal["softmax", "eq4", "eq7"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True)
class AttentionSpec:
    """One kind of attention and its options (arXiv 2604.10064; hats are L2-normalised rows).

    Attributes:
        kind: "softmax"; "eq4", O = sum_n (1 + q.k_n) v_n / sum_n (1 + q.k_n); or
            "eq7", O = scale * sum_n (1 + gain * q^.k^_n) v_n.
        scale: Eq. 7's factor: "none" (the paper's 1/2), "length" (1/N, N the tokens of the call),
            or a number.
        gain: Eq. 7's weight of the query-dependent part: "none" (1, the paper's), "learned"
            (one parameter a head, started at sqrt(D)), or a fixed number.
        output_norm: "none", or "rms": each head's output divided by its RMS before out_proj.
        normalise_qk: Eq. 4 with L2-normalised q and k (default) or with raw ones. Eq. 7 always
            normalises.
        centre_values: Eq. 7 of values less their mean over the tokens, which leaves nothing of the constant
            part: O = scale * gain * sum_n q^.k^_n (v_n - mean v). Where attention is causal (the text tower)
            it changes nothing.

    Raises:
        ValueError: a value outside the above, or an option that the kind does not have.
    """

    kind: Kind = "softmax"
    scale: str | float = "none"
    gain: str | float = "none"
    output_norm: str = "none"
    normalise_qk: bool = True
    centre_values: bool = False

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, KINDS)
        _check_number_or("scale", self.scale, ("none", "length"))
        _check_number_or("gain", self.gain, ("none", "learned"))
        _check_choice("output_norm", self.output_norm, ("none", "rms"))
        for name in ("normalise_qk", "centre_values"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"attention.{name} is {getattr(self, name)!r}; expected true or false")
        if self.kind != "eq7":
            self._refuse_changed("scale", "gain", "centre_values")
        if self.kind != "eq4":
            self._refuse_changed("normalise_qk")
        if self.kind == "softmax":
            self._refuse_changed("output_norm")

    def _refuse_changed(self, *names: str) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"attention.{name} = {getattr(self, name)!r} has no meaning for {self.kind}; remove it"
                )

    @classmethod
    def from_config(cls, config: AttentionSpec | Mapping[str, Any] | str | None) -> AttentionSpec:
        """A spec from a model config's `attention` entry: a dict, just the kind, or None for softmax."""
        if config is None:
            return cls()
        if isinstance(config, AttentionSpec):
            return config
        if isinstance(config, str):
            return cls(kind=cast(Kind, config))
        if not isinstance(config, Mapping):
            raise ValueError(f"attention is {config!r}; expected a mapping such as {{'kind': 'eq7'}}")
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise ValueError(f"unknown attention option(s) {', '.join(unknown)}; known: {', '.join(known)}")
        if "kind" not in config:
            raise ValueError(f"attention {dict(config)!r} names no kind; expected one of {', '.join(KINDS)}")
        return cls(**config)

    def to_config(self) -> dict[str, Any]:
        """The dict that `from_config` reads back: the kind and whatever differs from the defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        return {
            name: value for name, value in asdict(self).items() if name == "kind" or value != defaults[name]
        }

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.to_config().items() if name != "kind"]
        return self.kind + (f" ({', '.join(options)})" if options else "")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"attention.{name} is {value!r}; expected one of {', '.join(choices)}")


def _check_number_or(name: str, value: object, words: tuple[str, ...]) -> None:
    if isinstance(value, str) and value in words:
        return
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value != 0
    ):
        return
    raise ValueError(
        f"attention.{name} is {value!r}; expected {', '.join(words)} or a finite number other than 0"
    )
