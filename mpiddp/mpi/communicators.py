"""All communicators that this package has made, so that one lost rank can end every wait.

A rank that waits in one of them for ranks that live, but have met the loss in another, hears of it
only when that one is revoked (MPI 5 calls it MPI_Comm_revoke; Open MPI 5 has it as ULFM).
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["known", "note", "revoke_all"]

Communicator = TypeVar("Communicator", bound="MPI.Comm")

_known: list[weakref.ref[MPI.Comm]] = []


def note(communicator: Communicator) -> Communicator:
    """Remember a communicator as long as it is used, and return it. Not collective."""
    _known[:] = [each for each in _known if _used(each())]
    _known.append(weakref.ref(communicator))
    return communicator


def known() -> list[MPI.Comm]:
    """Return those that are not freed. Not collective."""
    return [each for reference in _known if _used(each := reference()) and each is not None]


def revoke_all() -> None:
    """Let everything under way in any of them fail, on all ranks. Not collective."""
    from mpi4py import MPI

    for communicator in known():
        with contextlib.suppress(MPI.Exception):
            communicator.Revoke()


def _used(communicator: MPI.Comm | None) -> bool:
    return communicator is not None and bool(communicator)
