"""The errors of a process group's operations: what happened, and which ranks are missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from mpi4py import MPI

from mpiddp.flight_recorder import files
from mpiddp.flight_recorder.call_text import ranks_in_words
from mpiddp.mpi.errors import error_class

if TYPE_CHECKING:
    from datetime import timedelta

    from mpiddp.collectives.operation import SentBlock
    from mpiddp.flight_recorder.call_text import Call
    from mpiddp.flight_recorder.sources import Source
    from mpiddp.process_group.group_state import GroupState
    from mpiddp.watch.roll_call import RollCall
    from mpiddp.watch.wrapped_modules import WrappedModules


class OperationErrors(dist.ProcessGroup):
    """What a process group says of an operation that has failed. Not collective."""

    timeout: timedelta
    source: Source
    modules: WrappedModules
    last: Call | None
    without_limit: set[int]
    state: GroupState
    roll_call: RollCall | None
    # The world rank of each of the group's ranks.
    world_ranks: Sequence[int]
    # How many collectives this rank has called.
    entered: int
    _rank: int
    _size: int
    # Whether TORCH_DISTRIBUTED_DEBUG=DETAIL compares the calls.
    _checked: bool
    # By `shutdown`.
    closed: bool

    def describe_ranks(self, members: Iterable[int]) -> str:
        """Return words such as "ranks 0 to 3 and 7" for ranks in the group. Not collective."""
        return ranks_in_words(self.world_ranks, members)

    @property
    def me(self) -> str:
        """This rank's number in the world, for messages: "3 of the world" in a part of it."""
        known = list(self.world_ranks)
        return f"{known[self._rank]}{'' if known == list(range(len(known))) else ' of the world'}"

    @property
    def own_size(self) -> str:
        """How many ranks there are, for messages: "2, world rank 3" in a part of the world."""
        own = self.describe_ranks([self._rank])
        return f"{self._size}, {own}" if own.startswith("world") else str(self._size)

    def hear(self, reason: str) -> None:
        """Take from another rank that the group is broken. In any thread."""
        self.state.hear(reason)

    def timed_out(
        self, name: str, seconds: float, number: int | None = None, gives_up: bool = True
    ) -> RuntimeError:
        """Return the error of an operation `name` that waited in vain; it may take seconds.

        Not collective. `number`: which of this group's collectives; None: the last, 0: a message.
        `gives_up`: nobody waits for it any more, and the group is broken.
        """
        if self.state.reason:
            return self._broken_meanwhile(name, number)
        if gives_up:
            own = self.describe_ranks([self._rank])
            reason = f"{name} on {own} has waited {seconds:g} s for other ranks"
            self.state.break_by(self.entered if number is None else number, reason)
        if number != 0:
            missing = self.explain_missing(number)
        else:
            missing = "Has the other rank called its part, and is it still alive?"
            if self.roll_call is not None:
                self.roll_call.alert(self)
        words = (
            f"rank {self.rank()} of {self.own_size}: {name} on process group "
            f"{self.group_name or 'world'!r} has waited {seconds:g} s for other ranks, and its "
            f"timeout is over. "
            f"{missing}"
        )
        # The others have written theirs when they were asked what they do.
        return RuntimeError(f"{words} {files.dump_for(words)}".rstrip())

    def explain_missing(self, number: int | None = None) -> str:
        """Return which ranks keep a collective waiting; it may take seconds. Not collective."""
        if self.roll_call is None:
            return "Did all ranks call it, in the same order, and are they still alive?"
        return f"{self.roll_call.explain(self, number)}."

    def misfit_in(self, sent: SentBlock) -> RuntimeError:
        """Return the error of ranks that have said in a block what does not fit together."""
        return self.state.misfit(sent.number, sent.name, self.state.explain_misfit(sent.number))

    def misfit(self, error: BaseException, number: int) -> RuntimeError | None:
        """Return an error that shows what the ranks have called, if a message was cut.

        Not collective; then it may take seconds. None if `error` is no such error. MPICH does not
        say which error it is: there calls that differ must be found.

        Args:
            error: of a collective.
            number: which of this group's; 0: a message, whose own error says it all.
        """
        kind = error_class(error) if number else MPI.SUCCESS
        if kind not in (MPI.ERR_TRUNCATE, MPI.ERR_OTHER):
            return None
        told, may_be_right = "", False
        if self.roll_call is not None:
            told, may_be_right = self.roll_call.explain_misfit(self, number)
        if kind == MPI.ERR_OTHER and not told:
            return None
        # Sizes of an all_gather that differ need not be what failed, where MPI does not say.
        fits = "may not" if kind == MPI.ERR_OTHER and may_be_right else "does not"
        words = (
            f"rank {self.rank()} of {self.own_size}: what other ranks have sent for collective "
            f"{number} of process group {self.group_name or 'world'!r} {fits} fit here. "
            f"{told or 'The ranks have called different collectives, or with different tensors'}. "
        )
        if not self._checked:
            words += (
                "Some may have a wrong result already; with TORCH_DISTRIBUTED_DEBUG=DETAIL the "
                "ranks compare their calls before anything is sent. "
            )
        return RuntimeError(f"{words}{files.dump_for(words)} ({error})")

    def unlike(self, name: str, words: str) -> RuntimeError:
        """Return the error of a collective whose ranks disagree on sizes; it breaks the group.

        Not collective. `words`: what has come, and what was expected.
        """
        self.state.break_by(self.entered, f"in {name}, {words}")
        where = f"{name} on process group {self.group_name or 'world'!r}"
        return RuntimeError(f"rank {self._rank} of {self.own_size}: {where}: {words}")

    def _broken_meanwhile(self, name: str, number: int | None) -> RuntimeError:
        """Return the error of an operation that waits in a group that another rank has broken."""
        # That rank has found out who is missing, but its own words may come later, or never.
        missing = "" if number == 0 or self.closed else self.explain_missing(number)
        return self.state.error(name, missing)
