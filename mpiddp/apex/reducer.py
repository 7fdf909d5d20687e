"""Apex's Reducer: average the gradients of a module, or a list of tensors, when asked to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import _utils as torch_utils

from mpiddp.ddp.buffer_broadcast import broadcast_in_buffers

__all__ = ["Reducer"]

# Bytes of a message.
_MESSAGE = 25 * 2**20


class Reducer:
    """Average gradients over all ranks at each `reduce`, instead of during backward.

    Collective if a module is given: all ranks then start from rank 0's parameters.

    Args:
        module_or_grads_list: a module; or gradients, in iterables nested as you like.
    """

    # Where users import it from: pickles hold this name, and survive when the file moves.
    __module__ = "mpiddp.apex"

    def __init__(self, module_or_grads_list: torch.nn.Module | Iterable[Any]) -> None:
        self.module: torch.nn.Module | None = None
        self.grads: list[torch.Tensor] = []
        if isinstance(module_or_grads_list, torch.nn.Module):
            self.module = module_or_grads_list
            for same in _alike(parameter.detach() for parameter in self.module.parameters()):
                with torch.no_grad():
                    broadcast_in_buffers(_world(), same, _MESSAGE, 0)
        else:
            self.grads = list(_tensors(module_or_grads_list))

    def reduce(self) -> None:
        """Replace the gradients by their means over the ranks. Collective.

        Those that are None are left out.

        Raises:
            RuntimeError: the ranks have different gradients; on all ranks.
        """
        grads = self.grads
        if self.module is not None:
            parameters = self.module.parameters()
            grads = [one.grad for one in parameters if one.grad is not None]
        _check_sizes(grads)
        utils: Any = torch_utils
        with torch.no_grad():
            for same in _alike(grads):
                flat = utils._flatten_dense_tensors(same)
                dist.all_reduce(flat)
                flat.div_(dist.get_world_size())
                for grad, mean in zip(
                    same, utils._unflatten_dense_tensors(flat, same), strict=True
                ):
                    grad.copy_(mean)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no process group; call mpiddp.init_process_group() first")
    return group


def _tensors(nested: Any) -> Iterable[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, Iterable):
        for one in nested:
            yield from _tensors(one)


def _alike(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors, together where they have the same dtype and device."""
    found: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(found.values())


def _check_sizes(tensors: list[torch.Tensor]) -> None:
    """Raise on all ranks unless they have as many gradients, of as many elements. Collective."""
    counts = [len(tensors), sum(tensor.numel() for tensor in tensors)]
    device = tensors[0].device if tensors else None
    # The largest, and the opposite of the smallest.
    extremes = torch.tensor(counts + [-count for count in counts], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    most, least = extremes[:2].tolist(), (-extremes[2:]).tolist()
    if most != least:
        raise RuntimeError(
            f"rank {dist.get_rank()} reduces {counts[0]} gradients with {counts[1]} elements, but "
            f"other ranks reduce {least[0]} to {most[0]} gradients with {least[1]} to {most[1]} "
            f"elements"
        )
