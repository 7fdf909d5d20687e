"""Which of libfabric's providers MPICH may take."""

from __future__ import annotations

import os

from mpiddp.mpi.library import linked_version
from mpiddp.mpi.running_library import identify

__all__ = ["leave_out_sockets"]


def leave_out_sockets() -> None:
    """Let MPICH not take libfabric's provider "sockets". Not collective.

    For before MPI_Init. Where there is no fast network, MPICH 5.0 over OFI takes it rather than
    "tcp", which has fewer features. It keeps a message of up to 255 bytes until its sender calls
    MPI again: a rank that waits for a broadcast waits until the first rank has computed what comes
    next, and at the end of a job some messages were lost (3 of 131 jobs). It is deprecated, and
    Open MPI leaves it out, too. What the user has set stays.
    """
    if identify(linked_version()).vendor == "MPICH":
        os.environ.setdefault("FI_PROVIDER", "^sockets")
