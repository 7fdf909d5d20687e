"""Let processes that a rank starts before it comes to a world be known as its children.

`world.py` does the same when a world begins.
"""

from __future__ import annotations

from mpiddp.engine import forks
from mpiddp.system import rank_signs

__all__ = ["begin"]


def begin(rank: int, world_size: int) -> None:
    """Refuse MPI to processes that this one forks or starts from now on. Not collective.

    Args:
        rank: this process's in the job, for errors.
        world_size: the number of ranks.
    """
    forks.claim(rank, world_size)
    rank_signs.put_up(0, rank, "")
