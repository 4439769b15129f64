"""`clip-la reproduce`: the paper's three figures in one command."""
