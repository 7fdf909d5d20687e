"""Find out by trial whether an optimizer treats each element by itself, and what it remembers.

No list of names could be complete: users write optimizers, too. Torch's own that are known are only
asked what they remember. The others step tensors and parts of them side by side. What they look at
beyond an element may be rare: dimensions that only the weights of convolutions have, gradients that
are orthogonal to the parameter (as AdamP does), zeros, a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

Maker = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]

# What is tried first, and shows what is kept for a parameter.
_SHAPE = (4, 6)
# Rows and columns from which on Adafactor-like ones treat them as such.
_LARGE = (130, 129)
# Of a bias, and of convolutions over one to three dimensions.
_SHAPES = [(24,), (4, 3, 4), (4, 3, 2, 5), (3, 2, 2, 3, 2)]
# Largest gradients in them: an optimizer that clips its gradients does so above some norm.
_LARGEST, _LARGEST_16_BITS = 1e5, 50.0
_STEPS = 3

# Of torch: each element by itself, whatever the settings.
ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


@dataclass(frozen=True)
class StateKind:
    """What an optimizer keeps under one key for each parameter.

    Attributes:
        dtype: of the tensor, float64 for numbers of Python.
        per_element: whether it has the parameter's shape.
        number: the type of a number of Python, None for tensors.
        shape: of a tensor that has not the parameter's shape.
    """

    dtype: torch.dtype
    per_element: bool
    number: type | None = None
    shape: tuple[int, ...] = ()

    @property
    def is_number(self) -> bool:
        """Whether it is one number for the whole parameter."""
        return not self.per_element and math.prod(self.shape) == 1


def find_state(
    make: Maker, dtype: torch.dtype, name: str, known: bool = False
) -> dict[str, StateKind]:
    """Return what an optimizer remembers, by key, if it can be given parts of parameters.

    Not collective.

    Args:
        make: returns an optimizer for some tensors.
        dtype: of the parameters.
        name: of the optimizer, for errors.
        known: that it treats each element by itself: it is not tried whether it does.

    Raises:
        TypeError: it does not treat each element by itself.
    """
    # Whatever the dtype is, so that small differences show.
    exact = torch.complex128 if dtype.is_complex else torch.float64
    largest = largest_of(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            state, alike = _try(make, dtype, [_SHAPE], rising(40.0))
            alike = known or (
                alike
                and _try(make, dtype, [_LARGE], rising(largest))[1]
                and all(
                    _try(make, exact, [_SHAPE, *_SHAPES], gradients)[1]
                    for gradients in (rising(1.0), _orthogonal, zeros, one_nan)
                )
            )
    except Exception as error:
        raise TypeError(
            f"NodeOptimizer steps parts of parameters, which {name} does not: {error}"
        ) from error
    if not alike:
        raise TypeError(
            f"NodeOptimizer steps parts of parameters, and {name} is not elementwise: with these "
            f"settings a part of a parameter steps otherwise than in the whole. If that is wrong, "
            f"say elementwise=True"
        )
    kinds = kinds_of(state, _SHAPE, name)
    for key, kind in kinds.items():
        if not kind.per_element and not kind.is_number:
            raise TypeError(
                f"NodeOptimizer cannot divide what {name} keeps as {key!r}, a tensor of shape "
                f"{kind.shape} for a parameter of shape {_SHAPE}"
            )
    return kinds


def kinds_of(
    state: Mapping[str, object], shape: tuple[int, ...], name: str
) -> dict[str, StateKind]:
    """Return what an optimizer keeps for a parameter, by key. Not collective.

    Args:
        state: that it keeps.
        shape: of the parameter.
        name: of the optimizer, for errors.

    Raises:
        TypeError: it keeps what is neither a number nor a tensor.
    """
    kinds = {}
    for key, value in state.items():
        if isinstance(value, bool | int | float):
            kinds[key] = StateKind(torch.float64, False, type(value))
        elif isinstance(value, torch.Tensor) and value.shape == shape:
            kinds[key] = StateKind(value.dtype, True)
        elif isinstance(value, torch.Tensor):
            kinds[key] = StateKind(value.dtype, False, None, tuple(value.shape))
        elif value is not None:
            raise TypeError(
                f"NodeOptimizer cannot share what {name} keeps as {key!r}: {type(value).__name__}"
            )
    return kinds


# Gradients, from the numbers from -1 to 1 that the parameter has.
Gradients = Callable[[torch.Tensor], torch.Tensor]


def largest_of(dtype: torch.dtype) -> float:
    """Return how large gradients of a dtype get in trials. Not collective."""
    return _LARGEST_16_BITS if dtype.itemsize == 2 else _LARGEST


def rising(largest: float) -> Gradients:
    """Return gradients from small to large, of both signs, each element its own. Not collective."""
    return lambda numbers: numbers.pow(3) * largest


def _orthogonal(numbers: torch.Tensor) -> torch.Tensor:
    """Orthogonal to the parameter in each pair of elements, and so in rows, too."""
    first, second = numbers.view(-1, 2).unbind(1)
    return torch.stack([-second, first], 1).flatten()


def zeros(numbers: torch.Tensor) -> torch.Tensor:
    """Return zeros. Not collective."""
    return torch.zeros_like(numbers)


def one_nan(numbers: torch.Tensor) -> torch.Tensor:
    """Return the numbers, but one. Not collective."""
    gradients = numbers.clone()
    gradients[3] = torch.nan
    return gradients


def _try(
    make: Maker, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]], gradients_of: Gradients
) -> tuple[dict[str, object], bool]:
    """Step tensors of these shapes, and their parts.

    Returns:
        what the optimizer keeps of the first whole, and whether all parts have become what the
        wholes have.
    """
    starts, wholes, given = [], [], []
    beginnings: list[tuple[torch.Tensor, torch.Tensor]] = []
    ends: list[tuple[torch.Tensor, torch.Tensor]] = []
    parts = []
    for shape in shapes:
        numbers = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64, device="cpu")
        start, gradients = numbers.to(dtype), gradients_of(numbers).to(dtype)
        starts.append(start)
        wholes.append(start.clone().view(shape))
        given.append(gradients)
        places = [0, start.numel() // 5 + 1, start.numel() * 7 // 10 + 1, start.numel()]
        own = [start[low:high].clone() for low, high in pairwise(places)]
        pairs = list(zip(own, [gradients[low:high] for low, high in pairwise(places)], strict=True))
        beginnings += pairs[:2]
        ends += pairs[2:]
        parts.append(own)
    optimizer = trained(make, wholes, given)
    # By two optimizers, so neither knows all of it.
    for half in (beginnings, ends):
        trained(make, *zip(*half, strict=True))
    alike = all(
        have_moved_alike(start, whole.flatten(), torch.cat(own))
        for start, whole, own in zip(starts, wholes, parts, strict=True)
    )
    return optimizer.state[wholes[0]], alike


def have_moved_alike(start: torch.Tensor, whole: torch.Tensor, parts: torch.Tensor) -> bool:
    """Return whether a tensor that was stepped in two ways has become the same. Not collective."""
    if start.dtype in (torch.float64, torch.complex128):
        # Not to the last place: the optimizer may compute in float32.
        update = whole - start
        largest = update.abs().nan_to_num(0).max().item()
        return torch.allclose(update, parts - start, rtol=1e-4, atol=1e-4 * largest, equal_nan=True)
    tolerance = 1e-2 if start.dtype.itemsize == 2 else 1e-5
    return torch.allclose(whole, parts, rtol=tolerance, atol=tolerance, equal_nan=True)


def trained(
    make: Maker, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> torch.optim.Optimizer:
    """Return an optimizer that has stepped tensors some times, each with another gradient.

    Not collective.
    """
    optimizer = make(tensors)
    for step in range(_STEPS):
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = (gradient * (1 + step)).view(tensor.shape)
        optimizer.step()
    return optimizer
