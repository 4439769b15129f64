"""A run's folder: one process writes it at a time, and it says what the run was."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clip_la.config import ConfigError, RunConfig
from clip_la.config_sources import write_yaml


@contextmanager
def run_folder(config: RunConfig) -> Iterator[Path]:
    """The folder LOGS/NAME, made if need be and locked until the end.

    Raises:
        ConfigError: no name, no write access, or another process trains in it.
    """
    if config.name is None:
        raise ConfigError("the run has no name; give --name, or a config file, whose name it takes")
    folder = Path(config.logs) / config.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a+")
    except OSError as error:
        raise ConfigError(
            f"can't write to the run's folder {folder}: {error.strerror}; change --logs"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise ConfigError(
                f"{folder} is in use by process {lock.read().strip() or '?'}; wait, or give another --name"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()} on {os.uname().nodename}\n")
        lock.flush()
        write_yaml(config, folder / "config.yaml")
        yield folder


@contextmanager
def log_to_file(folder: Path) -> Iterator[None]:
    """Send this package's log lines to `out.log` too, and to it alone the traceback of a fatal error."""
    handler = logging.FileHandler(folder / "out.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    package_logger = logging.getLogger("clip_la")
    package_logger.addHandler(handler)
    try:
        yield
    except Exception as error:
        handler.handle(
            package_logger.makeRecord(
                package_logger.name, logging.ERROR, __file__, 0, "ended: %s", (error,), sys.exc_info()
            )
        )
        raise
    finally:
        package_logger.removeHandler(handler)
        handler.close()
