"""Whether a state is sharded: then torch.distributed.checkpoint writes and reads it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mpiddp.checkpoint.trees import leaves

if TYPE_CHECKING:
    from mpiddp.checkpoint.ranks import Ranks

__all__ = ["dcp_failures", "is_sharded"]

# Who has such a tensor has imported its module; importing it here would cost a second.
_CLASSES = (
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed._shard.sharded_tensor", "ShardedTensor"),
)


def is_sharded(state: Any) -> bool:
    """Return whether a tensor of `state` lies in parts on several ranks. Not collective."""
    classes = tuple(
        getattr(sys.modules[module], name) for module, name in _CLASSES if module in sys.modules
    )
    return any(isinstance(leaf, classes) for leaf in leaves(state))


@contextlib.contextmanager
def dcp_failures(ranks: Ranks, what: str) -> Iterator[None]:
    """Within, raise as `raise_together` does what torch.distributed.checkpoint has gathered.

    Not collective. It raises a BaseException, which a program that catches errors would not catch.

    Args:
        ranks: of the group that is used.
        what: cannot be done, such as "save a checkpoint".

    Raises:
        RuntimeError: another rank has failed.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as failure:
        failed = {rank: error for rank, (error, _) in failure.failures.items()}
        if ranks.rank in failed:
            raise failed[ranks.rank] from None
        rank, error = min(failed.items(), key=lambda item: item[0])
        raise RuntimeError(
            f"{ranks.name(ranks.rank)} cannot {what}: {ranks.name(rank)}: "
            f"{type(error).__name__}: {error}"
        ) from None
