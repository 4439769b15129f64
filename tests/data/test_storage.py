from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from shard_builders import good_tar, numbers_of

from clip_la.data import remote
from clip_la.data.losses import Cause, LossCounter
from clip_la.data.samples import RawSample, read_shard
from clip_la.data.spec import Limits
from clip_la.data.storage import NotAFileError, OpenOptions, TooLargeError, open_stream, read_small

DATA = good_tar(range(40))
QUICK = OpenOptions(retries=3, timeout_seconds=0.5)


def read_url(url: str, options: OpenOptions = QUICK) -> tuple[list[RawSample], LossCounter]:
    samples, losses = [], LossCounter()
    for item in read_shard(url, Limits(), options):
        if isinstance(item, RawSample):
            samples.append(item)
        else:
            losses.add(item)
    return samples, losses


class FaultyServer(BaseHTTPRequestHandler):
    """Serves DATA; the path says what goes wrong, and `requests` counts what was asked."""

    requests: list[str]

    def do_GET(self) -> None:
        fault = self.path.strip("/").split(".")[0]
        self.requests.append(fault)
        num_requests = self.requests.count(fault)
        if fault in ("404", "403") or (fault == "busy" and num_requests < 3):
            self.send_error(503 if fault == "busy" else int(fault))
            return
        start = 0
        if "range" in fault and (header := self.headers.get("Range")):
            start = int(header.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(DATA) - start))
        self.end_headers()
        if fault == "trickle":
            self.trickle()
            return
        is_faulty = fault.endswith("always") or num_requests < 3
        end = start + len(DATA) // 3 if is_faulty and fault not in ("good", "busy") else len(DATA)
        self.wfile.write(DATA[start:end])
        if is_faulty and fault.startswith("stall"):
            self.server.is_over.wait(5)  # type: ignore[attr-defined]

    def trickle(self) -> None:
        """A few bytes at a time, until the client has had enough."""
        with contextlib.suppress(OSError):
            for start in range(0, len(DATA), 8):
                self.wfile.write(DATA[start : start + 8])
                if self.server.is_over.wait(0.05):  # type: ignore[attr-defined]
                    return

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(remote, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(FaultyServer, "requests", [], raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), FaultyServer) as running:
        running.is_over = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.is_over.set()  # type: ignore[attr-defined]
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("fault", ["good", "busy", "drop", "drop_range", "stall", "stall_range"])
def test_faults_that_pass(server: str, fault: str) -> None:
    samples, losses = read_url(f"{server}/{fault}.tar")
    assert numbers_of(samples) == list(range(40))
    assert not losses


def test_a_server_that_never_finishes_loses_only_the_rest(server: str) -> None:
    samples, losses = read_url(f"{server}/drop_always.tar")
    assert numbers_of(samples) == list(range(len(samples)))
    assert 0 < len(samples) < 40
    assert losses.counts[Cause.SHARD_UNREADABLE] == 1
    assert FaultyServer.requests.count("drop_always") == QUICK.retries + 1


@pytest.mark.parametrize(("fault", "cause"), [("404", Cause.SHARD_MISSING), ("403", Cause.SHARD_UNREADABLE)])
def test_answers_that_are_final(server: str, fault: str, cause: Cause) -> None:
    samples, losses = read_url(f"{server}/{fault}.tar")
    assert not samples
    assert losses.to_counts() == {cause.value: 1}
    assert FaultyServer.requests == [fault]


def test_a_server_that_is_gone() -> None:
    samples, losses = read_url("http://127.0.0.1:9/a.tar", OpenOptions(retries=0, timeout_seconds=0.5))
    assert not samples
    assert losses.to_counts() == {"shard_unreadable": 1}


def test_a_trickle_is_a_failure(server: str) -> None:
    _, losses = read_url(f"{server}/trickle.tar", OpenOptions(retries=0, timeout_seconds=1.0))
    assert losses.to_counts()["shard_unreadable"] == 1
    assert "bytes a second" in losses.first[Cause.SHARD_UNREADABLE].detail


def test_fsspec_store() -> None:
    fsspec.filesystem("memory").pipe_file("/shards/a.tar", DATA)
    samples, losses = read_url("memory://shards/a.tar")
    assert numbers_of(samples) == list(range(40))
    assert not losses
    assert read_url("memory://shards/b.tar")[1].to_counts() == {"shard_missing": 1}


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.tar")
    for path in (tmp_path, tmp_path / "fifo.tar", Path("/dev/zero")):
        with pytest.raises(NotAFileError), open_stream(str(path), QUICK):
            pass
        assert read_url(str(path))[1].to_counts() == {"shard_not_a_tar": 1}


def test_commands_only_where_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    command = f"pipe:touch {tmp_path}/ran; cat {path}"
    assert read_url(command)[1].to_counts() == {"shard_unreadable": 1}
    assert not (tmp_path / "ran").exists()
    samples, losses = read_url(command, OpenOptions(allow_pipe=True))
    assert numbers_of(samples) == list(range(40))
    assert not losses


def test_a_failing_command_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    samples, losses = read_url(f"pipe:cat {path}; exit 3", OpenOptions(allow_pipe=True))
    assert numbers_of(samples) == list(range(40))
    assert losses.to_counts() == {"shard_unreadable": 1}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_every_process_of_a_job_cuts_no_command_short(
    number: signal.Signals, tmp_path: Path
) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    with open_stream(f"pipe:echo $$; sleep 0.3; cat {path}", OpenOptions(allow_pipe=True)) as stream:
        os.killpg(int(stream.read(20)), number)
        received = b"".join(iter(lambda: stream.read(1 << 16), b""))
    assert received == DATA


def test_closing_ends_a_command() -> None:
    with open_stream("pipe:yes | cat", OpenOptions(allow_pipe=True)) as stream:
        assert stream.read(2) == b"y\n"


def test_read_small(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_small(f"file://{path}", 5, QUICK) == b"12345"
    with pytest.raises(TooLargeError):
        read_small(str(path), 4, QUICK)
