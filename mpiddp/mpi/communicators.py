"""Make communicators, and remember all that this package has made.

One lost rank must end every wait: a rank that waits in one of them for ranks that live, but have
met the loss in another, hears of it only when that one is revoked (MPI 5 calls it MPI_Comm_revoke;
Open MPI 5 has it as ULFM).
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from typing import TYPE_CHECKING, Protocol, TypeVar

from mpiddp import settings
from mpiddp.mpi import losses

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Waiting", "duplicate", "free", "known", "note", "revoke_all"]

Communicator = TypeVar("Communicator", bound="MPI.Comm")

_known: list[weakref.ref[MPI.Comm]] = []
# Those that were to be freed.
_revoked: list[MPI.Comm] = []


# What the time between two looks counts at most, in seconds.
_LONGEST = 2.0
# How many ranks speak: one of them may be the one that has not come.
_SPEAKERS = 2
# Seconds for which a rank that knows less lets others raise first: one error ends the job.
_LATER = 5.0
# Seconds between two looks whether all ranks have come.
_NAP = 0.0005
# Before that it looks all the time: a duplicate takes several rounds of messages.
_AWAKE = 0.01


class Waiting(Protocol):
    """What is told of a wait, and asked about it. Not collective."""

    def look(self, waited: float) -> None:
        """Called again and again while this rank waits; `waited` seconds so far."""

    def absent(self, at_last: bool) -> str | None:
        """Return in words who has not come, "" for unknown, None if it is for others to say.

        Args:
            at_last: whether the time is over, and this rank raises.
        """


def duplicate(
    communicator: MPI.Intracomm, seconds: float, what: str, waiting: Waiting | None = None
) -> MPI.Intracomm:
    """Return a duplicate, or raise if not all ranks want one in time.

    Collective. After MPIDDP_STALL_SECONDS the first ranks say what they wait for.

    Args:
        communicator: of the ranks; it may be the user's, so no message is sent in it.
        seconds: how long to wait for the other ranks.
        what: what they have to call.
        waiting: knows who is absent; None: nobody does.

    Raises:
        RuntimeError: some rank did not come.
    """
    if losses.can_go_on():
        return note(communicator.Dup())  # its revocation wakes a Dup
    made, request = communicator.Idup()
    rank, size = communicator.Get_rank(), communicator.Get_size()
    waited, said_after = 0.0, settings.STALL_SECONDS.read_before_init()
    looked = time.monotonic()
    while not request.Test():
        time.sleep(0 if waited < _AWAKE else _NAP)
        now = time.monotonic()
        waited += min(now - looked, _LONGEST)  # more: the job was stopped
        looked = now
        if waiting is not None:
            waiting.look(waited)
        if waited < min(seconds, said_after):
            continue
        words = (
            f"rank {rank} of {size} has waited {waited:.0f} s in {what} for other ranks: not all "
            f"have called it, or they called it with other communicators"
        )
        absent: str | None = "" if rank < _SPEAKERS else None
        if waiting is not None:
            with contextlib.suppress(OSError):
                absent = waiting.absent(waited >= seconds)
        if request.Test():  # they have come meanwhile
            break
        more = f". {absent}" if absent else ""
        if waited >= seconds:
            if absent is None:
                time.sleep(_LATER)
            raise RuntimeError(f"{words}, and the timeout is over{more}")
        said_after *= 2
        if absent is not None:
            with contextlib.suppress(Exception):  # a stream that takes nothing
                print(f"mpiddp: {words}{more}", file=sys.stderr, flush=True)
    return note(made)


def note(communicator: Communicator) -> Communicator:
    """Remember a communicator as long as it is used, and return it. Not collective."""
    _known[:] = [each for each in _known if _used(each())]
    _known.append(weakref.ref(communicator))
    return communicator


def known() -> list[MPI.Comm]:
    """Return those that are not freed. Not collective."""
    found = [each for reference in _known if _used(each := reference()) and each is not None]
    return [each for each in found if not any(each is other for other in _revoked)]


def revoke_all() -> None:
    """Let everything under way in any of them fail, on all ranks. Not collective."""
    from mpi4py import MPI

    for communicator in known():
        with contextlib.suppress(MPI.Exception):
            communicator.Revoke()


def free(communicator: MPI.Comm) -> None:
    """Free a communicator; one that is revoked keeps its number. Collective unless revoked.

    Its messages may still come. Open MPI 5.0.11 takes them for messages of the next communicator
    that gets the number: it ends a rank with status 255 if the sender's rank is not in there, as
    after half of the losses between hosts, or lets it receive what is of another time.
    """
    if losses.can_go_on() and communicator.Is_revoked():
        _revoked.append(communicator)
    else:
        communicator.Free()


def _used(communicator: MPI.Comm | None) -> bool:
    return communicator is not None and bool(communicator)
