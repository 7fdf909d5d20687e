"""Wait for the parts of a process group's operations, and leave what nobody waits for any more."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from mpiddp.engine.requests import Pending, Requests
from mpiddp.process_group import under_way
from mpiddp.process_group.operation_errors import OperationErrors
from mpiddp.process_group.work import limit_of
from mpiddp.system import running_time

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from mpiddp.process_group.under_way import UnderWay

__all__ = ["OperationWaits"]

# Seconds within which most operations end: until then their time limit is not even looked at.
_SHORT = 5e-3


class OperationWaits(OperationErrors):
    """How a process group waits for other ranks. Not collective."""

    requests: Requests
    under_way: UnderWay
    # Under which operations start.
    starting: threading.Lock
    _communicator: MPI.Intracomm
    # Of the collective that is being started: until when it may last, if its block took long.
    _until: float

    def pending(self, request: Any, call: str, *memory: object) -> Pending:
        """Return what an operation yields for a request that `call` of MPI made; see `Pending`."""
        return Pending(self.requests, request, self._communicator, call, memory)

    def wait_for(self, request: MPI.Request, call: str, name: str, *memory: torch.Tensor) -> None:
        """Wait for what the MPI function `call` began, as a part of the operation `name`.

        Not collective.

        Raises:
            RuntimeError: other ranks did not come within the group's timeout.
        """
        # It keeps the memory if an exception ends the wait.
        pending = self.pending(request, call, *memory)
        seconds = self.timeout.total_seconds()
        if not pending.wait(seconds):
            raise self.timed_out(name, seconds)

    def abandon(self, *memory: object) -> None:
        """Keep memory that MPI may still use though nobody waits any more. Not collective."""
        self.under_way.abandon(*memory)

    def ends(self, pending: Pending, name: str, until: float, number: int = 0) -> bool:
        """Wait for a part of operation `name`; return whether it has ended by the running time.

        Not collective. `number`: which of this group's collectives; 0: a message.

        Raises:
            RuntimeError: another rank has said that the group is broken, or the part has failed.
        """
        while True:
            told = self.state.reason
            left = max(until - running_time.now(), 0.0)
            if pending.wait(min(left, under_way.LAST)):
                return True
            if told:
                raise self._broken_meanwhile(name, number)
            if left <= under_way.LAST:
                return False

    def leave(self, pending: Pending) -> None:
        """Let the engine move something along that nobody waits for. Not collective."""
        self.under_way.leave(pending)

    def wait_until(self, pending: Pending, name: str, limit: float, number: int) -> None:
        """Wait for the first part of a collective that is being started, at most `limit` seconds.

        Not collective. Meanwhile other threads may start operations.

        Raises:
            RuntimeError: other ranks did not come in time, or have broken the group.
        """
        until = 0.0
        self.starting.release()
        try:
            until = self._wait(pending, name, limit, number)
        finally:
            self.starting.acquire()
            self._until = until

    def hurry(self) -> None:
        """Let what is under way end soon: the group is broken. In any thread."""
        self.under_way.hurry()

    def _wait(
        self, pending: Pending, name: str, limit: float, number: int, until: float = 0.0
    ) -> float:
        """Wait for a part of an operation; return when its time is over, 0.0 if that is far."""
        if not pending.wait(_SHORT):
            until = until or running_time.now() + limit - _SHORT
            if not self.ends(pending, name, until, number):
                raise self.timed_out(name, limit, number)
        return until

    def _limit(self, opts: Any) -> float:
        """Return the time limit in seconds: the call's own, or the group's."""
        return limit_of(opts, self.timeout).total_seconds()
