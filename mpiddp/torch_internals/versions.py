"""What differs between the releases of torch, in the form of torch 2.15."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpiddp.version import __version__

# The releases between which all is tested, see docs/reference/supported.md. `.ci/run` reads them.
OLDEST_TESTED = "2.11.0"
NEWEST_TESTED = "2.15.0"

# In MiB. torch 2.11 refuses buckets of size 0; this is 0 in whole bytes as well.
_BELOW_A_BYTE = 2**-21


class _Before215(DistributedDataParallel):
    """The wrapper of torch 2.11 to 2.14 with what torch 2.15 has brought."""

    reducer: Any
    lazy_bucket_allocation = False
    _require_manual_backward_finalization = False

    def __init__(
        self, module: nn.Module, *, lazy_bucket_allocation: bool = False, **others: Any
    ) -> None:
        # torch's constructor builds the reducer, and comes before that with nn.Module's own.
        object.__setattr__(self, "lazy_bucket_allocation", lazy_bucket_allocation)
        super().__init__(module, **others)
        self._require_manual_backward_finalization = False

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether each backward ends when `finalize_backward` is called. Not collective.

        Raises:
            RuntimeError: set between a forward and the end of its backward, or where all
                parameters are delayed.
        """
        return self._require_manual_backward_finalization

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self._refuse_delayed()
        if not self._delay_all_reduce_all_params:
            self.reducer._set_manual_finalization_required(required)
            self._require_manual_backward_finalization = required

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` must wait until backward has returned. Not collective."""
        return self._require_manual_backward_finalization and (
            self.mixed_precision is not None or self.reducer._should_finalize_after_backward()
        )

    def finalize_backward(self) -> None:
        """Wait for the means and write them. Collective.

        Raises:
            RuntimeError: it is not wanted, some gradient is missing, or there is no reduction.
        """
        self._refuse_delayed()
        self.reducer._finalize_backward_manual()

    def _refuse_delayed(self) -> None:
        if self._delay_all_reduce_all_params:
            raise RuntimeError(
                "there is no end of backward to finalize by hand where all parameters are in "
                "delay_all_reduce_named_params"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._require_manual_backward_finalization:
            self.require_manual_backward_finalization = True


class _Before213(_Before215):
    """The wrapper of torch 2.11 and 2.12 with the arguments and attributes of later ones.

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


_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters

if TYPE_CHECKING or "lazy_bucket_allocation" in _ARGUMENTS:
    TorchWrapper = DistributedDataParallel
elif "forward_sync_buffers" in _ARGUMENTS:
    TorchWrapper = _Before215
else:
    TorchWrapper = _Before213


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


def declare_self_recording(backend: str) -> None:
    """Tell torch that groups of this backend record what they do. Not collective.

    torch 2.15 attaches its flight recorder to all others, and asks them in C++ for a name that a
    group in Python does not have.
    """
    names = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if names is not None:
        names.add(backend)


@functools.cache  # once a process, also where filters of warnings change
def warn_of_newer_torch() -> None:
    """Warn if this torch is newer than the newest that mpiddp is tested with. Not collective."""
    if release_of(torch.__version__) > release_of(NEWEST_TESTED):
        warnings.warn(
            f"mpiddp {__version__} is tested with torch up to {NEWEST_TESTED}, and this is torch "
            f"{torch.__version__}: if something of torch's own has changed there, mpiddp may fail",
            stacklevel=2,
        )


def release_of(version: str) -> tuple[int, ...]:
    """Return (2, 15, 0) for "2.15.0+cpu" or "2.15.0a0". Not collective."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


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
