"""Cluster jobs: the plan before one, the checks at its start, what becomes of it at its end."""
