"""What all errors that a person can act on have in common. Imports next to nothing."""

from clip_la.exit_codes import EXIT_FAILED


class ExpectedError(RuntimeError):
    """Something that a person can act on: `clip-la` shows the message alone and ends with `exit_code`."""

    exit_code = EXIT_FAILED
