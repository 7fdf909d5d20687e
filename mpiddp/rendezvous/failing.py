"""A world that cannot begin: all ranks raise and may begin again, or the job ends."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from mpiddp.mpi import losses, uncaught

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["end_unless_all_fail"]

# Seconds that a rank that cannot start waits for all others to say the same; and between looks.
_PATIENCE = 5.0
_NAP = 0.001


def end_unless_all_fail(communicator: MPI.Intracomm, error: BaseException) -> None:
    """End the job unless all ranks have failed: the others wait for this one, or soon will.

    Collective if all have. Then each raises its own error, and may begin again.
    """
    from mpi4py import MPI

    if communicator.Get_size() == 1 or losses.is_loss(error):
        return
    with contextlib.suppress(MPI.Exception):
        if isinstance(error, Exception) and _all_are_here(communicator):  # not Ctrl-C
            return
    uncaught.end_job(error)


def _all_are_here(communicator: MPI.Intracomm) -> bool:
    """Return whether all ranks call this within some seconds. Collective if they do.

    By messages: others may be in a collective, whose messages Open MPI would take for a barrier's.
    """
    from mpi4py import MPI

    nothing = [bytearray(), MPI.BYTE]
    others = range(1, communicator.Get_size()) if communicator.Get_rank() == 0 else [0]
    deadline = time.monotonic() + _PATIENCE

    def ended(requests: list[MPI.Request]) -> bool:
        while not MPI.Request.Testall(requests):
            if time.monotonic() > deadline:
                return False
            time.sleep(_NAP)
        return True

    def send() -> bool:
        return ended([communicator.Isend(nothing, rank) for rank in others])

    def receive() -> bool:
        return ended([communicator.Irecv(nothing, rank) for rank in others])

    return receive() and send() if communicator.Get_rank() == 0 else send() and receive()
