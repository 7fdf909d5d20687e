"""A process group of torch.distributed for the ranks of an mpi4py communicator."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch.distributed as dist

from mpiddp.torch_internals.versions import new_group_in_order

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.process_group.group import ProcessGroup

_made: dict[tuple[int, ...], ProcessGroup] = {}


def is_communicator(value: object) -> TypeGuard[MPI.Comm]:
    """Whether `value` is a communicator of mpi4py. Not collective."""
    module = sys.modules.get("mpi4py.MPI")  # importing it would initialise MPI
    return module is not None and isinstance(value, module.Comm)


def group_of(communicator: MPI.Comm) -> ProcessGroup:
    """Return a process group of the ranks of `communicator`, in their order.

    Collective over `communicator`, which it neither keeps nor uses. Communicators of the same
    ranks get the same group; one of all ranks gets the world.

    Raises:
        RuntimeError: there is no process group of mpiddp yet.
        ValueError: it is null or an intercommunicator, or has ranks that are not in the world.
    """
    from mpi4py import MPI

    from mpiddp.process_group.group import ProcessGroup

    world: Any = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(world, ProcessGroup):
        raise RuntimeError("call mpiddp.init_process_group() before DistributedDataParallel")
    if communicator == MPI.COMM_NULL:
        raise ValueError("process_group is MPI.COMM_NULL: this process is not in it")
    if not isinstance(communicator, MPI.Intracomm):
        raise ValueError("process_group is an intercommunicator; merge it first (Intercomm.Merge)")
    members, everyone = communicator.Get_group(), world.communicator.Get_group()
    translated = members.Translate_ranks(None, everyone)
    members.Free()
    everyone.Free()
    ranks = tuple(int(rank) for rank in translated)
    if MPI.UNDEFINED in ranks:
        raise ValueError(
            "process_group is a communicator with ranks that mpiddp.init_process_group() was not "
            "called on"
        )
    if ranks == tuple(range(world.size())):
        return world
    made = _made.get(ranks)
    # Groups are destroyed by all their members or by none.
    if made is None or made not in dist.distributed_c10d._world.pg_map:
        made = new_group_in_order(ranks, timeout=world.timeout, use_local_synchronization=True)
        _made[ranks] = made
    return made
