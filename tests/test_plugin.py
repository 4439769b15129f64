"""`import clip_la` in processes of their own: it is quick, and OpenCLIP has the plugin whatever the order."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "imports",
    [
        "import clip_la, open_clip",
        "import open_clip, clip_la",
        "import clip_la; from open_clip.factory import create_model; import open_clip",
        "import clip_la, importlib.util; importlib.util.find_spec('open_clip'); import open_clip",
        "import clip_la; clip_la.register; import open_clip",
        "import clip_la, importlib; importlib.reload(clip_la); import open_clip",
    ],
)
def test_openclip_has_the_plugin(imports: str) -> None:
    code = f"{imports}\nprint('ViT-B-16-LA' in open_clip.list_models(), open_clip.factory.CLIP.__name__)"
    assert run_python(code) == "True AttentionCLIP\n"


@pytest.mark.parametrize(
    "code",
    [
        "import clip_la, clip_la.config",
        "from clip_la.cli import build_parser; build_parser('report', 'fit', 'runs', 'train')",
    ],
)
def test_what_needs_neither_torch_nor_openclip_imports_neither(code: str) -> None:
    loaded = "[name for name in ('torch', 'open_clip') if name in sys.modules]"
    assert run_python(f"{code}; import sys; print({loaded})") == "[]\n"
