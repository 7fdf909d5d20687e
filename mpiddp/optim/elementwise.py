"""Find out by trial whether an optimizer treats each element by itself, and what it remembers.

No list of names could be complete: users write optimizers, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Maker = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]

# Tensors of two dimensions, whose rows and columns an optimizer might treat as such: Adafactor-like
# ones do so from a size on (128).
_SHAPE = (4, 6)
_LARGE = (130, 129)
# Largest gradients in them: an optimizer that clips its gradients does so above some norm.
_LARGEST, _LARGEST_16_BITS = 1e5, 50.0
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
    largest = _LARGEST_16_BITS if dtype.itemsize == 2 else _LARGEST
    try:
        with torch.random.fork_rng(devices=[]):
            state, alike = _try(make, dtype, _SHAPE, 40.0)
            alike = alike and _try(make, dtype, _LARGE, largest)[1]
    except Exception as error:
        raise TypeError(
            f"NodeOptimizer steps parts of parameters, which {name} does not: {error}"
        ) from error
    if not alike:
        raise TypeError(
            f"NodeOptimizer steps parts of parameters, and {name} is not elementwise: with these "
            f"settings a part of a parameter steps otherwise than in the whole"
        )
    kinds = {}
    for key, value in state.items():
        kind = _kind_of(value)
        if kind is None:
            raise TypeError(
                f"NodeOptimizer cannot divide what {name} keeps as {key!r}: {type(value).__name__}"
            )
        if value is not None:
            kinds[key] = kind
    return kinds


def _try(
    make: Maker, dtype: torch.dtype, shape: tuple[int, int], largest: float
) -> tuple[dict[str, object], bool]:
    """Step a tensor of this shape, and its parts.

    Returns:
        what the optimizer keeps of the whole, and whether the parts have become what it has.
    """
    numbers = torch.linspace(-1, 1, shape[0] * shape[1], dtype=torch.float64)
    start = numbers.to(dtype)
    whole = start.clone().view(shape)
    first, second = start.numel() // 5 + 1, start.numel() * 7 // 10 + 1
    parts = [start[:first].clone(), start[first:second].clone(), start[second:].clone()]
    # From small to large, of both signs, and each element its own.
    gradients = (numbers.pow(3) * largest).to(dtype)
    optimizer = _trained(make, [whole], [gradients])
    # By two optimizers, so neither knows all of it.
    _trained(make, parts[:2], [gradients[:first], gradients[first:second]])
    _trained(make, parts[2:], [gradients[second:]])
    tolerance = 1e-12 if dtype in (torch.float64, torch.complex128) else 1e-5
    if dtype.itemsize == 2:
        tolerance = 1e-2
    joined = torch.cat(parts)
    alike = torch.allclose(whole.flatten(), joined, rtol=tolerance, atol=tolerance, equal_nan=True)
    return optimizer.state[whole], alike


def _trained(
    make: Maker, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> torch.optim.Optimizer:
    """Return an optimizer that has stepped tensors some times, each with another gradient."""
    optimizer = make(tensors)
    for step in range(_STEPS):
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = (gradient + step).view(tensor.shape)
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
