"""Errors that say that a rank was lost, where the MPI can go on without it (ULFM).

MPI_ERR_PROC_FAILED: a rank that this one waits for has ended. MPI_ERR_REVOKED: another rank has met
that, and has ended what was under way.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from mpiddp.mpi.errors import MPIError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "agree",
    "avoid_shared_memory_of_mpi",
    "can_go_on",
    "is_loss",
    "let_finalize_not_wait",
    "why_not",
]

# What mpirun of Open MPI sets with --with-ft ulfm.
_VARIABLE = "OMPI_MCA_mpi_ft_enable"
# By which components its messages go.
_WAYS = "OMPI_MCA_btl"


def can_go_on() -> bool:
    """Return whether this job survives the loss of a rank. Not collective."""
    return os.environ.get(_VARIABLE, "0") in ("1", "true")


def avoid_shared_memory_of_mpi() -> None:
    """Let Open MPI send by TCP inside a node too, if it survives losses. Not collective.

    For before MPI_Init. Open MPI 5.0.11's messages through shared memory (btl/sm) hang after a
    loss, or crash: in 10 of 18 jobs on a machine with too few cores, by TCP in 2 of 86.
    What the user has set stays, but for a list of what not to use that says nothing of either:
    "^ofi" keeps Open MPI from sleeping for a second at its start.
    """
    given = os.environ.get(_WAYS, "^")
    if can_go_on() and given.startswith("^") and not {"sm", "tcp"} & set(given[1:].split(",")):
        os.environ[_WAYS] = "self,tcp"


def let_finalize_not_wait() -> None:
    """Let MPI_Finalize not wait for ranks that are lost. Not collective.

    Open MPI 5.0 ends it with a PMIx fence, which sometimes waits for them without limit. What says
    otherwise is read before a program knows of mpiddp: --mca async_mpi_finalize 1. So the variable
    behind it is written here; where there is none, nothing happens.
    """
    import ctypes

    with contextlib.suppress(OSError, ValueError):
        library = ctypes.CDLL("libmpi.so.40")
        ctypes.c_bool.in_dll(library, "ompi_async_mpi_finalize").value = True


def why_not() -> str:
    """Return in words why it does not. Not collective."""
    from mpi4py import MPI

    if MPI.get_vendor()[0] != "Open MPI":
        return f"{MPI.get_vendor()[0]} ends a job that loses a rank"
    return "the job was not started by `mpirun --with-ft ulfm` of Open MPI 5"


def is_loss(error: BaseException | None) -> bool:
    """Return whether `error`, or what it came from, is the loss of a rank. Not collective."""
    from mpi4py import MPI

    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MPI.Exception):
            return error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED)
        if isinstance(error, MPIError):
            kind = MPI.Get_error_class(error.code) if error.code else 0
            return kind in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED)
        error = error.__cause__ or error.__context__
    return False


def agree(communicator: MPI.Intracomm, fine: bool) -> bool:
    """Return whether all ranks are fine and none is lost: the same on all. Collective.

    MPI_Comm_agree where the MPI has it.
    """
    from mpi4py import MPI

    if not can_go_on():
        return bool(communicator.allreduce(int(fine), MPI.MIN))
    try:
        return bool(communicator.Agree(int(fine)))
    except MPI.Exception:
        return False
