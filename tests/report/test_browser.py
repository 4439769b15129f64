"""The page in a real browser, at the width of a phone and of a wide screen; skipped where there is none."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from run_writer import RunWriter

from clip_la.report import write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=4000",
    "--dump-dom",
)
SIZES = {"phone": (390, 844), "wide": (1600, 1000)}

# Runs in the page: clicks through the switch, opens what is folded, and tells the frame around it.
PROBE = """
<script>
const shown = key => getComputedStyle(document.querySelector('.by-' + key)).display !== 'none';
const keys = ['samples', 'flops', 'hours'];
addEventListener('load', () => {
  const panels = {};
  for (const key of keys) {
    document.querySelector(`label[for=by-${key}]`).click();
    panels[key] = keys.filter(shown);
  }
  for (const details of document.querySelectorAll('details')) details.open = true;
  const page = document.documentElement;
  const widths = [...document.querySelectorAll('svg')].map(svg => svg.clientWidth).filter(width => width);
  parent.postMessage({size: window.name, inner: innerWidth, content: page.scrollWidth, panels, widths,
    badges: [...document.querySelectorAll('td li')].map(item => item.textContent)}, '*');
});
</script>
"""
FRAME = """
<!DOCTYPE html><body><pre id="seen"></pre>
<script>
const seen = [];
addEventListener('message', event => {
  seen.push(event.data);
  document.getElementById('seen').textContent = JSON.stringify(seen);
});
</script>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    return found


@pytest.fixture(scope="module")
def report_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two runs that differ in what a page finds hard: long names, many settings, a loss that was lost."""
    logs = tmp_path_factory.mktemp("browser")
    names = ("softmax", "a_name_without_any_blank_" * 4)
    folders = []
    for number, name in enumerate(names):
        settings = {f"a_setting_with_a_long_name_{i}": f"{number}-a-long-value" * 3 for i in range(3)}
        run = RunWriter(logs / name, batch_size=128 - 64 * number, **settings)
        run.start(attention=None if number == 0 else "eq7", global_batch_size=128 - 64 * number)
        for samples in range(100, 1001, 100):
            run.train(samples, None if number and samples > 700 else 3.0 - 0.002 * samples)
        run.eval(1000, "validation", loss=1.2).zeroshot(1000, 0.4)
        folders.append(run.end(1000).folder)
    return write_report(folders, logs / "report").paths[0]


def look(browser: str, page: Path) -> tuple[list[dict[str, Any]], str]:
    """What the probe saw at each size, and the browser's log."""
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text().replace("<head>", f"<head>{PROBE}", 1))
    frames = "".join(
        f"<iframe name='{name}' src='{probed.name}' style='border:0;width:{width}px;height:{height}px'>"
        "</iframe>"
        for name, (width, height) in SIZES.items()
    )
    around = page.with_name("frame.html")
    around.write_text(FRAME + frames)
    command = [browser, *FLAGS, f"--user-data-dir={page.with_name('profile')}", around.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    result = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result is not None, done.stdout[:2000]
    return json.loads(html.unescape(result[1]) or "[]"), done.stderr


def test_page_fits_works_and_has_no_errors(browser: str, report_page: Path) -> None:
    seen, log = look(browser, report_page)
    assert {(view["size"], view["inner"]) for view in seen} == {
        (name, size[0]) for name, size in SIZES.items()
    }
    for view in seen:
        assert view["content"] <= view["inner"], f"{view['size']}: the page is wider than the screen"
        assert max(view["widths"]) <= view["inner"]
        assert view["panels"] == {key: [key] for key in ("samples", "flops", "hours")}
        assert "not finite" in view["badges"]
    assert "CONSOLE" not in log, log
