"""The fate that ranks share: the reason of one that fails reaches all, and nobody waits for one that is gone.

Ranks talk through the store in which they met. Each shows every second that it is alive; one that fails
leaves its reason there before it ends. A rank that was killed leaves none: the others find their
connection to it closed, and then see whose signs of life have stopped.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from clip_la.distributed import World, leave_world
from clip_la.errors import ExpectedError
from clip_la.exit_codes import EXIT_PEER_FAILED

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
BEATS_TO_WAIT = 4
LINGER_SECONDS = 10.0
SAVE_SECONDS = 60.0
_REASON, _READ = "clip_la/reason", "clip_la/read"


class PeerError(ExpectedError):
    """Another rank failed or is gone; the message says which, and why where that is known."""

    exit_code = EXIT_PEER_FAILED


@contextmanager
def shared_fate(world: World) -> Iterator[None]:
    """A block that an error of one rank ends on every rank; the process group is left with it.

    Raises:
        PeerError: another rank failed, or is gone.
    """
    watch = _Watch(world, world.store) if world.store is not None else None
    try:
        yield
    except Exception as error:
        if watch is None:
            raise
        if _is_lost_connection(error):
            raise PeerError(watch.explain()) from error
        watch.tell(f"rank {world.rank} failed: {type(error).__name__}: {error}")
        raise
    finally:
        if watch is not None:
            watch.stop()
        leave_world()


def _is_lost_connection(error: Exception) -> bool:
    """Whether a collective failed, and so another rank is to blame. Gloo has no exception of its own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


class _Watch:
    """This rank's signs of life, and its ear for the reason of another that fails."""

    def __init__(self, world: World, store: Store) -> None:
        self._world = world
        self._store = store
        self._reason: str | None = None
        self._has_left = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="peers")
        self._thread.start()

    def stop(self) -> None:
        """This rank has nothing more to do with the others."""
        self._has_left.set()
        self._thread.join()

    def tell(self, reason: str, num_gone: int = 0) -> None:
        """Leave a reason for the others; where the store is in this process, stay until they have read it."""
        try:
            self._store.compare_set(_REASON, "", reason)
            deadline = time.monotonic() + LINGER_SECONDS
            num_readers = self._world.size - 1 - num_gone
            while (
                self._hosts_store and self._store.add(_READ, 0) < num_readers and time.monotonic() < deadline
            ):
                time.sleep(BEAT_SECONDS / 10)
        except RuntimeError:  # rank 0 is gone, and the store with it
            return

    def explain(self) -> str:
        """Why a connection was lost; waits for the signs of life that tell."""
        before = self._beats()
        for _ in range(BEATS_TO_WAIT):
            time.sleep(BEAT_SECONDS)
            if self._reason is not None:
                return self._reason
        after = self._beats()
        if before is None or after is None:
            return _describe_gone([0])
        gone = [rank for rank, beats in enumerate(after) if beats == before[rank]]
        reason = _describe_gone(gone)
        self.tell(reason, num_gone=len(gone))
        return self._reason or reason

    @property
    def _hosts_store(self) -> bool:
        """torchrun keeps the store in its own process."""
        return self._world.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def _beats(self) -> list[int] | None:
        try:
            return [self._store.add(f"clip_la/beats/{rank}", 0) for rank in range(self._world.size)]
        except RuntimeError:
            return None

    def _watch(self) -> None:
        while not self._has_left.wait(BEAT_SECONDS):
            try:
                self._store.add(f"clip_la/beats/{self._world.rank}", 1)
                if not self._store.check([_REASON]):
                    continue
                self._reason = self._store.get(_REASON).decode(errors="replace")
                self._store.add(_READ, 1)
            except RuntimeError:  # rank 0 is gone; the next collective fails, and says so
                return
            # A collective in the main thread may never return: NCCL waits for the dead.
            if not self._has_left.wait(BEATS_TO_WAIT * BEAT_SECONDS):
                self._end(self._reason)
            return

    def _end(self, reason: str) -> None:
        logger.error("%s", reason)
        print(f"clip-la: {reason}", file=sys.stderr, flush=True)
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.main_thread():
                thread.join(SAVE_SECONDS)  # a checkpoint under way
        os._exit(EXIT_PEER_FAILED)


def _describe_gone(ranks: list[int]) -> str:
    who = f"rank {', '.join(map(str, ranks))} is gone" if ranks else "the connection to another rank was lost"
    return (
        f"{who} without giving a reason (killed, out of memory, or its node or network failed): see what its "
        "own output and the kernel's log say; the same command continues from the last checkpoint"
    )
