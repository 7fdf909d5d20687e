"""What differs between the releases of torch, in the form of torch 2.13."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# In MiB. torch 2.11 refuses buckets of size 0; this is 0 in whole bytes as well.
_BELOW_A_BYTE = 2**-21


class _OlderWrapper(DistributedDataParallel):
    """The wrapper of torch 2.11 and 2.12 with the arguments and attributes of torch 2.13.

    Giving `broadcast_buffers` is no reason to warn here: torch has no other name for it yet.
    """

    batched_grad_copy: bool

    def __init__(
        self,
        module: nn.Module,
        *,
        broadcast_buffers: bool | None = None,
        bucket_cap_mb: float | None = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        **others: Any,
    ) -> None:
        if forward_sync_buffers is None:
            forward_sync_buffers = True if broadcast_buffers is None else broadcast_buffers
        others["broadcast_buffers"] = forward_sync_buffers
        others["bucket_cap_mb"] = _BELOW_A_BYTE if bucket_cap_mb == 0 else bucket_cap_mb
        others["bucket_cap_mb_list"] = [size or _BELOW_A_BYTE for size in bucket_cap_mb_list or ()]
        super().__init__(module, **others)
        self.batched_grad_copy = batched_grad_copy

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether rank 0's buffers are copied to all ranks at each forward."""
        return self.broadcast_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self.broadcast_buffers = value


if (
    TYPE_CHECKING
    or "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
):
    TorchWrapper = DistributedDataParallel
else:
    TorchWrapper = _OlderWrapper


def factor_of(op: dist.ReduceOp) -> Any:
    """Return the factor of a PREMUL_SUM, None where there is only the kind of operation."""
    if type(op) is not dist.ReduceOp:  # isinstance() is true for the kind too
        return None
    # Before torch 2.13 only pickling gets at it.
    return op.factor if hasattr(op, "factor") else op.__getstate__()[1]  # type: ignore[attr-defined]


class _InPlace(int):
    """A rank that keeps its place among others of its kind when sorted."""

    def __lt__(self, other: int) -> bool:
        return False if isinstance(other, _InPlace) else int(self) < other


def new_group_in_order(ranks: Sequence[int], **options: Any) -> Any:
    """Do `dist.new_group`, with its arguments, for ranks in this order. Collective."""
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return dist.new_group(list(ranks), sort_ranks=False, **options)
    # Before torch 2.12 it always sorts them.
    group = dist.new_group([_InPlace(rank) for rank in ranks], **options)
    places = dist.distributed_c10d._world.pg_group_ranks
    places[group] = {int(rank): place for rank, place in places[group].items()}
    return group


# The methods of torch's own class that wrapper.py overrides or calls.
_WRAPPER_METHODS = (
    "_ddp_init_helper",
    "_build_params_for_reducer",
    "_build_debug_param_to_name_mapping",
    "_passing_sync_batchnorm_handle",
)


def check_torch() -> None:
    """Raise ImportError unless torch's wrapper has what wrapper.py builds on.

    Not collective.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise ImportError(f"mpiddp needs torch.distributed, which torch {torch.__version__} lacks")
    wrapper = torch.nn.parallel.DistributedDataParallel
    missing = [name for name in _WRAPPER_METHODS if not hasattr(wrapper, name)]
    if "bucket_cap_mb_list" not in inspect.signature(wrapper.__init__).parameters:
        missing.append("bucket_cap_mb_list")  # torch 2.11 brought it
    if missing:
        raise ImportError(
            f"mpiddp needs torch >= 2.11; torch {torch.__version__} has no "
            f"DistributedDataParallel.{', '.join(missing)}"
        )
