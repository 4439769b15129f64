"""A client of the local cluster."""

from __future__ import annotations

import fcntl
import os
import random
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO_ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("slurm_local.sh")
UNDER_WAY = {"PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING", "SIGNALING", "STAGE_OUT"}
# Idle, a start takes some seconds; the machine may be shared by many.
PATIENCE_SECONDS = 400.0
PREFIX = "clip_la_slurm_"
NUM_NODES = 3
PORTS = range(16000, 19900, 10)


@contextmanager
def running_cluster() -> Iterator[dict[str, str]]:
    """Start a cluster; its clients' environment.

    A process of its own waits for this one to let go of a lock, here or by dying, and then ends the cluster.
    """
    state = Path(tempfile.mkdtemp(prefix=PREFIX))
    state.chmod(0o755)  # munged wants it so, up to the root
    port = _free_port()
    environment = {
        **os.environ,
        "SLURM_LOCAL_DIR": str(state),
        "SLURM_LOCAL_PORT": str(port),
        "SLURM_LOCAL_FIRST_JOB": str((port - PORTS.start) * 10 + 1),
        "SLURM_LOCAL_NODES": str(NUM_NODES),
        "SLURM_CONF": str(state / "slurm.conf"),
    }
    with (state / "owner").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        guard = subprocess.Popen([SCRIPT, "guard", owner.name], env=environment, start_new_session=True)
        try:
            subprocess.run([SCRIPT, "start"], env=environment, check=True)
            yield environment
        finally:
            owner.close()
            guard.wait()


def remove_abandoned() -> None:
    """End clusters that neither a test session nor a guard looks after any more."""
    for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/owner"):
        with file.open("a") as owner:
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
        environment = {**os.environ, "SLURM_LOCAL_DIR": str(file.parent)}
        subprocess.run([SCRIPT, "guard", file], env=environment, check=True)


def _free_port() -> int:
    """A port that nobody listens on, nor on those that the nodes take after it."""
    while True:
        first = random.choice(PORTS)
        if all(_is_free(port) for port in range(first, first + NUM_NODES + 1)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def wait_until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
    """The condition's first true value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.2)
    raise AssertionError(f"waited {seconds:.0f} s in vain: {what}")


@dataclass(frozen=True)
class Cluster:
    """The cluster as its client sees it, from one folder."""

    folder: Path
    environment: dict[str, str]

    def call(self, *command: str | Path) -> str:
        """Standard output of a command that must succeed."""
        done = subprocess.run(
            list(map(str, command)), env=self.environment, cwd=self.folder, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def control(self, *arguments: str) -> str:
        """Call the script that runs the cluster."""
        return self.call(SCRIPT, *arguments)

    def submit(self, *arguments: str | Path, nodes: int = 2) -> str:
        """sbatch with one task and one (pretended) GPU a node; the job's id."""
        size = ["--gpus-per-node=1", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=2000"]
        limits = ["--time=20", "--signal=B:USR1@60"]
        return self.call("sbatch", "--parsable", f"--nodes={nodes}", *size, *limits, *arguments)

    def show(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        found = re.search(rf" {name}=(\S*)", self.call("scontrol", "show", "job", "-o", job))
        assert found is not None
        return found.group(1)

    def wait(self, job: str) -> tuple[str, int]:
        """The state that a job ends in, and its exit code."""
        wait_until(lambda: self.show(job, "JobState") not in UNDER_WAY, f"end of job {job}")
        return self.show(job, "JobState"), int(self.show(job, "ExitCode").split(":")[0])

    def output(self, job: str) -> str:
        """What a job has written so far."""
        return "".join(path.read_text() for path in self.folder.glob(f"slurm-*-{job}.out"))

    def wait_for_output(self, job: str, text: str, times: int = 1) -> None:
        """Wait until the job has written `text` so many times."""
        wait_until(lambda: self.output(job).count(text) >= times, f"{text!r} in\n{self.output(job)}")
