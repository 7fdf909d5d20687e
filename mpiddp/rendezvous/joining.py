"""Processes that come to a job that runs: they run its command, and their world is the job's.

MPI_Comm_spawn starts them (MPI 4.1, section 11.8), or a launcher does: a job of its own that
connects (meeting.py). A communicator of all is merged from both sides where the one that comes
calls `init_process_group`. If another rank is lost before all have made the new world, the ones
that come end, and the others begin again.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpiddp import settings
from mpiddp.mpi import communicators, losses
from mpiddp.rendezvous import meeting

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["bring", "communicator", "folder_to_join", "is_joining", "settle"]

# Given to the Python of a process that comes: no variable, which its own children would inherit.
_OPTION = "mpiddp-joins"

# What a process that mpirun started has from the user's shell, and one that is spawned may lack.
# Not all: a command line can be read by others on the node.
_PASSED_ON = (
    "GLOO_", "HOROVOD_", "KMP_", "LD_LIBRARY_PATH", "MKL_", "MPIDDP_", "OMP_", "OPENBLAS_", "PATH",
    "PYTHON", "TORCH_", "UCX_", "VIRTUAL_ENV",
)  # fmt: skip
_SECRET = re.compile("KEY|PASSWORD|SECRET|TOKEN")

_joined: MPI.Intracomm | None = None
_settled = False


def is_joining() -> bool:
    """Return whether this process was started to come to a job that runs. Not collective."""
    return _OPTION in sys._xoptions or settings.JOIN.read() is not None


def folder_to_join() -> Path | None:
    """Return where the job is that this one is about to come to, else None. Not collective."""
    if _OPTION in sys._xoptions or _joined is not None or _settled:
        return None
    return settings.JOIN.read_before_init()


def communicator(ranks: MPI.Intracomm | None = None) -> MPI.Intracomm:
    """Return the communicator of the job that this process has come to.

    Collective, at the first call, with the `bring` or `meeting.let_in` of the others. It is there
    until `settle`.

    Args:
        ranks: all that come together; needed at the first call where `folder_to_join` is one.

    Raises:
        RuntimeError: after that; or the job at MPIDDP_JOIN does not let this one in.
    """
    global _joined
    from mpi4py import MPI

    if _settled:
        raise RuntimeError(
            "a process that came to a job has left its world, and has no other: give a communicator"
        )
    if _joined is None:
        try:
            if _OPTION in sys._xoptions:
                parent = MPI.Comm.Get_parent()
                _joined = communicators.note(parent.Merge(high=True))
                parent.Free()
            else:
                folder = settings.JOIN.read()
                assert folder is not None
                assert ranks is not None
                _joined = communicators.note(meeting.come(folder, ranks))
        except MPI.Exception as error:
            settle(error)
            raise
    return _joined


def settle(error: BaseException | None) -> None:
    """End this process unless all have made the world that it comes to.

    Collective over that world, once. Harmless in a process that does not come.

    Args:
        error: what this process met as it made it.
    """
    global _settled
    if not is_joining() or _settled or (error is not None and not losses.is_loss(error)):
        return
    if _joined is None and error is None:
        return  # the program gave a communicator of its own: it comes to nobody
    if error is None and _joined is not None:
        _settled = losses.agree(_joined, True)
        if _settled:
            _joined.Free()
    if not _settled:
        print(
            "mpiddp: a process that came to the job ends: a rank was lost meanwhile",
            file=sys.stderr,
            flush=True,
        )
        os._exit(0)


def bring(ranks: MPI.Intracomm, count: int) -> MPI.Intracomm:
    """Start processes with this one's command, and return a communicator of all.

    Collective over `ranks`, which come first in it. Ends when those processes call
    `init_process_group`.

    Raises:
        MPI.Exception: the MPI or the launcher starts none, or a rank was lost meanwhile.
    """
    from mpi4py import MPI

    variables = [
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(_PASSED_ON) and not _SECRET.search(name)
    ]
    python = [sys.executable, "-X", _OPTION, *_arguments()]
    info = MPI.Info.Create()
    info.Set("wdir", os.getcwd())
    # The place of a rank that was lost counts as taken.
    info.Set("map_by", "slot:OVERSUBSCRIBE")
    try:
        others = ranks.Spawn("env", [*variables, *python], maxprocs=count, info=info)
    finally:
        info.Free()
    joined = others.Merge(high=False)
    others.Free()
    return joined


def _arguments() -> list[str]:
    """Return what followed the name of Python in the command of this process."""
    given = sys.orig_argv[1:]
    return given[2:] if given[:2] == ["-X", _OPTION] else given
