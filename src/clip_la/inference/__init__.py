"""Trained models at work on a person's own pictures and texts."""
