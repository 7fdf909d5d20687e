"""A first step in portions, so that what an optimizer makes new is not there twice.

In its first step an optimizer makes a state for each tensor, in memory of its own, from where it
goes into the memory that the ranks share. torch's optimizers that treat each element by itself do
the same if they step some tensors after the others; so each portion's state has gone before the
next.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch

from mpiddp.optim.elementwise import ELEMENTWISE
from mpiddp.system import freed_memory

__all__ = ["in_portions"]

PORTION_BYTES = 32 << 20


def in_portions(
    optimizer_class: type[Any],
    groups: Sequence[dict[str, Any]],
    states: Container[torch.Tensor],
    step: Callable[[], Any],
    keep: Callable[[], None],
) -> Any:
    """Call a step, and again for each portion of tensors that have no state. Not collective.

    Args:
        optimizer_class: of the step.
        groups: what it reads its tensors from.
        states: has the tensors that have one.
        step: makes it.
        keep: moves what is new away.

    Returns:
        What the first call returns.
    """
    whole = [group["params"] for group in groups]
    if optimizer_class not in ELEMENTWISE or all(p in states for some in whole for p in some):
        return step()
    results = []
    try:
        for portion in _portions(whole, states):
            for group, params in zip(groups, portion, strict=True):
                group["params"] = params
            results.append(step())
            keep()
            freed_memory.give_back()
    finally:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params
    return results[0] if results else None


def _portions(
    whole: Sequence[list[torch.Tensor]], states: Container[torch.Tensor]
) -> Iterator[list[list[torch.Tensor]]]:
    """Yield the tensors of each group, some at a time."""
    portion: list[list[torch.Tensor]] = [[] for _ in whole]
    size = 0
    for number, params in enumerate(whole):
        for tensor in params:
            portion[number].append(tensor)
            size += 0 if tensor in states else tensor.nbytes
            if size >= PORTION_BYTES:
                yield portion
                portion, size = [[] for _ in whole], 0
    if any(portion):
        yield portion
