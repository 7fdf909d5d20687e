"""Named stretches of a program, for whoever traces it: a trace of mpiddp, or torch's profiler.

They cost a comparison while nobody does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from mpiddp.torch_internals.profiling import is_profiling

__all__ = ["region", "tell"]

# Told of each region that has ended: its name, when it began and when it ended, in seconds on the
# monotonic clock.
Listener = Callable[[str, float, float], None]

_listener: Listener | None = None


def tell(listener: Listener | None) -> None:
    """Tell `listener` of each region that ends from now on; None: nobody. Not collective."""
    global _listener
    _listener = listener


@contextlib.contextmanager
def region(name: str) -> Iterator[None]:
    """Let traces see what runs within. Not collective.

    Args:
        name: such as "checkpoint"; torch's profiler sees it as "mpiddp:checkpoint".
    """
    with torch.profiler.record_function(f"mpiddp:{name}") if is_profiling() else _NOTHING:
        if _listener is None:
            yield
            return
        began = time.monotonic()
        try:
            yield
        finally:
            if _listener is not None:
                _listener(name, began, time.monotonic())


_NOTHING = contextlib.nullcontext()
