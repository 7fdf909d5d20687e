"""Find out by trial whether an optimizer treats each element by itself, and what it remembers.

No list of names could be complete: users write optimizers, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Maker = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]

# A tensor of two dimensions, whose rows and columns an optimizer might treat as such.
_SHAPE = (4, 6)
# Where it is cut. The parts are stepped by two optimizers, so neither knows all of it.
_FIRST, _SECOND = 5, 17
_STEPS = 3


@dataclass(frozen=True)
class StateKind:
    """What an optimizer keeps under one key for each parameter.

    Attributes:
        dtype: of the tensor, float64 for numbers of Python.
        per_element: whether it has the parameter's shape; otherwise it is one number.
        number: the type of a number of Python, None for tensors.
        shape: of a tensor with one element.
    """

    dtype: torch.dtype
    per_element: bool
    number: type | None = None
    shape: tuple[int, ...] = ()


def find_state(make: Maker, dtype: torch.dtype, name: str) -> dict[str, StateKind]:
    """Return what an optimizer remembers, by key, if it can be given parts of parameters.

    Not collective.

    Args:
        make: returns an optimizer for some tensors.
        dtype: of the parameters.
        name: of the optimizer, for errors.

    Raises:
        TypeError: it does not treat each element by itself.
    """
    start = torch.linspace(-1, 1, 24, dtype=torch.float64).to(dtype)
    whole = start.clone().view(_SHAPE)
    parts = [start[:_FIRST].clone(), start[_FIRST:_SECOND].clone(), start[_SECOND:].clone()]
    try:
        with torch.random.fork_rng(devices=[]):
            optimizer = _trained(make, [whole], [0])
            _trained(make, parts[:2], [0, _FIRST])
            _trained(make, parts[2:], [_SECOND])
    except Exception as error:
        raise TypeError(
            f"NodeOptimizer steps parts of parameters, which {name} does not: {error}"
        ) from error
    tolerance = 1e-12 if dtype in (torch.float64, torch.complex128) else 1e-5
    if dtype.itemsize == 2:
        tolerance = 1e-2
    if not torch.allclose(whole.flatten(), torch.cat(parts), rtol=tolerance, atol=tolerance):
        raise TypeError(
            f"NodeOptimizer steps parts of parameters, and {name} is not elementwise: with these "
            f"settings a part of a parameter steps otherwise than in the whole"
        )
    kinds = {}
    for key, value in optimizer.state[whole].items():
        kind = _kind_of(value)
        if kind is None:
            raise TypeError(
                f"NodeOptimizer cannot divide what {name} keeps as {key!r}: {type(value).__name__}"
            )
        if value is not None:
            kinds[key] = kind
    return kinds


def _trained(
    make: Maker, tensors: Sequence[torch.Tensor], firsts: Sequence[int]
) -> torch.optim.Optimizer:
    """Return an optimizer that has stepped tensors; each begins with element number `first`."""
    optimizer = make(tensors)
    for step in range(_STEPS):
        for tensor, first in zip(tensors, firsts, strict=True):
            # Large and small ones, and each element its own.
            numbers = torch.arange(first, first + tensor.numel(), dtype=torch.float64)
            gradient = (numbers - 8).pow(3) / 100 + step
            tensor.grad = gradient.to(tensor.dtype).view(tensor.shape)
        optimizer.step()
    return optimizer


def _kind_of(value: object) -> StateKind | None:
    if value is None or isinstance(value, bool | int | float):
        return StateKind(torch.float64, False, type(value))
    if not isinstance(value, torch.Tensor):
        return None
    if value.shape == _SHAPE:
        return StateKind(value.dtype, True)
    if value.numel() == 1:
        return StateKind(value.dtype, False, None, tuple(value.shape))
    return None
