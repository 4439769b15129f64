"""Exit codes of `clip-la`, for scripts and batch files to act on. Imports nothing."""

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NON_FINITE = 3
EXIT_PEER_FAILED = 4  # another rank failed or is gone
EXIT_STOPPED = 75  # EX_TEMPFAIL: the checkpoint is saved, the same command continues
