"""Notice ranks of other nodes that have ended, and nodes that are off or cut off.

Note [A ring of nodes]
~~~~~~~~~~~~~~~~~~~~~~
The first rank of each node keeps a TCP connection to the first rank of the next node. Nothing is
sent: the system closes the connections of a process that ends, and asks a silent node by itself
whether it is there (TCP keep-alive). A rank that leaves properly says so with one byte.
A connection that is silent, or reset, is a suspicion only: another network than MPI's may carry it.
So the job ends only if this rank has waited for as long, and the other one does not answer by MPI
either, see Note [Roll call]. A rank that has ended is not asked: to connect again, MPICH would hold
up all threads that call it, for 15 s where the node is off.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mpiddp import settings
from mpiddp.flight_recorder.call_text import ranks_in_words
from mpiddp.mpi import abort, communicators, nodes
from mpiddp.watch.dead_peers import end_job, waits_for
from mpiddp.watch.node_ends import LEAVING, Bell, Link, NodeEnds, closed_words
from mpiddp.watch.ring_connections import connect

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.watch.roll_call import RollCall

__all__ = ["Heartbeat"]

# Seconds in which the launcher may end the job itself; and then the other ranks of the lost rank's
# node, who know more.
_GRACE, _FOR_ITS_NODE = 1.5, 1.0
# Seconds by which the node behind in the ring waits longer, so that the one before speaks first.
_STAGGER = 0.3


class Heartbeat:
    """Watches the nodes before and behind this one, if this rank is the first of its node.

    Collective over `communicator`. Takes some seconds at most.

    Args:
        communicator: of all ranks.
        roll_call: of the same ranks; it is told who is lost.
        answers: returns whether a rank answers by MPI, see `Asker`.

    Attributes:
        problem: why nobody watches, on the first ranks of the nodes; "" where they do, or where
            there is one node.
    """

    def __init__(
        self, communicator: MPI.Intracomm, roll_call: RollCall, answers: Callable[[int], bool]
    ) -> None:
        from mpi4py import MPI

        self._rank = communicator.Get_rank()
        self._lost, self._answers = roll_call.lost, answers
        self._seconds = settings.HEARTBEAT_SECONDS.read()
        self._links: list[Link] = []
        self._noticed: list[Link] = []
        self._bell: Bell | None = None
        self._ends: NodeEnds | None = None
        self._process_id = os.getpid()
        # Called instead of ending the job, where the others can go on.
        self.on_loss: Callable[[], None] | None = None
        self.problem = ""
        if math.isinf(self._seconds) or not roll_call.threaded:
            name = settings.HEARTBEAT_SECONDS.name
            self.problem = f"{name} is none" if roll_call.threaded else "there is no thread"
            return
        node = nodes.ranks_of_node(communicator)
        ranks = node.gather(self._rank)
        is_first = node.Get_rank() == 0
        alone = node.Get_size() == communicator.Get_size()
        if not alone:
            self._bell = Bell(node)
            abort.call_at_once(self.say_nothing)
            _living.add(self)
        node.Free()
        if alone:
            return
        leaders = communicator.Split(0 if is_first else MPI.UNDEFINED, self._rank)
        if is_first:
            assert ranks is not None
            self._watch(communicators.note(leaders), ranks)
            leaders.Free()

    def _watch(self, leaders: MPI.Comm, ranks: Sequence[int]) -> None:
        """Connect with the nodes before and behind. Collective over the first ranks of nodes."""
        connections, self.problem = connect(leaders, ranks, self._seconds)
        for index, (connection, place) in enumerate(connections):
            patience = _GRACE + _FOR_ITS_NODE * (len(place.ranks) > 1) + _STAGGER * index
            self._links.append(Link(connection, place, patience, index))
        if self._links:
            assert self._bell is not None
            self._ends = NodeEnds(self._links, self._bell)

    def look(self) -> None:
        """End the job if this rank waits for one that is lost. Not collective."""
        for link in self._links:
            if link.lost and link not in self._noticed:
                self._noticed.append(link)
                if link.closed:
                    self._lost.add(link.place.rank)
                if self.on_loss is not None:
                    self.on_loss()
        if self.on_loss is not None:
            return
        for link in self._links:
            if link.lost and time.monotonic() - link.lost >= link.patience:
                self._judge(link)

    def say_nothing(self) -> None:
        """Let no rank name another one: why the job ends is said. Not collective."""
        bell = self._bell
        if bell is not None and os.getpid() == self._process_id:
            bell.sound()

    def close(self) -> None:
        """Leave properly. Not collective."""
        for link in self._links:
            with contextlib.suppress(OSError):  # the other one was quicker
                link.connection.send(LEAVING, socket.MSG_NOSIGNAL)
        self._forget()

    def _forget(self) -> None:
        """Close the connections of this process; those of the one that has forked it stay."""
        if self._ends is not None and os.getpid() == self._process_id:
            self._ends.stop()
        self._ends = None
        for link in self._links:
            link.connection.close()
        self._links.clear()
        abort.do_not_call(self.say_nothing)
        if self._bell is not None:
            self._bell.close()
            self._bell = None

    def _judge(self, link: Link) -> None:
        place = link.place
        if link.closed:
            waits = waits_for([place.rank])
        else:
            # Where the network alone is silent, waits end all the time: only a long one tells.
            waits = waits_for(place.ranks, self._seconds)
            if waits and self._answers(place.rank):
                link.lost = time.monotonic()
                return
            # What the rank had sent may have come meanwhile.
            waits = waits and waits_for(place.ranks, self._seconds)
        if waits:
            end_job(self._rank, self._words(link), waits)

    def _words(self, link: Link) -> str:
        place = link.place
        if link.closed:
            return closed_words(place)
        who = ranks_in_words(range(max(place.ranks) + 1), place.ranks)
        return (
            f"{place.host} ({who}; rank {place.rank} is process {place.process_id}) has not "
            f"answered for {self._seconds:g} s: it is off, or cut off"
        )


# With a copy in a process that this one has forked, such as a DataLoader's worker, the connection
# would stay open when this one ends.
_living: weakref.WeakSet[Heartbeat] = weakref.WeakSet()


def _forget_in_child() -> None:
    for heartbeat in list(_living):
        heartbeat._forget()


os.register_at_fork(after_in_child=_forget_in_child)
