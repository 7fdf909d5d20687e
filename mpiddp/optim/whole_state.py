"""The state of whole parameters: in checkpoints, and as users see and change it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.optim.shown_state import Changes, ShownTable

if TYPE_CHECKING:
    from mpiddp.ddp.shared_parameters import SharedParameters
    from mpiddp.optim.blocks import Block
    from mpiddp.optim.members import Member
    from mpiddp.optim.state_memory import StateMemory

__all__ = ["WholeState"]

IN_PLACE = 1


class WholeState(torch.optim.Optimizer):
    """An optimizer that shows the state of whole parameters, and steps parts. Collective."""

    _class: type[torch.optim.Optimizer]
    _shared: SharedParameters
    _members: list[Member]
    _without_state: list[Member]
    _memories: list[StateMemory]
    _undivided: list[list[Block]]
    _blocks: list[list[Block]]
    _inner: torch.optim.Optimizer | None
    # What the user sees; another object in `state` is the user's.
    _shown: ShownTable
    # The parameters of each group, as they were given, and as the user has left them.
    _given: list[set[int]]
    _present: list[list[torch.Tensor]]
    # A number for what has changed since the last step, the same on all ranks; 0 for nothing.
    _edits_of_groups: int

    if TYPE_CHECKING:  # the optimizer's own

        def _all_blocks(self) -> Iterator[Block]: ...

        def _divide(self, kind_of: Callable[[Member], object]) -> None: ...

        def _bind(self) -> None: ...

    def _show_nothing(self) -> None:
        """Show no state any more."""
        self._shown = ShownTable(Changes())
        self.state = self._shown

    def _show_state(self, members: Iterable[Member]) -> None:
        """Let `state` have the whole state of parameters that have one now."""
        for member in members:
            if member.memory is not None and member.tensor.numel():
                self._shown.show(
                    member.tensor,
                    {key: member.memory.of_parameter(member.index, key) for key in member.kinds},
                )
        self._without_state = [m for m in self._without_state if m.tensor not in self._shown]

    # Edits, see Note [Edits of the state].

    def _take_groups(self) -> None:
        """Take what the user has removed from groups, or put back. Not collective.

        Raises:
            RuntimeError: a parameter is new in a group.
        """
        groups = self.param_groups
        if len(groups) == len(self._present) and all(
            len(group["params"]) == len(present) and all(map(is_, group["params"], present))
            for group, present in zip(groups, self._present, strict=True)
        ):
            return
        if len(groups) != len(self._given) or any(
            not given.issuperset(map(id, group["params"]))
            for group, given in zip(groups, self._given, strict=True)
        ):
            raise RuntimeError(
                f"rank {self._shared.group.rank()}: param_groups of a NodeOptimizer were changed. "
                f"Parameters may be removed from a group's 'params' and put back there; others "
                f"are added by add_param_group"
            )
        self._present = [list(group["params"]) for group in groups]
        present = {id(parameter) for parameters in self._present for parameter in parameters}
        for member in self._members:
            member.is_present = id(member.tensor) in present
        removed = [member.index for member in self._members if not member.is_present]
        self._edits_of_groups = zlib.crc32(repr(removed).encode()) + 1

    def _find_state_edits(self) -> int:
        """Return a number for what the user has changed in the state, 0 for nothing."""
        if any(memory.was_changed() for memory in self._memories):
            return IN_PLACE
        if self.state is self._shown and not self._shown.changes.noted:
            return 0
        keys = [
            (member.index, sorted(self.state[member.tensor]))
            for member in self._members
            if self.state.get(member.tensor)
        ]
        return zlib.crc32(repr(keys).encode()) + 2

    def _copy_of_edits(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the state as the user has left it; what is not shown as it was is copied."""
        given = {}
        for member in self._members:
            state = self.state.get(member.tensor)
            if not state:
                continue
            given[member.tensor] = copied = dict(state)
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and not (
                    key in member.kinds
                    and member.memory is not None
                    and value.shape == member.tensor.shape
                    and value.data_ptr() == member.memory.of_parameter(member.index, key).data_ptr()
                ):
                    copied[key] = value.detach().clone()
        return given

    def _take_state(self, loaded: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Copy states of whole parameters into those of this rank's blocks.

        All ranks of the node do it, while none reads or steps.
        """
        assert self._inner is not None
        self._show_nothing()
        self._without_state = []
        starts = {
            index: start
            for layout in self._shared.layouts
            for index, start in layout.starts.items()
        }
        states: dict[int, dict[str, Any]] = {}
        for member in self._members:
            given = loaded.get(member.tensor)
            if given:
                states[member.index] = member.load(
                    given, starts[member.index], self._class.__name__
                )
            elif member.kinds:
                self._without_state.append(member)
        self._inner.state.clear()
        self._blocks = [list(blocks) for blocks in self._undivided]
        self._divide(lambda member: states.get(member.index))
        for block in self._all_blocks():
            state = states.get(block.slices[0][1].index)
            if state is not None:
                block.set_state(self._inner.state, state)
        self._bind()
        self._show_state([member for member in self._members if loaded.get(member.tensor)])
        for memory in self._memories:
            memory.note_shown()

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, as torch's plain optimizer would.

        Not collective: the node's ranks share it. Tensors are the state itself, not copies, as in
        torch.
        """
        self._shared.check()
        for member in self._members:
            state = self._shown.get(member.tensor)
            if not state or member.memory is None:
                continue
            for key, kind in member.kinds.items():
                if kind.number is not None:
                    place = member.memory.of_parameter(member.index, key)
                    dict.__setitem__(state, key, kind.number(place.item()))
        saved = super().state_dict()
        saved["state"] = {key: dict(state) for key, state in saved["state"].items()}
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a NodeOptimizer or of torch's plain optimizer. Collective.

        Raises:
            ValueError: its groups do not match.
            RuntimeError: it has a state that this optimizer does not keep.
        """
        self._shared.check()
        super().load_state_dict(state_dict)
        loaded = self.state
        self._shared.exchange(0)  # nobody reads the old state any more
        self._take_state(loaded)
        self._shared.exchange(0)
