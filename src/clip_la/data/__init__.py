"""Shards and tables of image-text pairs, read into batches."""
