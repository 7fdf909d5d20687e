"""What a rank's optimizer steps: blocks of neighbouring parameters, as one tensor each.

Note [Slices in blocks]
~~~~~~~~~~~~~~~~~~~~~~~
An optimizer of torch that is not fused passes over a tensor about ten times. On a CPU that is
bound by memory, unless what it passes over stays in the cache. And each tensor costs some dozens of
microseconds, however small it is, as biases are. So neighbours are stepped as one tensor, and
blocks are no longer than BLOCK_BYTES; the optimizer takes one after the other. Fused optimizers
pass once, and `foreach` ones pass over all tensors in each operation: both get long blocks.

A parameter without a gradient is not stepped. Where some have one and others do not, a block is
divided for good: its parts have made different numbers of steps from then on.

What is stepped whole, see Note [Whole parameters], is a block of its own, in its own shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.reducer.bucket import view_like

if TYPE_CHECKING:
    from mpiddp.ddp.node_parts import Slice
    from mpiddp.optim.members import Member
    from mpiddp.optim.state_memory import StateMemory

BLOCK_BYTES = 1 << 19

States = MutableMapping[torch.Tensor, dict[str, Any]]


class Block:
    """Neighbouring slices that this rank steps as one tensor.

    Args:
        slices: in order, with the parameter of each.
        flat: the parameters of their bucket.
        memory: of the optimizer's state; None if it has none.
        whole: whether it is one parameter, in its own shape.
    """

    def __init__(
        self,
        slices: Sequence[tuple[Slice, Member]],
        flat: torch.Tensor,
        memory: StateMemory | None,
        whole: bool = False,
    ) -> None:
        self.slices = slices
        self._shaped_like = slices[0][1].tensor if whole else None
        self._flat = flat
        self._memory = memory
        parts = [part for part, _ in slices]
        self.bucket = parts[0].bucket
        self.start, self.stop = parts[0].start, parts[-1].stop
        self.tensor = self._in_shape(flat[self.start : self.stop]).detach()
        # In one dimension.
        self.gradient: torch.Tensor | None = None
        self._shown: torch.Tensor | None = None
        self._places: dict[str, torch.Tensor] = {}
        # Each slice's own number, beside the first one's, which the optimizer has.
        self._copies: dict[str, torch.Tensor] = {}
        for key, kind in slices[0][1].kinds.items():
            assert memory is not None
            place = memory.of_slices(parts, key)
            self._places[key] = self._in_shape(place) if kind.per_element else place
            if not kind.per_element and len(parts) > 1:
                self._copies[key] = memory.numbers(parts, key)[1:]

    def _in_shape(self, flat: torch.Tensor) -> torch.Tensor:
        return flat if self._shaped_like is None else view_like(flat, 0, self._shaped_like)

    @property
    def has_gradient(self) -> bool:
        """Whether it is stepped."""
        return self.slices[0][1].has_gradient

    def bind(self, gradients: Sequence[torch.Tensor]) -> None:
        """Take where the gradient lies. Not collective.

        Args:
            gradients: of each bucket.
        """
        self.gradient = gradients[self.bucket][self.start : self.stop]

    def show_gradient(self) -> None:
        """Let the optimizer see the gradient, or none. Not collective."""
        self._shown = None
        if self.has_gradient and self.gradient is not None:
            self._shown = self._in_shape(self.gradient)
        self.tensor.grad = self._shown

    def restore_gradient(self) -> None:
        """Show the gradient again if the optimizer has put another in its place.

        Not collective.
        """
        if self.tensor.grad is not self._shown:
            self.tensor.grad = self._shown

    def divided(self, kind_of: Callable[[Member], object], states: States) -> list[Block]:
        """Return blocks of parameters that are of one kind: this one, or parts of it.

        Not collective.

        Args:
            kind_of: returns the kind of a parameter.
            states: of the optimizer; the parts get what this block has.
        """
        runs = [
            list(run) for _, run in groupby(self.slices, key=lambda of_slice: kind_of(of_slice[1]))
        ]
        if len(runs) == 1:
            return [self]
        parts = [Block(run, self._flat, self._memory) for run in runs]
        state = states.pop(self.tensor, None)
        for part in parts:
            if self.gradient is not None:
                at = part.start - self.start
                part.gradient = self.gradient[at : at + part.tensor.numel()]
            if state is not None:
                part.set_state(states, state)
        return parts

    def set_state(self, states: States, like: Mapping[str, Any]) -> None:
        """Let the optimizer have what lies in the memory of its state. Not collective.

        Args:
            states: of the optimizer.
            like: has the state's keys; its numbers of Python, and what is None, are taken from it.
        """
        kinds = self.slices[0][1].kinds
        states[self.tensor] = {
            key: value if value is None or kinds[key].number is not None else self._places[key]
            for key, value in like.items()
        }

    def keep_state(self, states: States, name: str) -> None:
        """Move what an optimizer has made new into its place. Not collective.

        Args:
            states: of the optimizer.
            name: of the optimizer.

        Raises:
            RuntimeError: it keeps something that it did not when it was tried.
        """
        state = states.get(self.tensor)
        if not state:
            return
        for key, value in state.items():
            place = self._places.get(key)
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
        for key, copies in self._copies.items():
            copies.copy_(self._places[key].view(()))
