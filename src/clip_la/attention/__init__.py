"""Linear attention on its own: needs torch and nothing else of this package."""
