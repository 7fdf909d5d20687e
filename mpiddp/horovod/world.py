"""Begin and end Horovod, and say where this process stands among its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mpiddp.engine import forks
from mpiddp.horovod import environment, handles
from mpiddp.horovod import process_sets as sets
from mpiddp.horovod.process_sets import ProcessSet
from mpiddp.horovod.timeline import Timeline
from mpiddp.mpi import at_end, communicators
from mpiddp.mpi.nodes import Topology, find_topology
from mpiddp.rendezvous.world import destroy_process_group, init_process_group

if TYPE_CHECKING:
    from mpi4py import MPI

_topology: Topology | None = None
_homogeneous = True
_made_world = False
_timeline: Timeline | None = None
# Whether `init` was ever called here: programs import Horovod to see whether it is there.
has_begun = False


def init(
    comm: Sequence[int] | MPI.Comm | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Begin Horovod. Does nothing if it has begun already.

    Collective over the ranks of `comm`. Uses the world of mpiddp if torch.distributed is
    initialised with it, and makes it otherwise, as `mpiddp.init_process_group` does.

    Args:
        comm: the ranks of Horovod: an mpi4py communicator, or ranks of MPI.COMM_WORLD. None or an
            empty list: all ranks of the world.
        process_sets: sets to register at once. "dynamic" is accepted as in Horovod; sets can be
            added at any time in any case.

    Raises:
        ValueError: `comm` has ranks that there are not, or does not contain this process; or two
            process sets are the same.
        RuntimeError: torch.distributed is initialised with another backend than mpiddp; or what
            `mpiddp.init_process_group` raises.
    """
    global _topology, _homogeneous, _made_world, has_begun
    has_begun = True
    if sets.is_open():
        return
    forks.check("hvd.init")
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(
                f'process_sets must be process sets or "dynamic", not {process_sets!r}'
            )
        process_sets = None
    settings = environment.read()
    environment.name_the_others()
    given = _communicator_of(comm)
    made = not dist.is_initialized()
    if made:
        init_process_group(given)
    world = _world()
    communicator = communicators.note((world.communicator if given is None else given).Dup())
    if given is not None and given is not comm:
        given.Free()
    _made_world = made or _made_world  # before ranks were lost
    _topology = find_topology(communicator)
    per_node = communicator.allgather(_topology.local_world_size)
    _homogeneous = len(set(per_node)) == 1
    sets.open_table(communicator, settings)
    at_end.register(_at_exit)
    try:
        sets.add_first_process_sets(list(process_sets or []))
        if settings.timeline:
            start_timeline(settings.timeline, settings.mark_cycles)
    except Exception:
        shutdown()
        raise


def _world() -> Any:
    from mpiddp.process_group.group import ProcessGroup

    world = dist.group.WORLD
    if not isinstance(world, ProcessGroup):
        raise RuntimeError(
            f"hvd.init() needs torch.distributed on mpiddp, but it is initialised with "
            f"{dist.get_backend()}: call hvd.init() first, or initialise it with mpiddp"
        )
    return world


def _communicator_of(comm: Sequence[int] | MPI.Comm | None) -> Any:
    """Return the communicator that `comm` means; None for all ranks."""
    if comm is None or (isinstance(comm, Iterable) and not list(comm)):
        return None
    from mpi4py import MPI

    from mpiddp.rendezvous.mpi_world import checked_communicator

    if isinstance(comm, MPI.Comm):
        return comm
    everyone = checked_communicator(None)
    ranks = list(comm)
    own, size = everyone.Get_rank(), everyone.Get_size()
    if not all(isinstance(rank, int) and 0 <= rank < size for rank in ranks):
        raise ValueError(f"comm must hold ranks from 0 to {size - 1} of MPI.COMM_WORLD: {ranks}")
    if own not in ranks:
        raise ValueError(
            f"rank {own} of MPI.COMM_WORLD called hvd.init(comm={ranks}) but is not in it"
        )
    group = everyone.Get_group()
    part = group.Incl(ranks)
    try:
        return everyone.Create_group(part)
    finally:
        part.Free()
        group.Free()


def shutdown() -> None:
    """End Horovod; `init` may be called again. Harmless where it has not begun.

    Collective over all ranks of Horovod. Ends torch.distributed only where `init` began it.
    """
    global _topology, _made_world
    if not sets.is_open() or forks.forked():
        return
    at_end.unregister(_at_exit)
    sets.close_table()
    stop_timeline()
    handles.forget_all()
    _topology = None
    made, _made_world = _made_world, False
    if made and dist.is_initialized():
        destroy_process_group()


def end_operations() -> None:
    """Let what other ranks wait for in operations of Horovod fail. Not collective.

    Harmless where Horovod has not begun; it can then only be left, see `leave_lost_world`.
    """
    if sets.is_open():
        sets.abandon_table()


def leave_lost_world() -> None:
    """Free what `init` made, where ranks were lost; `init` may be called again.

    Not collective. torch.distributed stays. Harmless where Horovod has not begun.
    """
    global _topology
    if not sets.is_open():
        return
    at_end.unregister(_at_exit)
    stop_timeline()
    sets.leave_lost_table()
    handles.forget_all()
    _topology = None


def _at_exit() -> None:
    """End without shutdown: nothing collective, the other ranks may be anywhere."""
    if sets.is_open() and not forks.forked():
        sets.abandon_table()
        stop_timeline()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write what happens from now on to a timeline. Not collective; only rank 0 writes one.

    Args:
        file_path: of a file in Chrome's trace format, which is replaced.
        mark_cycles: whether to note each time that operations were decided on, as CYCLE_START.

    Raises:
        ValueError: Horovod is not initialised.
        OSError: the file cannot be written.
    """
    global _timeline
    if _place().rank != 0:
        return
    stop_timeline()
    _timeline = Timeline(file_path, mark_cycles)
    for agreement in sets.agreements():
        agreement.timeline = _timeline


def stop_timeline() -> None:
    """End the timeline, if there is one. Not collective."""
    global _timeline
    for agreement in sets.agreements():
        agreement.timeline = None
    if _timeline is not None:
        _timeline.close()
        _timeline = None


def is_initialized() -> bool:
    """Return whether Horovod has begun. Not collective."""
    return sets.is_open()


def _place() -> Topology:
    if _topology is None:
        raise ValueError(sets.NOT_INITIALISED)
    return _topology


def rank() -> int:
    """Return this process's rank. Not collective. Raises ValueError before `init`."""
    return _place().rank


def size() -> int:
    """Return the number of ranks. Not collective. Raises ValueError before `init`."""
    return _place().world_size


def local_rank() -> int:
    """Return the rank among the ranks of this node. Not collective. ValueError before `init`."""
    return _place().local_rank


def local_size() -> int:
    """Return the number of ranks on this node. Not collective. ValueError before `init`."""
    return _place().local_world_size


def cross_rank() -> int:
    """Return the number of this node. Not collective. Raises ValueError before `init`."""
    return _place().node_rank


def cross_size() -> int:
    """Return the number of nodes. Not collective. Raises ValueError before `init`."""
    return _place().node_count


def is_homogeneous() -> bool:
    """Return whether every node has the same number of ranks. Not collective."""
    _place()
    return _homogeneous
