"""`python -m mpiddp --data-parallel`: rank 0 runs the script, the other ranks serve it."""

from __future__ import annotations

import sys
from types import ModuleType

from mpiddp.data_parallel import hub
from mpiddp.runner import torchrun

__all__ = ["serve", "start"]


def start() -> str:
    """Connect the ranks, and replace torch's DataParallel. Collective over MPI.COMM_WORLD.

    Returns:
        What was replaced, in words.
    """
    hub.get(by_value=True)
    torchrun.replace_data_parallel()
    return "torch's DataParallel by mpiddp's; only rank 0 runs the script"


def serve() -> None:
    """Compute for rank 0 until it ends. Of the other ranks; not collective."""
    from mpiddp.data_parallel import serving

    # What the script defines comes from rank 0, and must not meet the runner's own names.
    sys.modules["__main__"] = ModuleType("__main__")
    serving.serve(hub.get())
