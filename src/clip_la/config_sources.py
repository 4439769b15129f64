"""Build a RunConfig from a YAML file (with `base:` to inherit) and command-line flags, which win."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from clip_la.config import UNSUPPORTED_FLAGS, ConfigError, RunConfig, flag_name

_FIELDS = {entry.name: entry for entry in dataclasses.fields(RunConfig)}
_TYPES = typing.get_type_hints(RunConfig)
_GROUPS = {
    "model": "the model",
    "data": "data",
    "optimisation": "optimisation",
    "run": "the run: folders, checkpoints, logs",
    "evaluation": "evaluation while training",
}


def load_run_config(config: str | Path | None, overrides: Mapping[str, Any]) -> RunConfig:
    """The frozen config of a run. `overrides` (typed or strings, by field name) win over the file.

    Raises:
        ConfigError: an unreadable file, an unknown or unsupported name (near matches are listed), a wrong
            type.
    """
    settings = read_yaml(Path(config)) if config is not None else {}
    for name in overrides:
        _check_name(name, "settings")
    settings.update(overrides)
    if settings.get("name") is None and config is not None:
        settings["name"] = Path(config).stem
    return RunConfig(**{name: _coerce(name, value) for name, value in settings.items()})


def write_yaml(config: RunConfig, path: Path) -> None:
    """Write every setting, defaults included, so that a run's folder says what it was."""
    values = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(config).items()
    }
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


# --- Command line -----------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag a field, grouped; a flag that is not given stays out of the namespace."""
    for group, title in _GROUPS.items():
        section = parser.add_argument_group(title)
        for name, entry in _FIELDS.items():
            if entry.metadata["group"] == group:
                _add_flag(section, name, entry)


def _add_flag(section: argparse._ArgumentGroup, name: str, entry: dataclasses.Field[Any]) -> None:
    default = "" if entry.default in (None, "", ()) else f" (default: {entry.default})"
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    options["help"] = (entry.metadata["help"] + default).replace("%", "%%")
    if _TYPES[name] is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif name == "aug_cfg" or _base_type(name) is tuple:
        options.update(nargs="+", metavar="KEY=VALUE" if name == "aug_cfg" else "X")
    elif entry.metadata["choices"]:
        options["metavar"] = "{" + ",".join(choice for choice in entry.metadata["choices"] if choice) + "}"
    else:
        options["metavar"] = "JSON" if _base_type(name) in (dict, list) else _base_type(name).__name__.upper()
    section.add_argument(flag_name(name), **options)


def flags_given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line names."""
    return {name: value for name, value in vars(args).items() if name in _FIELDS}


def refuse_unknown_flags(arguments: Sequence[str]) -> None:
    """Name the first flag that argparse didn't know: unsupported with its reason, or near matches.

    Raises:
        ConfigError: if there is any.
    """
    for argument in arguments:
        if argument.startswith("--"):
            _check_name(argument.partition("=")[0][2:].replace("-", "_"), "command line")
    if arguments:
        raise ConfigError(f"command line: unexpected {' '.join(arguments)!r}")


# --- YAML -------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses keys given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader does it, but a key given twice is an error."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.YAMLError(f"given twice: {', '.join(twice)}")
        return super().construct_mapping(node, deep)


# YAML 1.1 reads 5e-4 as a string because it has no dot; people mean the number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings of a YAML file, those of its `base:` (a path beside it) underneath its own."""
    return _read_yaml(path, ())


def _read_yaml(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: `base:` goes round in a circle")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"can't read config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"{path} holds a {type(content).__name__}; expected `key: value` lines")
    settings = {str(key).replace("-", "_"): value for key, value in (content or {}).items()}
    base = settings.pop("base", None)
    for name in settings:
        _check_name(name, str(path))
    inherited = _read_yaml(path.parent / base, (*seen, path.resolve())) if base else {}
    return {**inherited, **settings}


def _check_name(name: str, where: str) -> None:
    if name in UNSUPPORTED_FLAGS:
        raise ConfigError(f"{where}: {flag_name(name)} is not supported here: {UNSUPPORTED_FLAGS[name]}")
    if name not in _FIELDS:
        near = difflib.get_close_matches(name, _FIELDS, n=3, cutoff=0.5)
        hint = (
            f"did you mean {' or '.join(map(flag_name, near))}?" if near else "clip-la train --help lists all"
        )
        raise ConfigError(f"{where}: unknown setting {flag_name(name)}; {hint}")


# --- Types ------------------------------------------------------------------------------------------


def _base_type(name: str) -> type:
    """The one type of a field apart from None: bool, int, float, str, tuple, list (of mappings) or dict."""
    hint = _TYPES[name]
    if typing.get_origin(hint) is Sequence:
        return list
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    chosen = hint if typing.get_origin(hint) is tuple or not members else members[0]
    origin = typing.get_origin(chosen) or chosen
    return dict if origin not in (bool, int, float, str, tuple) else origin


def _coerce(name: str, value: Any) -> Any:
    if value is None:
        if _FIELDS[name].default is not None and type(None) not in typing.get_args(_TYPES[name]):
            raise ConfigError(f"{flag_name(name)} can't be empty")
        return None
    kind = _base_type(name)
    try:
        return _CONVERTERS[kind](name, value)
    except (ValueError, TypeError, SyntaxError):
        raise ConfigError(f"{flag_name(name)} is {value!r}; expected {_EXPECTED[kind]}") from None


def _to_bool(_name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _to_int(_name: str, value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
        raise TypeError
    return int(value)


def _to_float(_name: str, value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _to_str(_name: str, value: Any) -> str:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise TypeError
    return str(value)


def _to_tuple(_name: str, value: Any) -> tuple[float, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    numbers = tuple(ast.literal_eval(item) if isinstance(item, str) else item for item in items)
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError
    return numbers


def _to_dict(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, list):  # --aug-cfg key=value ..., as OpenCLIP spells it
        pairs = (item.partition("=") for item in value)
        return {key: _literal(text) for key, _, text in pairs}
    if isinstance(value, str):
        value = (
            json.loads(value) if value.startswith("{") else {"kind": value} if name == "attention" else value
        )
    if not isinstance(value, Mapping):
        raise TypeError
    return dict(value)


def _to_list(_name: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    entries = json.loads(value) if isinstance(value, str) else value
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, Mapping) for entry in entries):
        raise TypeError
    return tuple(dict(entry) for entry in entries)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


_CONVERTERS = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
    tuple: _to_tuple,
    list: _to_list,
    dict: _to_dict,
}
_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "numbers",
    list: 'a list of mappings such as [{"kind": "zeroshot", "data": "DIR"}]',
    dict: 'a mapping such as {"kind": "eq7"}',
}
