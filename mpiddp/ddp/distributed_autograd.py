"""Refuse backward passes of torch.distributed.autograd, which call no hooks of parameters.

Note [Distributed autograd]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
`torch.distributed.autograd.backward` keeps gradients in its context instead of `.grad` and calls
no post-accumulate hooks, so gradients would silently not be averaged, on any rank. Hooks of the
module's outputs do run in it, and recognise it: on the CPU its own loop runs the graph and sets no
current node; the threads of other devices execute no node that accumulates a gradient. Outputs get
such a hook only if torch's RPC is set up: without it there is no distributed autograd.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed.rpc as rpc

from mpiddp.reducer.backward_kinds import accumulates

if rpc.is_available():
    from torch._C._distributed_rpc import _is_current_rpc_agent_set


def may_be_used() -> bool:
    """Return whether there may be distributed backward passes. Not collective."""
    return rpc.is_available() and _is_current_rpc_agent_set()


def watch(outputs: Iterable[torch.Tensor], parameters: Sequence[torch.Tensor], rank: int) -> None:
    """Have distributed backward passes that begin at `outputs` raise. Not collective.

    Args:
        outputs: of the wrapped module.
        parameters: whose gradients are to be averaged.
        rank: for the error.
    """
    hook = _refusal(parameters, rank)
    for output in outputs:
        if output.grad_fn is not None:
            output.register_hook(hook)  # type: ignore[no-untyped-call]


def _refusal(parameters: Sequence[torch.Tensor], rank: int) -> Callable[[torch.Tensor], None]:
    def refuse(gradient: torch.Tensor) -> None:
        if not _is_distributed(gradient, parameters):
            return
        message = (
            f"rank {rank}: torch.distributed.autograd.backward was called for the output of an "
            f"mpiddp.DistributedDataParallel module. It calls no hooks of parameters, so that "
            f"their gradients would not be averaged. Call loss.backward(), or run the module's "
            f"forward inside of `with model.no_sync():` and all-reduce the gradients of the "
            f"context."
        )
        # torch's engine reduces an error from Python to the text "python_error".
        print(message, file=sys.stderr, flush=True)
        raise RuntimeError(message)

    return refuse


def _is_distributed(gradient: torch.Tensor, parameters: Sequence[torch.Tensor]) -> bool:
    if torch._C._current_autograd_node() is None:
        return True
    return gradient.device.type != "cpu" and not any(map(accumulates, parameters))
