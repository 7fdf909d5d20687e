"""Factors that keep a sum over ranks finite where the mean is."""

__all__ = ["scale_of"]


def scale_of(ranks: int) -> float:
    """Return the largest power of two that makes the sum over so many ranks finite."""
    return 0.5 ** (ranks - 1).bit_length()
