"""The version of this package; its metadata reads it here."""

__version__ = "0.1.0"
