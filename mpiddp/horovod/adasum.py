"""Adasum: add gradients so that what they agree on is not counted twice.

The rule for two vectors a and b, and its use in pairs, pairs of pairs and so on, are from Maleki
et al., "Scaling Distributed Training with Adaptive Summation" (2020):
(1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b. Equal vectors give their mean, orthogonal ones
their sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mpiddp.process_group.group import ProcessGroup

__all__ = ["adasum", "combine", "is_power_of_two"]

_TAG = 1


def is_power_of_two(number: int) -> bool:
    """Return whether `number` is 1, 2, 4, ... Not collective."""
    return number > 0 and number & (number - 1) == 0


def combine(lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """Return the adaptive sum of two vectors. Not collective.

    The dot products are computed in float64. A vector of zeros adds nothing.
    """
    first, second = lower.double(), upper.double()
    dot = torch.dot(first, second)
    squares = torch.stack([torch.dot(first, first), torch.dot(second, second)])
    # Where a vector is zero, so is the dot product.
    factors = 1.0 - dot / (2.0 * torch.where(squares > 0, squares, torch.ones_like(squares)))
    return (first * factors[0] + second * factors[1]).to(lower.dtype)


def adasum(group: ProcessGroup, tensor: torch.Tensor) -> None:
    """Replace a tensor by the adaptive sum of all ranks' tensors; all get the same bits.

    Collective, and complete when it returns. In each round a rank exchanges its whole vector with
    the rank whose number differs in one bit.

    Args:
        group: of a power of two of ranks.
        tensor: of floats; 16-bit ones are added in float32 and rounded once.
    """
    wide = torch.promote_types(tensor.dtype, torch.float32)
    vector = tensor.detach().reshape(-1).to(wide, copy=True)
    rank, distance = group.rank(), 1
    while distance < group.size():
        other = torch.empty_like(vector)
        partner = rank ^ distance
        sent = group.send([vector], partner, _TAG)
        group.recv([other], partner, _TAG).wait()
        sent.wait()
        vector = combine(vector, other) if rank < partner else combine(other, vector)
        distance *= 2
    tensor.detach().copy_(vector.view(tensor.shape))
