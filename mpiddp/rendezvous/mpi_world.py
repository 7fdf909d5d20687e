"""Initialise MPI, and refuse to start if the launcher or the MPI does not fit."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import socket
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from mpiddp import launchers, settings
from mpiddp.mpi import at_end, start_and_end, uncaught
from mpiddp.mpi.compatibility import refuse_two_libraries
from mpiddp.mpi.library import linked_version
from mpiddp.mpi.running_library import identify, mapped_libraries
from mpiddp.rendezvous import joining, programs, worlds_apart
from mpiddp.system import cores, rank_signs

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.engine.requests import Requests
    from mpiddp.mpi.nodes import Topology


# How many of the first ranks say that they wait: one of them may be the one that is missing.
_SPEAKERS = 2
# Seconds by which each further rank ends later, so that one speaks before the launcher ends them
# all; longer than its thread naps. The first ranks may be the ones that never come.
_STAGGER = 0.3
_MOST_STAGGERED = 20


def checked_communicator(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """Initialise MPI if nobody has, and return `comm`; for None the job's, usually COMM_WORLD.

    See Note [Jobs of several programs]. COMM_WORLD also where these ranks are about to come to
    another job. Collective where MPI is not initialised. Raises what `init_process_group` raises.
    """
    module = sys.modules.get("mpi4py.MPI")
    begun = module is not None and module.Is_initialized()
    if not begun:
        _refuse_children_of_ranks()
        _refuse_mpirun_of_open_mpi()
    if comm is None and not joining.is_joining():
        worlds_apart.refuse_launchers()
    with contextlib.nullcontext() if begun else _watched_init():
        from mpi4py import MPI

        refuse_two_libraries()
        if not MPI.Is_initialized():
            # The user asked mpi4py not to, by mpi4py.rc; then ending it falls to us as well.
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
            # Registered before _stop_at_exit, so it runs after that.
            atexit.register(MPI.Finalize)
    if MPI.Is_finalized():
        raise RuntimeError("MPI has been finalised; it cannot be initialised twice")
    _watch_finalize(MPI.COMM_WORLD)
    start_and_end.call_before_finalize(at_end.run)
    uncaught.watch_if_initialised()
    if comm is None:
        if joining.is_joining() and joining.folder_to_join() is None:
            return joining.communicator()
        worlds_apart.refuse_separate_worlds(MPI.COMM_WORLD.Get_size())
        return programs.communicator_of_program(MPI.COMM_WORLD)
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"comm must be an mpi4py communicator, not {type(comm).__name__}")
    if comm == MPI.COMM_NULL:
        raise ValueError("comm is MPI.COMM_NULL: this process is not in the communicator")
    if not isinstance(comm, MPI.Intracomm):
        raise ValueError("comm is an intercommunicator; merge it first (Intercomm.Merge)")
    return comm


def _refuse_children_of_ranks() -> None:
    """Raise in a process that a rank has started, such as a data loader's worker by spawn.

    It has the launcher's variables, and would begin MPI in the name of the rank that runs.
    """
    if launchers.told_rank() is None:
        return
    # A forkserver's children have another parent for the system.
    started_by = multiprocessing.parent_process()
    parent = os.getppid() if started_by is None or started_by.pid is None else started_by.pid
    rank = rank_signs.rank_of(parent)
    if rank is not None:
        raise RuntimeError(
            f"init_process_group was called in process {os.getpid()}, which rank "
            f"{rank} (process {parent}) has started: it would begin MPI in "
            f"that rank's name. A data loader's worker, or another process of a rank, takes no "
            f"part in the job; call it under `if __name__ == '__main__':`"
        )


def _refuse_mpirun_of_open_mpi() -> None:
    """Raise in a rank of MPICH or its kin that the mpirun of Open MPI has started.

    MPI_Init would end it, with words about PMI. Where it was built with PMIx, that mpirun fits.
    """
    library = identify(linked_version())
    ours = library.vendor in ("Open MPI", "unknown") or mapped_libraries("libpmix")
    if launchers.is_open_mpi() and not ours:
        raise RuntimeError(
            f"this process was started by the mpirun of Open MPI, and mpi4py runs on {library}, "
            f"which cannot start there. {worlds_apart.launchers_that_fit()}"
        )


def _watched_init() -> AbstractContextManager[None]:
    """Within, this process speaks and ends if MPI_Init takes too long. Not collective."""
    rank = launchers.told_rank() or "?"
    later = _STAGGER * min(int(rank), _MOST_STAGGERED) if rank.isdecimal() else 0.0
    return start_and_end.watched_init(
        f"mpiddp: rank {rank} ({_process()}) has waited in MPI_Init for",
        f"It returns when all processes of the job are in it: one of them has ended before, or is "
        f"not there yet ({settings.START_SECONDS.name} is the time limit, "
        f"{settings.STALL_SECONDS.name}=none: say nothing)",
        settings.STALL_SECONDS.read_before_init(),
        settings.START_SECONDS.read_before_init() + later,
        rank in map(str, range(_SPEAKERS)),
    )


def _watch_finalize(world: MPI.Intracomm) -> None:
    if world.Get_size() > 1 and world.Get_rank() < _SPEAKERS:
        start_and_end.watch_finalize(
            f"mpiddp: rank {world.Get_rank()} ({_process()}) has waited in MPI_Finalize for",
            f"It returns when all ranks of the job are in it: another one still works, hangs or is "
            f"stopped ({settings.STALL_SECONDS.name}=none: say nothing)",
            settings.STALL_SECONDS.read_before_init(),
        )


def _process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _progress_thread_wanted() -> bool:
    return settings.PROGRESS_THREAD.read() is not False


def _make_requests(topology: Topology, threaded: bool) -> Requests:
    from mpiddp.engine.engine import Engine
    from mpiddp.engine.requests import Requests

    threads = torch.get_num_threads()
    has_core = settings.PROGRESS_THREAD.read() is True or cores.are_spare(
        topology.local_core_count, topology.local_world_size, threads
    )
    engine = Engine(threaded=threaded, cores=cores.beside_openmp(threads))
    return Requests(engine, crowded=topology.crowded, thread_has_core=has_core)


def _check_thread_level() -> None:
    from mpi4py import MPI

    names = {
        MPI.THREAD_SINGLE: "THREAD_SINGLE",
        MPI.THREAD_FUNNELED: "THREAD_FUNNELED",
        MPI.THREAD_SERIALIZED: "THREAD_SERIALIZED",
        MPI.THREAD_MULTIPLE: "THREAD_MULTIPLE",
    }
    needed = MPI.THREAD_MULTIPLE if _progress_thread_wanted() else MPI.THREAD_SERIALIZED
    provided = MPI.Query_thread()
    if provided < needed:
        less = f", or set {settings.PROGRESS_THREAD.name}=0, with which THREAD_SERIALIZED is enough"
        error = RuntimeError(
            f"MPI was initialised with {names[provided]}, but mpiddp needs {names[needed]}: let "
            f"the program ask MPI_Init_thread for MPI_THREAD_MULTIPLE, as mpi4py does by itself"
            f"{less if needed == MPI.THREAD_MULTIPLE else ''}"
        )
        uncaught.end_traceback_in_program(error)
        raise error
