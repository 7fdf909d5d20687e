"""The parameters of an optimizer, and this rank's slices of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.ddp.mean_scaling import gradient_of, set_gradient
from mpiddp.reducer.bucket import view_like

if TYPE_CHECKING:
    from mpiddp.ddp.node_parts import Slice
    from mpiddp.optim.elementwise import StateKind
    from mpiddp.optim.state_memory import StateMemory

NORM_ELEMENTS = 1 << 14


class Member:
    """A parameter of the optimizer, with this rank's slices of it.

    Args:
        index: of the parameter in the reducer.
        tensor: the parameter.
        kinds: what the optimizer keeps for it, by key.
    """

    def __init__(self, index: int, tensor: torch.Tensor, kinds: dict[str, StateKind]) -> None:
        self.index = index
        self.tensor = tensor
        self.kinds = kinds
        self.memory: StateMemory | None = None
        self.own: list[Slice] = []
        self.view = tensor  # of its gradient, when it is known
        self.address = 0
        self.has_gradient = False
        # Whether the user has given it another gradient, and whether it is in its group still.
        self.is_replaced = False
        self.is_present = True

    def bind(self, view: torch.Tensor) -> None:
        """Take where the gradient lies in its bucket. Not collective."""
        self.view = view
        self.address = view.data_ptr()
        self.has_gradient = False

    def take_gradient(self) -> bool:
        """Return whether the parameter has a gradient and had none, or the reverse.

        Not collective.
        """
        gradient = gradient_of(self.tensor) if self.is_present else None
        self.is_replaced = gradient is not None and gradient.data_ptr() != self.address
        had, self.has_gradient = self.has_gradient, gradient is not None
        return had != self.has_gradient

    def put_back(self) -> None:
        """Put a gradient that the user has given where it is stepped. Not collective.

        What is scaled from now on is what is stepped.
        """
        gradient = gradient_of(self.tensor)
        if gradient is not None:
            self.view.copy_(gradient)
            set_gradient(self.tensor, self.view.detach())
        self.is_replaced = False

    def load(self, given: Mapping[str, Any], first: int, name: str) -> dict[str, Any]:
        """Copy the state of the whole parameter into that of the slices. Not collective.

        Args:
            given: by key.
            first: element of the bucket with which the parameter begins.
            name: of the optimizer.

        Returns:
            numbers, and what is None, by key; True for a tensor that is no number.

        Raises:
            RuntimeError: it has a state that the optimizer does not keep, or of another shape.
        """
        loaded: dict[str, Any] = {}
        for key, value in given.items():
            kind = self.kinds.get(key)
            if value is None:
                loaded[key] = None
                continue
            if kind is None:
                raise RuntimeError(
                    f"the state_dict has {key!r}, which {name} does not keep with these settings"
                )
            loaded[key] = True
            if kind.per_element:
                flat = value.new_empty(value.numel())
                view_like(flat, 0, self.tensor).copy_(value)
            elif not kind.is_number:
                if value.shape != kind.shape:
                    raise RuntimeError(
                        f"the state_dict has {key!r} of shape {tuple(value.shape)}, and {name} "
                        f"keeps it in shape {kind.shape}"
                    )
            else:
                loaded[key] = value.item() if isinstance(value, torch.Tensor) else value
                if kind.number is not None:
                    loaded[key] = kind.number(loaded[key])
            for part in self.own:
                assert self.memory is not None
                place = self.memory.of_slices([part], key)
                if kind.per_element:
                    place.copy_(flat[part.start - first : part.stop - first])
                elif not kind.is_number:
                    place.copy_(value)
                else:
                    place.fill_(loaded[key])
        return loaded


def dtype_of_norm(members: Iterable[Member]) -> torch.dtype:
    """Return torch's dtype for a norm of all gradients, but float32 for 16 bits. Not collective.

    Of all parameters, not of a rank's part: the norm is to have the same bits everywhere.
    """
    dtypes = {member.tensor.dtype.to_real() for member in members if member.has_gradient}
    if not dtypes:
        return torch.get_default_dtype()
    dtype = functools.reduce(torch.promote_types, sorted(dtypes, key=str))
    return torch.float32 if dtype.itemsize == 2 else dtype


def norm_of(gradients: Sequence[torch.Tensor], norm_type: float) -> float:
    """Return the norm of all of them as one vector. Not collective."""
    # torch adds up float32 in float32, so of few elements at a time.
    found = [part for each in gradients for part in torch.split(each, NORM_ELEMENTS)]
    norms = [norm.double() for norm in torch._foreach_norm(found, norm_type)] if found else []
    return torch.linalg.vector_norm(torch.stack(norms), norm_type).item() if norms else 0.0
