"""Give memory that was freed back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

__all__ = ["give_back"]


def give_back() -> None:
    """Let the system have what the C library keeps of freed memory, where that can. Not collective.

    Once a program has freed a large tensor, glibc takes memory for tensors up to that size, at most
    32 MiB, from its heap (mallopt(3), M_MMAP_THRESHOLD). Before release 2.38 it seldom uses aligned
    memory of there again (sourceware's bug 14581). Other C libraries have no such function.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], object] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
