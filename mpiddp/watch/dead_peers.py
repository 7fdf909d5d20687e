"""Notice ranks of this node that have ended, and end the job if this rank waits for one of them.

mpirun ends a job when one of its processes dies. `srun` does so only with --kill-on-bad-exit, and a
launcher that is gone cannot: without this, the others would wait until the time limit.
A process that ends properly is in MPI_Finalize until all are, so nobody waits for it any more.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpiddp.flight_recorder import page, ring, sources
from mpiddp.flight_recorder.torch_format import words_of
from mpiddp.mpi import first_words
from mpiddp.mpi.abort import abort_job
from mpiddp.mpi.nodes import ranks_of_node
from mpiddp.system import memory_files, running_time
from mpiddp.watch import node_states, sudden_ends

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["DeadPeers", "end_job", "waits_for"]

# Seconds in which the launcher may end the job itself, and what has arrived may be read.
_GRACE = 1.5
# Seconds by which each further rank of a node waits longer, so that one speaks first.
_STAGGER = 0.2
_MOST_STAGGERED = 10


@dataclass
class _Peer:
    rank: int
    process_id: int
    died: float = 0.0  # on the monotonic clock; 0: it lives


class DeadPeers:
    """Watches the other ranks of this node.

    Collective over `communicator`.

    Args:
        communicator: of all ranks.
        lost: takes the ranks that have ended.
    """

    def __init__(self, communicator: MPI.Intracomm, lost: set[int]) -> None:
        self._lost = lost
        self._rank = communicator.Get_rank()
        node = ranks_of_node(communicator)
        self._patience = _GRACE + _STAGGER * min(node.Get_rank(), _MOST_STAGGERED)
        # Their numbers mean something in the same namespace only: ranks may be in containers.
        file = _file() if node.Get_rank() == 0 else -1
        everyone = node.allgather((self._rank, os.getpid(), _namespace(), page.share(), file))
        first_rank, process_id, namespace, _, file = everyone[0]
        if namespace == _namespace():
            first_words.begin(self._rank, process_id, file, apart=first_rank != 0)
        beside = {}
        self._peers: dict[int, _Peer] = {}
        self._poll = select.poll()
        for rank, process_id, namespace, descriptor_of_page, _ in everyone:
            if rank != self._rank and namespace == _namespace() != 0:
                beside[rank] = process_id, descriptor_of_page
                # Some sandboxes, and Linux before 5.3, have no such descriptors.
                with contextlib.suppress(OSError):
                    descriptor = os.pidfd_open(process_id)
                    self._peers[descriptor] = _Peer(rank, process_id)
                    self._poll.register(descriptor, select.POLLIN)
        node_states.begin(beside)
        watched = {p.rank: (p.process_id, fd) for fd, p in self._peers.items()}
        self._sudden_ends = sudden_ends.SuddenEnds(self._rank, watched)
        # Called instead of ending the job, where the others can go on.
        self.on_loss: Callable[[], None] | None = None
        # So nobody has ended, and its number is nobody else's, before all have looked.
        node.Barrier()
        node.Free()

    def look(self) -> None:
        """End the job if this rank has waited a while for one that is dead. Not collective."""
        for descriptor, _ in self._poll.poll(0):
            self._poll.unregister(descriptor)
            self._peers[descriptor].died = time.monotonic()
            self._lost.add(self._peers[descriptor].rank)
            if self.on_loss is not None:
                self.on_loss()
        if self.on_loss is not None:
            return
        for descriptor, peer in self._peers.items():
            if peer.died and time.monotonic() - peer.died > self._patience:
                waits = waits_for([peer.rank])
                if waits:
                    who = f"rank {peer.rank} (process {peer.process_id} on {socket.gethostname()})"
                    end_job(self._rank, f"{who} {_end_of(descriptor)}", waits)

    def call_on_end(self, function: Callable[[], None]) -> None:
        """Call `function`, in a thread, when a rank of this node has ended. Not collective."""
        self._sudden_ends.on_end = function

    def close(self) -> None:
        """Stop watching. Not collective."""
        node_states.end()
        first_words.end()
        self._sudden_ends.stop()
        for descriptor in self._peers:
            os.close(descriptor)
        self._peers.clear()
        self._poll = select.poll()


def waits_for(ranks: Sequence[int], at_least: float = 0.0) -> str:
    """Return in words what this rank waits for that needs one of `ranks`; "" if nothing.

    Not collective.

    Args:
        ranks: in the world.
        at_least: for how many seconds it has waited.
    """
    known = sources.known()
    for record in ring.snapshot():
        source = known.get(record[1])
        if record[8] or source is None:
            continue
        if running_time.now() - running_time.at(record[6]) < at_least:
            continue
        if any(rank in source.ranks for rank in ranks):
            words = words_of(record, source)
            return words if words == source.name else f"{words} of group {source.name!r}"
    return ""


def end_job(rank: int, loss: str, waits: str) -> None:
    """End the job, with a line that says why. Not collective.

    Args:
        rank: this one.
        loss: which rank is lost, and how, in words.
        waits: what `waits_for` has returned.
    """
    words = (
        f"mpiddp: rank {rank}: {loss}, and this rank waits for its part of {waits}. The job ends"
    )
    abort_job(1, lambda: print(words, file=sys.stderr, flush=True))


def _end_of(descriptor: int) -> str:
    """Return how the process of a pidfd has ended, as far as Linux (6.15 or newer) tells."""
    status = sudden_ends.exit_status(descriptor)
    if status is None:
        return "has ended"
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"has ended with status {os.WEXITSTATUS(status)}"


def _file() -> int:
    """Return a file in memory in which a node's ranks say who was first; -1: there is none."""
    with contextlib.suppress(OSError):
        return memory_files.create("mpiddp-first-words")
    return -1


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
