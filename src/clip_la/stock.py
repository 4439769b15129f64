"""OpenCLIP's own trainer, unmodified, with this package's models registered: python -m clip_la.stock [flags].

It has OpenCLIP's limits (README: "OpenCLIP's own trainer"). With webdataset newer than 0.2.86 it can't
read shards at all; that is refused here, because the trainer would only say KeyError: 'fname'.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.util import find_spec

import clip_la  # noqa: F401 (registers the models)

_NEWEST_WEBDATASET = (0, 2, 86)


def main(argv: list[str]) -> None:
    """Hand the command line to open_clip_train.

    Raises:
        SystemExit: a package that the trainer needs is missing, or too new.
    """
    if find_spec("pandas") is None:
        sys.exit("OpenCLIP's trainer needs pandas: pip install 'clip_la[stock]'")
    installed = tuple(int(part) for part in version("webdataset").split(".")[:3])
    reads_shards = any("webdataset" in argument or ".tar" in argument for argument in argv)
    if reads_shards and installed > _NEWEST_WEBDATASET:
        sys.exit(
            f"OpenCLIP's trainer can't read shards with webdataset {version('webdataset')}; "
            "pip install 'webdataset<=0.2.86', or use clip-la train"
        )
    from open_clip_train.main import main as train

    train(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
