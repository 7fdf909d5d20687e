"""The parameters of an optimizer, and what its part on this rank sees of them: slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.reducer.bucket import view_like

if TYPE_CHECKING:
    from mpiddp.ddp.node_parts import Slice
    from mpiddp.optim.elementwise import StateKind
    from mpiddp.optim.state_memory import StateMemory


class OwnSlice:
    """A slice that this rank steps.

    Args:
        part: which elements they are.
        flat: the parameters of its bucket.
    """

    def __init__(self, part: Slice, flat: torch.Tensor) -> None:
        self.part = part
        self.tensor = flat[part.start : part.stop].detach()
        self.gradient: torch.Tensor | None = None
        # Where the optimizer's state lies, by key.
        self.state: dict[str, torch.Tensor] = {}


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
        self.own: list[OwnSlice] = []
        self.view = tensor  # of its gradient, when it is known
        self.address = 0
        self.has_gradient = False

    def bind(self, view: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """Give the slices the memory of their gradients. Not collective.

        Args:
            view: where the parameter's gradient lies in its bucket.
            gradients: of each bucket.
        """
        self.view = view
        self.address = view.data_ptr()
        self.has_gradient = False
        for piece in self.own:
            piece.gradient = gradients[piece.part.bucket][piece.part.start : piece.part.stop]
        self.show_gradient()

    def take_gradient(self) -> None:
        """Let the slices have a gradient if the parameter has one. Not collective."""
        gradient = self.tensor.grad
        if gradient is not None and gradient.data_ptr() != self.address:
            # The user has replaced it; what is scaled from now on is what is stepped.
            self.view.copy_(gradient)
            self.tensor.grad = self.view.detach()
        if self.has_gradient != (gradient is not None):
            self.has_gradient = gradient is not None
            self.show_gradient()

    def show_gradient(self) -> None:
        """Let the optimizer of the slices see their gradients, or none. Not collective."""
        for piece in self.own:
            piece.tensor.grad = piece.gradient if self.has_gradient else None

    def keep_state(self, states: Mapping[torch.Tensor, dict[str, Any]], name: str) -> None:
        """Move what an optimizer has made new into its place. Not collective.

        Args:
            states: of the optimizer, by slice.
            name: of the optimizer.

        Raises:
            RuntimeError: it keeps something that it did not when it was tried.
        """
        for piece in self.own:
            if piece.tensor not in states:
                continue
            state, places = states[piece.tensor], piece.state
            for key, value in state.items():
                place = places.get(key)
                if value is place or value is None:
                    continue
                if place is None:
                    raise RuntimeError(
                        f"{name} keeps {key!r} by now, which it did not when this NodeOptimizer "
                        f"was made: make it with the settings that need it"
                    )
                if isinstance(value, torch.Tensor):
                    place.copy_(value)
                    state[key] = place
                else:
                    place.fill_(value)

    def load(self, given: Mapping[str, Any], first: int, name: str) -> list[dict[str, Any]]:
        """Copy the state of the whole parameter into that of the slices; return it for each.

        Not collective.

        Args:
            given: by key.
            first: element of the bucket with which the parameter begins.
            name: of the optimizer.

        Raises:
            RuntimeError: it has a state that the optimizer does not keep.
        """
        states: list[dict[str, Any]] = [{} for _ in self.own]
        for key, value in given.items():
            kind = self.kinds.get(key)
            if kind is None and value is not None:
                raise RuntimeError(
                    f"the state_dict has {key!r}, which {name} does not keep with these settings"
                )
            flat = value
            if kind is not None and kind.per_element:
                flat = value.new_empty(value.numel())
                view_like(flat, 0, self.tensor).copy_(value)
            for piece, state in zip(self.own, states, strict=True):
                if kind is None or value is None:
                    state[key] = None
                    continue
                place = piece.state[key]
                if kind.per_element:
                    place.copy_(flat[piece.part.start - first : piece.part.stop - first])
                elif isinstance(value, torch.Tensor):
                    place.copy_(value.view(place.shape))
                else:
                    place.fill_(value)
                state[key] = place if kind.number is None else kind.number(place.item())
        return states
