"""What the tests use of torch that has other names in other releases.

Each has its name in torch 2.13 here; mpiddp/torch_internals/versions.py is the same for mpiddp
itself.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def _renamed(module: Any, name: str, older_name: str) -> Any:
    # Not both: torch 2.13 warns at the older names.
    return getattr(module, name if hasattr(module, name) else older_name)


all_gather_single = _renamed(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _renamed(dist, "reduce_scatter_single", "reduce_scatter_tensor")
functional_all_gather_single_autograd = _renamed(
    functional, "all_gather_single_autograd", "all_gather_tensor_autograd"
)
functional_all_gather_single_coalesced = _renamed(
    functional, "all_gather_single_coalesced", "all_gather_into_tensor_coalesced"
)
functional_reduce_scatter_single_autograd = _renamed(
    functional, "reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd"
)
functional_reduce_scatter_single_coalesced = _renamed(
    functional, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
)

_ARGUMENTS = inspect.signature(TorchDDP).parameters

# Torch's class has it since 2.13, and warns at broadcast_buffers since then.
HAS_FORWARD_SYNC_BUFFERS = "forward_sync_buffers" in _ARGUMENTS

# Since torch 2.12 copying buffers in a forward does not spoil the graph of an earlier one.
BUFFERS_KEEP_VERSIONS = (
    "_unsafe_preserve_version_counter" in TorchDDP._sync_buffers.__code__.co_names
)


def for_torch(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for our class as torch's own class takes them."""
    taken = dict(options)
    if not HAS_FORWARD_SYNC_BUFFERS and "forward_sync_buffers" in taken:
        taken["broadcast_buffers"] = taken.pop("forward_sync_buffers")
    for name in ("batched_grad_copy", "lazy_bucket_allocation"):
        if name not in _ARGUMENTS:
            taken.pop(name, None)
    return taken
