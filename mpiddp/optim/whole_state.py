"""The state of whole parameters: in checkpoints, and as users see and change it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.ddp.same_bits import word_for
from mpiddp.optim import same_settings
from mpiddp.optim.shown_state import Changes, ShownTable

if TYPE_CHECKING:
    from mpiddp.ddp.shared_parameters import SharedParameters
    from mpiddp.optim.blocks import Block
    from mpiddp.optim.members import Member
    from mpiddp.optim.state_memory import StateMemory

__all__ = ["WholeState"]


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
    # What was done to gradients since the last step, by name.
    _used: dict[str, str]

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
                f"rank {self._shared.group.me}: param_groups of a NodeOptimizer were changed. "
                f"Parameters may be removed from a group's 'params' and put back there; others "
                f"are added by add_param_group"
            )
        self._present = [list(group["params"]) for group in groups]
        present = {id(parameter) for parameters in self._present for parameter in parameters}
        for member in self._members:
            member.is_present = id(member.tensor) in present

    def _changes_in_place(self) -> str:
        """Return what the user has changed in tensors of the state, in words."""
        return ", ".join(filter(None, (memory.changes() for memory in self._memories)))

    def _keep_changes_in_place(self) -> None:
        """Let the node have them: they are the same on all ranks. Collective."""
        if self._shared.rank == 0:
            for memory in self._memories:
                memory.keep_changes()
        self._shared.exchange(0)
        for memory in self._memories:
            memory.forget_changes()

    def _was_edited(self) -> bool:
        """Return whether the user has changed tables of the state."""
        return self.state is not self._shown or self._shown.changes.noted

    def _copy_of_edits(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the state as the user has left it; what lies where it will be put is copied."""
        given = {}
        for member in self._members:
            state = self.state.get(member.tensor)
            if not state:
                continue
            given[member.tensor] = copied = dict(state)
            for key, value in state.items():
                if (
                    isinstance(value, torch.Tensor)
                    and not _is_shown(member, key, value)
                    and any(piece.has(value) for piece in self._shared.pieces)
                ):
                    copied[key] = value.detach().clone()
        return given

    def _describe_edits(self, edited: Mapping[torch.Tensor, Mapping[str, Any]]) -> dict[str, str]:
        """Return a word for each value of the state as the user has left it, by name."""
        return {
            f"optimizer.state of {self._shared.name_of(member.tensor)}, {key!r}": (
                "as it was"
                if isinstance(value, torch.Tensor) and _is_shown(member, key, value)
                else word_for(value)
            )
            for member in self._members
            for key, value in sorted(edited.get(member.tensor, {}).items())
        }

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
            memory.forget_changes()

    def _describe_step(
        self,
        settings: Iterable[dict[str, Any]],
        edited: dict[torch.Tensor, dict[str, Any]] | None,
    ) -> dict[str, str]:
        """Return what is the same on all ranks where they step one model, by name."""
        name_of = self._shared.name_of
        without = [name_of(m.tensor) for m in self._members if m.is_present and not m.has_gradient]
        removed = [name_of(m.tensor) for m in self._members if not m.is_present]
        described = {
            "parameters without a gradient": ", ".join(without) or "none",
            "parameters removed from their groups": ", ".join(removed) or "none",
            **self._used,
        }
        if edited is not None:
            described["optimizer.state"] = "changed"
            described |= self._describe_edits(edited)
        for number, group in enumerate(settings):
            described |= same_settings.describe_group(number, group)
        return described

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, as torch's plain optimizer would.

        Not collective: the node's ranks share it. Tensors are the state itself, not copies, as in
        torch.
        """
        self._shared.check()
        self._note_numbers()
        saved = super().state_dict()
        saved["state"] = {key: dict(state) for key, state in saved["state"].items()}
        return saved

    def _note_numbers(self) -> None:
        """Let the state that is shown have the numbers of Python that it has by now."""
        for member in self._members:
            state = self._shown.get(member.tensor)
            if not state or member.memory is None:
                continue
            for key, kind in member.kinds.items():
                if kind.number is not None:
                    place = member.memory.of_parameter(member.index, key)
                    dict.__setitem__(state, key, kind.number(place.item()))

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


def _is_shown(member: Member, key: str, value: torch.Tensor) -> bool:
    """Return whether a value of the state is the memory that the ranks share."""
    return (
        key in member.kinds
        and member.memory is not None
        and value.shape == member.tensor.shape
        and value.data_ptr() == member.memory.of_parameter(member.index, key).data_ptr()
    )
