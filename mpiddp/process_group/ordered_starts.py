"""Between nodes, begin the data of asynchronous collectives, in order, once calls are compared.

Note [Data in the order of calls]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
MPI wants the collectives of a communicator begun in one order on all ranks. Blocks (see Note [Calls
in a block] in blocks.pyx) begin in the order of the calls, on a communicator of their own, and end
at another time on each rank. The data of an asynchronous collective may begin only when its block
has ended. So the calls of MPI that its operation makes are kept, and made later in the order of the
operations, by whoever comes first: a caller who waits, a later collective that is not asynchronous,
or the thread of this file, for operations that nobody waits for. A collective whose data is in its
block has no place in that order. Once calls differ, or the group is broken, no more data begins.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.collectives.operation import SentBlock
    from mpiddp.engine.requests import Pending, Requests

__all__ = ["OrderedStarts", "Starter", "StartingGroup", "kept"]

# Seconds that the idle thread waits for the next operation.
_IDLE = 1.0
# Seconds that it sleeps at most while operations wait for their turn.
_NAP = 0.5


class _Start(NamedTuple):
    """The beginning of one collective's data: its block, and what waits for that."""

    sent: SentBlock
    parts: Sequence[Pending]


class State(Protocol):
    """What this needs of a group's state."""

    reason: str

    def error(self, name: str) -> RuntimeError:
        """Return the error of a call in a broken group."""


class StartingGroup(Protocol):
    """What this needs of the group itself."""

    @property
    def state(self) -> State:
        """Whether the group can go on."""

    def misfit_in(self, sent: SentBlock) -> RuntimeError:
        """Return the error of ranks that have said in a block what does not fit together."""


class OrderedStarts:
    """The collectives of a group whose data has not begun. Not collective.

    Args:
        group: the process group.
        starter: begins what nobody waits for.
    """

    def __init__(self, group: StartingGroup, starter: Starter) -> None:
        self._group, self._starter = group, starter
        self._queue: deque[_Start] = deque()
        self._beginning = threading.Lock()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, sent: SentBlock, parts: Sequence[Pending]) -> None:
        """Let a collective begin when it is its turn.

        Args:
            sent: the block in which the ranks compare it.
            parts: what is to begin.
        """
        self._queue.append(_Start(sent, parts))
        self._starter.add(self)

    def wait(self, name: str, is_over: Callable[[], bool], wait: Callable[[Pending], bool]) -> bool:
        """Begin one collective after the other until enough have begun.

        Args:
            name: what the caller waits for.
            is_over: whether they have.
            wait: waits for a block; returns whether it has ended in time.

        Returns:
            Whether they have in time.

        Raises:
            RuntimeError: the ranks have called what does not fit together, or the group is broken.
        """
        while not is_over():
            try:
                first = self._queue[0]
            except IndexError:  # another thread has begun it
                continue
            if self._group.state.reason:
                raise self._group.state.error(name)
            if not wait(first.sent.pending):
                return False
            if first.sent.differs:
                raise self._group.misfit_in(first.sent)
            self.begin_due()
        return True

    def begin_due(self) -> None:
        """Begin what can begin now. In any thread."""
        with self._beginning:
            while self._queue:
                sent, parts = self._queue[0]
                if self.is_stuck or not sent.pending.done or sent.differs:
                    return
                for part in parts:
                    part.begin()
                self._queue.popleft()

    def close(self) -> None:
        """Begin nothing more."""
        with self._beginning:
            self._queue.clear()

    @property
    def is_stuck(self) -> bool:
        """Whether nothing more is to begin, because the group is broken."""
        return bool(self._group.state.reason)


class Starter:
    """The thread that begins what nobody waits for. Not collective.

    It is a daemon: others would keep the interpreter alive after a failure.

    Args:
        requests: those of the process.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._groups: list[OrderedStarts] = []
        self._wanted = threading.Condition()  # guards all that follows
        self._runs = False

    def add(self, starts: OrderedStarts) -> None:
        """See to it that the data of a group's collectives begins even if nobody waits."""
        if not self._requests.engine.has_thread:
            return  # nothing moves while nobody waits
        with self._wanted:
            if starts not in self._groups:
                self._groups.append(starts)
            if self._runs:
                self._wanted.notify()
            else:
                self._runs = True
                threading.Thread(target=self._run, name="mpiddp starts", daemon=True).start()
        self._requests.wake()

    def _run(self) -> None:
        while True:
            ticket = self._requests.ticket
            with self._wanted:
                self._groups = [each for each in self._groups if each and not each.is_stuck]
                if not self._groups:
                    if self._wanted.wait(_IDLE):
                        continue
                    self._runs = False
                    return
                groups = list(self._groups)
            for starts in groups:
                starts.begin_due()
            if any(groups):
                self._requests.watch(ticket, _NAP)


def kept(communicator: MPI.Intracomm) -> MPI.Intracomm:
    """Return a stand-in for a communicator: its methods return what makes the call, for `Pending`.

    Not collective.
    """
    return cast("MPI.Intracomm", _KeptCalls(communicator))


class _KeptCalls:
    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator

    def __getattr__(self, name: str) -> Callable[..., Callable[[], MPI.Request]]:
        return partial(partial, getattr(self._communicator, name))
