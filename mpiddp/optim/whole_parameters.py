"""Optimizers that look at whole parameters: one rank of a node steps each of them.

Note [Whole parameters]
~~~~~~~~~~~~~~~~~~~~~~~
Optimizers such as Muon and Adafactor step an element by what the other elements of its parameter
are. They get whole parameters, in their own shapes, and each has one owner in its node. Then all
ranks need the whole means, and parameters are dealt by size, not by who averages them. What the
optimizer keeps may have any shape.

Optimizers that look at several parameters at once, such as LBFGS or one that makes no step if any
gradient is not finite, cannot be divided. A trial finds them: parameters that are stepped together
must become what they become alone. Some do so only beside parameters of their own dtype: torch's
Adafactor takes for all of a group the smallest number of the dtype of the first one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain, permutations
from typing import TYPE_CHECKING

import torch

from mpiddp.ddp.node_parts import Slice
from mpiddp.optim import elementwise

if TYPE_CHECKING:
    from mpiddp.ddp.node_parts import BucketLayout
    from mpiddp.optim.elementwise import Gradients, Maker, StateKind

__all__ = ["deal", "find_state"]

# Largest gradients in the trial of several dtypes, in which settings that follow a dtype show.
_GRADIENTS_OF_DTYPES = (1e-3, 1.0)
# By number of dimensions, of parameters in the trial.
_SHAPES: dict[int, tuple[int, ...]] = {0: (), 1: (24,), 2: (4, 6), 3: (4, 3, 4), 4: (4, 3, 2, 4)}
_LARGE = (130, 129)


def find_state(
    make: Maker,
    parameters: Sequence[torch.Tensor],
    name: str,
    is_elementwise: bool | None = None,
) -> tuple[list[dict[str, StateKind]], bool]:
    """Return what an optimizer remembers of each parameter, and whether it needs it whole.

    Not collective.

    Args:
        make: returns an optimizer for some tensors.
        parameters: of one group.
        name: of the optimizer, for errors.
        is_elementwise: whether it treats each element by itself; None: that is tried.

    Raises:
        TypeError: it looks at several parameters at once, or at the dtypes of others, or cannot
            step these.
    """
    if not is_elementwise and not _ignores_other_dtypes(make, parameters):
        raise TypeError(
            f"NodeOptimizer steps the parameters of a group on several ranks, and {name} steps a "
            f"parameter otherwise if there are others of another dtype before it: give the "
            f"parameters of each dtype a group of their own"
        )
    if is_elementwise is not False:
        try:
            of_dtype = {
                dtype: elementwise.find_state(make, dtype, name, bool(is_elementwise))
                for dtype in {parameter.dtype for parameter in parameters}
            }
        except TypeError:
            if is_elementwise:
                raise
        else:
            return [of_dtype[parameter.dtype] for parameter in parameters], False
    return _find_state_of_wholes(make, parameters, name), True


def _find_state_of_wholes(
    make: Maker, parameters: Sequence[torch.Tensor], name: str
) -> list[dict[str, StateKind]]:
    found: dict[tuple[torch.dtype, torch.Size], dict[str, StateKind]] = {}
    try:
        with torch.random.fork_rng(devices=[]):
            for dtype in {parameter.dtype for parameter in parameters}:
                dimensions = {each.dim() for each in parameters if each.dtype == dtype}
                if not _are_independent(make, dtype, dimensions):
                    raise TypeError("it steps a parameter otherwise if it has others beside it")
            for parameter in parameters:
                kind = parameter.dtype, parameter.shape
                if kind not in found:
                    state = _state_of(make, parameter) if parameter.numel() else {}
                    found[kind] = elementwise.kinds_of(state, parameter.shape, name)
    except Exception as error:
        raise TypeError(
            f"NodeOptimizer steps each parameter on one rank of a node, which {name} does not "
            f"allow: {error}"
        ) from error
    return [found[parameter.dtype, parameter.shape] for parameter in parameters]


def _state_of(make: Maker, parameter: torch.Tensor) -> dict[str, object]:
    tensor = torch.zeros_like(parameter, requires_grad=False)
    tensor.grad = torch.ones_like(tensor)
    optimizer = make([tensor])
    optimizer.step()
    return dict(optimizer.state[tensor])


def _are_independent(make: Maker, dtype: torch.dtype, dimensions: Iterable[int]) -> bool:
    """Return whether parameters that are stepped together become what they become alone."""
    shapes = [_SHAPES.get(number, (2,) * number) for number in sorted(dimensions)]
    shapes += [_LARGE] if 2 in dimensions else []
    exact = torch.complex128 if dtype.is_complex else torch.float64
    return all(
        _have_moved_alike(make, dtype_of_trial, shapes, first, largest)
        for dtype_of_trial, largest in [(dtype, elementwise.largest_of(dtype)), (exact, 1.0)]
        for first in (elementwise.rising(largest), elementwise.zeros, _all_nan)
    )


def _ignores_other_dtypes(make: Maker, parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether parameters become beside those of other dtypes what they become alone."""
    shapes: dict[torch.dtype, tuple[int, ...]] = {}
    for parameter in parameters:
        # Those of most dimensions: what is rare is done with them.
        shape = _SHAPES.get(parameter.dim(), (2,) * parameter.dim())
        if len(shape) >= len(shapes.get(parameter.dtype, ())):
            shapes[parameter.dtype] = shape
    if len(shapes) < 2:
        return True
    try:
        with torch.random.fork_rng(devices=[]):
            return all(
                _is_stepped_alike_after(make, (one, shapes[one]), (two, shapes[two]), largest)
                for one, two in permutations(shapes, 2)
                for largest in _GRADIENTS_OF_DTYPES
            )
    except Exception:
        return True  # the trial that comes next says what is wrong with these


def _is_stepped_alike_after(
    make: Maker,
    other: tuple[torch.dtype, tuple[int, ...]],
    own: tuple[torch.dtype, tuple[int, ...]],
    largest: float,
) -> bool:
    """Return whether a parameter becomes after another one what it becomes alone."""
    starts, gradients = [], []
    for dtype, shape in (other, own):
        numbers = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64, device="cpu")
        starts.append(numbers.to(dtype).view(shape))
        gradients.append(elementwise.rising(largest)(numbers).to(dtype))
    together, alone = [start.clone() for start in starts], starts[1].clone()
    elementwise.trained(make, together, gradients)
    elementwise.trained(make, [alone], gradients[1:])
    return elementwise.have_moved_alike(starts[1], together[1], alone)


def _all_nan(numbers: torch.Tensor) -> torch.Tensor:
    return torch.full_like(numbers, torch.nan)


def _have_moved_alike(
    make: Maker,
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, ...]],
    first: Gradients,
    largest: float,
) -> bool:
    """Step parameters together and alone. The first has other gradients than the rest."""
    starts: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for shape in chain(shapes, shapes):
        numbers = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64, device="cpu")
        how = elementwise.rising(largest) if starts else first
        starts.append(numbers.to(dtype).view(shape))
        gradients.append(how(numbers).to(dtype) * (1 + len(gradients)))
    together = [start.clone() for start in starts]
    elementwise.trained(make, together, gradients)
    for start, moved, gradient in zip(starts, together, gradients, strict=True):
        alone = start.clone()
        elementwise.trained(make, [alone], [gradient])
        if not elementwise.have_moved_alike(start, moved, alone):
            return False
    return True


def deal(
    layouts: Sequence[BucketLayout], indices: Iterable[int], ranks: int, first: int = 0
) -> list[list[Slice]]:
    """Return the parameters as a slice each, dealt to the ranks of a node by size.

    Not collective.

    Args:
        layouts: of all buckets.
        indices: of the parameters.
        ranks: how many the node has.
        first: number of the first slice.

    Returns:
        blocks of one slice each, in the order of the buckets, which is that of the numbers, too.
    """
    wanted = set(indices)
    places = [
        (bucket, layout.starts[index], layout.stop(index), index)
        for bucket, layout in enumerate(layouts)
        for members in layout.neighbours(wanted)
        for index in members
        if layout.sizes[index]
    ]
    loads = [0] * ranks
    owners = {}
    # The largest first, each to who has least.
    for bucket, start, stop, index in sorted(places, key=lambda place: place[1] - place[2]):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += (stop - start) * layouts[bucket].dtype.itemsize
    return [
        [Slice(first + number, index, bucket, start, stop, owners[index])]
        for number, (bucket, start, stop, index) in enumerate(places)
    ]
