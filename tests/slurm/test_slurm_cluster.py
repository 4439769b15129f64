"""The local cluster itself: nothing of it outlives its test session, however that ends."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from local_cluster import PREFIX, SCRIPT, remove_abandoned, wait_until

pytestmark = pytest.mark.slurm

SESSION = """
from local_cluster import running_cluster
with running_cluster() as environment:
    print(environment["SLURM_LOCAL_DIR"], flush=True)
    input()
"""


@pytest.fixture
def able() -> None:
    if subprocess.run([SCRIPT, "able"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine can't run a cluster")


def processes_of(state: Path) -> list[str]:
    """Process ids that have the folder in their command line or environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        except OSError:
            continue
        if str(state).encode() in text:
            found.append(folder.name)
    return found


@pytest.mark.usefixtures("able")
def test_a_cluster_ends_with_a_session_that_is_killed() -> None:
    session = subprocess.Popen(
        [sys.executable, "-c", SESSION],
        cwd=SCRIPT.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert session.stdout is not None
    state = Path(session.stdout.readline().strip())
    assert state.name.startswith(PREFIX)
    assert len(processes_of(state)) > 5  # slurmctld, munged, the nodes, the guard
    session.send_signal(signal.SIGKILL)
    session.communicate()
    wait_until(lambda: not state.exists() and not processes_of(state), f"the end of {state}", 60)


@pytest.mark.usefixtures("able")
def test_what_nobody_guards_any_more_is_removed_by_the_next_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("abandoned", "guarded"):
        (tmp_path / f"{PREFIX}{name}").mkdir()
        (tmp_path / f"{PREFIX}{name}" / "owner").touch()
    with (tmp_path / f"{PREFIX}guarded" / "owner").open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        remove_abandoned()
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}guarded"]
