"""Errors that say that a rank was lost, where the MPI can go on without it (ULFM).

MPI_ERR_PROC_FAILED: a rank that this one waits for has ended. MPI_ERR_REVOKED: another rank has met
that, and has ended what was under way.
"""

from __future__ import annotations

import os

from mpiddp.mpi.errors import MPIError

__all__ = ["can_go_on", "is_loss", "why_not"]

# What mpirun of Open MPI sets with --with-ft ulfm.
_VARIABLE = "OMPI_MCA_mpi_ft_enable"


def can_go_on() -> bool:
    """Return whether this job survives the loss of a rank. Not collective."""
    return os.environ.get(_VARIABLE, "0") in ("1", "true")


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
