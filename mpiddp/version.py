"""The version of mpiddp. A leaf: it imports nothing."""

__version__ = "0.1.0"
