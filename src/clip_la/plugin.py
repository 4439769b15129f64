"""Registers the plugin with OpenCLIP when OpenCLIP is imported, so that `import clip_la` itself is quick."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OPENCLIP = "open_clip"


def register_with_openclip() -> None:
    """Register now if OpenCLIP is loaded, else right after it is first imported, by whomever."""
    if _OPENCLIP in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _RegisteringFinder())


def _register() -> None:
    importlib.import_module("clip_la.openclip")  # registers when it is imported


class _RegisteringFinder(MetaPathFinder):
    """Finds OpenCLIP where the finders behind it do, and has its import end with the registration."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """OpenCLIP's spec, with the registration at its end; None for every other module."""
        if fullname != _OPENCLIP:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            _register_after_import(spec)
        return spec


def _register_after_import(spec: ModuleSpec) -> None:
    loader = spec.loader
    assert loader is not None
    execute = loader.exec_module

    def execute_and_register(module: ModuleType) -> None:
        """Import OpenCLIP, then register."""
        execute(module)
        _register()

    loader.exec_module = execute_and_register  # type: ignore[method-assign]
