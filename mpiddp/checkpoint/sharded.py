"""Whether a state is sharded: then torch.distributed.checkpoint writes and reads it."""

from __future__ import annotations

import sys
from typing import Any

from mpiddp.checkpoint.trees import leaves

__all__ = ["is_sharded"]

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
