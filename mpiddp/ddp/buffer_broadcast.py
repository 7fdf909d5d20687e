"""Copying a module's buffers from one rank to all, when they go by messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import _utils as torch_utils
from torch._C._distributed_c10d import BroadcastOptions

from mpiddp import shown_progress


def broadcast_in_buffers(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], buffer_bytes: int, root: int
) -> None:
    """Make `tensors` equal to those of one rank, by messages. Collective.

    As torch's `_broadcast_coalesced`, which never lets go of a group's `Work` in Python, nor of the
    tensors in it: memory would grow with each forward.

    Args:
        group: the ranks.
        tensors: of any dtypes.
        buffer_bytes: of the same dtype go in one message up to this size.
        root: the rank in the group that has the values.
    """
    opts = BroadcastOptions()
    opts.rootRank = root
    opts.asyncOp = False
    utils: Any = torch_utils
    for some in utils._take_tensors(tensors, buffer_bytes):
        flat = utils._flatten_dense_tensors(some)
        group.broadcast([flat], opts).wait()
        for tensor, part in zip(some, utils._unflatten_dense_tensors(flat, some), strict=True):
            tensor.copy_(part)
        shown_progress.advance(flat.nbytes)
