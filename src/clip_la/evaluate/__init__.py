"""Evaluators: each is run(bundle) -> metrics."""
