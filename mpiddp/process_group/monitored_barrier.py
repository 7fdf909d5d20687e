"""torch.distributed.monitored_barrier on groups of mpiddp: a barrier whose error names who is late.

As with Gloo, rank 0 waits for a message of every other rank and then answers all of them. Unlike
Gloo's, the answer says who was missing, and also reaches a rank that comes afterwards.
"""

from __future__ import annotations

import itertools
import struct
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpiddp.collectives.point_to_point import BARRIER, own_tag
from mpiddp.engine.engine import look_at_others
from mpiddp.system import running_time

if TYPE_CHECKING:
    from mpiddp.process_group.interface import RunningGroup

__all__ = ["MonitoredBarrier"]

_NUMBER = struct.Struct("<q")
_SHORTEST_NAP = 50e-6
_LONGEST_NAP = 1e-3


class MonitoredBarrier:
    """The barriers of one process group. Not collective.

    Args:
        group: whose ranks wait for each other.
    """

    def __init__(self, group: RunningGroup) -> None:
        self._group = group
        # Of its own: messages of a barrier that has failed may still arrive.
        self._tag = own_tag(BARRIER)
        self._numbers = itertools.count(1)
        # Answers to ranks that may never look for them.
        self._sent: list[Any] = []

    def __call__(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Wait until all ranks are here.

        Collective.

        Args:
            timeout: how long a rank waits.
            wait_all_ranks: name all ranks that are missing, not only the lowest.

        Raises:
            RuntimeError: on all ranks; rank 0 and those that are here name who is missing.
        """
        number = next(self._numbers)
        deadline = running_time.now() + timeout.total_seconds()
        if self._group.rank() == 0:
            self._wait_for_all(number, deadline, timeout, wait_all_ranks)
        else:
            self._wait_for_answer(number, deadline, timeout)

    def _wait_for_all(
        self, number: int, deadline: float, timeout: timedelta, wait_all_ranks: bool
    ) -> None:
        missing = set(range(1, self._group.size()))
        while missing:
            message = self._receive(number, deadline)
            if message is None:
                break
            missing.discard(message[0])
        problem = ""
        if missing and timeout <= timedelta(0):
            problem = "[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms"
        elif missing:
            named = f"Rank {min(missing)}"
            if wait_all_ranks:
                named = f"Ranks {', '.join(map(str, sorted(missing)))}"
            milliseconds = round(timeout.total_seconds() * 1000)
            problem = f"[Rank 0]: {named} failed to pass monitoredBarrier in {milliseconds} ms"
        for rank in range(1, self._group.size()):
            self._send(number, problem, rank)
        if problem:
            # Only now, as it takes time.
            raise RuntimeError(f"{problem}. {self._group.explain_missing()}")

    def _wait_for_answer(self, number: int, deadline: float, timeout: timedelta) -> None:
        self._send(number, "", 0)
        message = self._receive(number, deadline)
        rank = self._group.rank()
        # As in torch.
        here = (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
            f"for send/recv from rank 0"
        )
        if message is None:
            raise RuntimeError(
                f"{here}: no answer in {round(timeout.total_seconds() * 1000)} ms. "
                f"{self._group.explain_missing()}"
            )
        if message[1]:
            raise RuntimeError(f"{here}: {message[1]}")

    def _send(self, number: int, text: str, rank: int) -> None:
        data = _NUMBER.pack(number) + text.encode()
        request = self._group.communicator.Isend([data, MPI.BYTE], dest=rank, tag=self._tag)
        self._sent = [one for one in self._sent if not one.Test()]
        self._sent.append(request)

    def _receive(self, number: int, deadline: float) -> tuple[int, str] | None:
        """Return sender and text of the next message of barrier `number`, None if it is late."""
        communicator, status = self._group.communicator, MPI.Status()
        clock = running_time.Clock()
        began = clock.now()
        while True:
            if communicator.Iprobe(source=MPI.ANY_SOURCE, tag=self._tag, status=status):
                data = bytearray(status.Get_count(MPI.BYTE))
                communicator.Recv([data, MPI.BYTE], source=status.Get_source(), tag=self._tag)
                if _NUMBER.unpack_from(data)[0] == number:
                    return status.Get_source(), data[_NUMBER.size :].decode()
                continue  # of a barrier that has failed
            now = clock.now()
            if now > deadline:
                return None
            # Other ranks may wait for a bucket of this one before they come here.
            self._group.engine.progress()
            look_at_others(clock)
            time.sleep(min(max((now - began) / 16, _SHORTEST_NAP), _LONGEST_NAP))
