"""Whether a process group can go on: an operation that fails on one rank breaks it, on all.

Note [Broken groups]
~~~~~~~~~~~~~~~~~~~~
After a time-out, an error of MPI, or an exception in the middle of an operation, this rank is at
its next operation while others may still be at this one, or come to it later. MPI would take what
they call for parts of one operation. So the group is broken, as with Gloo: each later call raises
and says which operation broke it. Ranks of the node find it in the group's page, see Note [Calls
that do not fit]; all ranks are told by roll call, also those that wait. To go on, all ranks make a
new group.

An operation that raises before anything was sent breaks the group if other ranks have begun it: if
all of them raise, as for a dtype that cannot be summed, they stay at the same place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mpiddp.process_group.call_table import BROKEN, DIFFERS, FITS, call_digest

if TYPE_CHECKING:
    from mpiddp.collectives.group_lanes import GroupLanes
    from mpiddp.collectives.group_memory import GroupMemory
    from mpiddp.process_group.call_blocks import Call, CallBlocks
    from mpiddp.process_group.call_table import CallPage

__all__ = ["GroupState"]

# Seconds in which roll call brings the reason that the node's memory does not say.
_WORDS_COME = 1.5
_NAP = 0.01


class BreakableGroup(Protocol):
    """What this needs of the group itself."""

    # The process's RollCall, or None.
    roll_call: Any

    def rank(self) -> int:
        """Return this rank's number in the group."""

    def size(self) -> int:
        """Return the number of ranks."""

    @property
    def own_size(self) -> str:
        """How many ranks there are, for messages."""

    @property
    def group_name(self) -> str:
        """The name that torch.distributed gave to this group."""

    @property
    def entered(self) -> int:
        """How many collectives this rank has called."""

    def describe_ranks(self, members: Iterable[int]) -> str:
        """Return words such as "ranks 0 to 3 and 7"."""

    def hurry(self) -> None:
        """Let what is under way end soon."""


class GroupState:
    """What keeps a process group from going on, if anything. Not collective.

    Args:
        group: whose state it is.
    """

    def __init__(self, group: BreakableGroup) -> None:
        self._group = group
        # How many collectives have been compared, or refused: the same on all ranks, unless some
        # rank has called another one.
        self.compared = 0
        # Why the group is broken, in words; "" while it is not.
        self.reason = ""
        # The group's page in the node's memory; None where it shares none.
        self.page: CallPage | None = None
        # The ranks that share that page, and whether they are all of the group.
        self.here: Sequence[int] = ()
        self.all_here = False
        # Where its collectives are carried out, if all its ranks share memory.
        self.memory: GroupMemory | None = None
        # Where its large ones are, if it has as many ranks on each of several nodes.
        self.lanes: GroupLanes | None = None
        # What compares the calls of a group whose ranks share none; None where they do.
        self.blocks: CallBlocks | None = None

    def check(self, name: str) -> None:
        """Raise if the group is broken.

        Args:
            name: what is to be begun.

        Raises:
            RuntimeError: an operation has failed before, on this rank or another.
        """
        if self.broken:
            raise self.error(name)

    def enter(self, number: int, call: Call) -> int:
        """Compare what this rank calls with what others of the node have called.

        Args:
            number: which of the group's collectives it is.
            call: what is compared of it.

        Returns:
            The digest of the call.

        Raises:
            RuntimeError: they do not fit together, or the group is broken. Nothing was sent.
        """
        self.compared += 1
        if self.memory is not None:
            self.memory.at_once = call.limit is not None
        if self.page is None and self.blocks is None:
            return 0
        digest = call_digest(self.compared, call.name, call.detail, call.agreed)
        if self.page is None:
            return digest
        found = self.page.enter(self.compared, digest)
        if found == BROKEN:
            raise self.error(call.name)
        group = self._group
        told = ""
        if found != FITS:
            told = self.explain_misfit(number)
        elif call.elements is not None:
            size = call.tensors[0].element_size() if call.tensors else 1
            sent, expected = ([size * count for count in each] for each in call.elements())
            root = call.detail if isinstance(call.detail, int) else -1
            other = self.page.exchange(self.compared, group.rank(), sent, expected, self.here, root)
            if other >= 0:
                own = group.describe_ranks([group.rank()])
                there = group.describe_ranks([other])
                told = (
                    f"{own} wants to send {sent[other]} bytes to {there} and to receive "
                    f"{expected[other]} from it, and {there} has other numbers"
                )
        if told:
            raise self.misfit(number, call.name, told)
        return digest

    def explain_misfit(self, number: int) -> str:
        """Return what the ranks have called that does not fit together; it may take seconds."""
        told = ""
        if self._group.roll_call is not None:
            told = self._group.roll_call.explain_misfit(self._group, number)[0]
        return told or "The ranks have called different collectives, or with different sizes"

    def misfit(self, number: int, name: str, told: str) -> RuntimeError:
        """Break the group; return the error of calls that do not fit together.

        Args:
            number: which of the group's collectives it is.
            name: what this rank has called.
            told: what the ranks have called, a sentence.
        """
        group = self._group
        self.break_by(number, f"collective {number} does not fit together. {told}")
        return RuntimeError(
            f"rank {group.rank()} of {group.own_size}: {name}, collective {number} of process "
            f"group {group.group_name or 'world'!r}, does not fit what other ranks have "
            f"called. {told}. The group is broken"
        )

    def refused(self, number: int, name: str, detail: object, error: BaseException) -> None:
        """Note that a collective has raised `error` before anything was sent.

        Args:
            number: which of the group's collectives it is.
            name: the operation.
            detail: its reduction, its root or both.
            error: of its arguments.
        """
        self.compared += 1
        if self.blocks is not None:
            self.blocks.refuse(self.compared, number, name)
            return
        root = detail[-1] if isinstance(detail, tuple) else detail
        begun = self.page is not None and self.page.refuse(self.compared) == DIFFERS
        # What is the root's alone, such as a list of a wrong length, the others have not raised.
        if begun or (not self.all_here and root == self._group.rank() and isinstance(root, int)):
            own = self._group.describe_ranks([self._group.rank()])
            self.break_by(number, f"{name} has raised on {own}: {error}")

    def break_by(self, number: int, reason: str) -> None:
        """Break the group, and tell its other ranks.

        Args:
            number: of the collective that failed; 0: a message.
            reason: what happened, in words.
        """
        if self.reason:
            return
        self.reason = reason
        group = self._group
        if self.page is not None:
            self.page.break_at(number or group.entered)
        if group.roll_call is not None:
            group.roll_call.tell_broken(group, reason)

    def failed(self, number: int, name: str, error: BaseException) -> None:
        """Break the group because a collective has failed in the middle.

        Args:
            number: which of the group's collectives it is.
            name: the operation.
            error: what it failed with.
        """
        own = self._group.describe_ranks([self._group.rank()])
        self.break_by(number, f"{name} has failed on {own} ({type(error).__name__}: {error})")

    def hear(self, reason: str) -> None:
        """Take from another rank that the group is broken. In any thread."""
        if not self.reason:
            self.reason = reason
            self._group.hurry()

    def error(self, name: str, missing: str = "") -> RuntimeError:
        """Return the error of a call in a broken group.

        Args:
            name: of the call.
            missing: which ranks it has waited for, a sentence; "": it has not begun.
        """
        deadline = time.monotonic() + _WORDS_COME
        while not self.reason and time.monotonic() < deadline:
            time.sleep(_NAP)
        group = self._group
        reason = self.reason or "an operation has failed on another rank, whose error says why"
        verb, missing = ("end", f"{missing} ") if missing else ("run", "")
        return RuntimeError(
            f"rank {group.rank()} of {group.own_size}: {name} on process group "
            f"{group.group_name or 'world'!r} cannot {verb}, because the group is broken: "
            f"{reason}. {missing}The ranks may be at different operations. To go on, make a new "
            f"group on all ranks (torch.distributed.new_group); nothing is sent in this one any "
            f"more"
        )

    @property
    def broken(self) -> bool:
        """Whether this rank knows that the group cannot go on."""
        return bool(self.reason or (self.page is not None and self.page.broken))

    def refuse_calls(self) -> None:
        """Let calls raise from now on: the group is going to be destroyed."""
        self.reason = self.reason or "it has been destroyed"

    def end(self, starting: threading.Lock, seconds: float) -> None:
        """Release all, when no thread begins a call. Collective.

        Args:
            starting: who begins a call holds it.
            seconds: how long to wait for that.
        """
        nobody_begins = starting.acquire(timeout=seconds)
        try:
            self.release()
        finally:
            if nobody_begins:
                starting.release()

    def release(self) -> None:
        """Give back the group's memory and the communicator of its blocks. Collective."""
        page, self.page = self.page, None
        memory, self.memory = self.memory, None
        lanes, self.lanes = self.lanes, None
        if memory is not None:
            memory.close()
        if lanes is not None:
            lanes.close()
        if page is not None:
            page.release(memory or lanes)
        if self.blocks is not None:
            self.blocks.release()
