"""Process sets: ranks that run operations of Horovod together, apart from all others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.process_group.group import ProcessGroup

NOT_INITIALISED = "Horovod has not been initialized; call hvd.init() first"


class ProcessSet:
    """Ranks that run operations together. Not collective.

    Give it to `init` or `add_process_set`, which registers it, then to operations.

    Args:
        ranks_or_comm: ranks as `rank` counts them, or an mpi4py communicator of them.

    Attributes:
        process_set_id: its number; None while it is not registered.
        ranks: its ranks, sorted; None for a communicator that is not registered.
        mpi_comm: the communicator that it was made from.

    Raises:
        ValueError: `ranks_or_comm` is neither.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: MPI.Comm | None = None

    def __init__(self, ranks_or_comm: Sequence[int] | MPI.Comm) -> None:
        if isinstance(ranks_or_comm, Iterable):
            ranks = list(ranks_or_comm)
            if not all(isinstance(rank, int) for rank in ranks):
                raise ValueError(f"a ProcessSet needs ranks or an mpi4py communicator, not {ranks}")
            self.ranks = sorted(set(ranks))
        else:
            from mpi4py import MPI

            if not isinstance(ranks_or_comm, MPI.Comm):
                raise ValueError(
                    "a ProcessSet needs ranks or an mpi4py communicator, not "
                    f"{type(ranks_or_comm).__name__}"
                )
            self.mpi_comm = ranks_or_comm

    @property
    def group(self) -> ProcessGroup | None:
        """The process group of these ranks; None on a rank that is not one of them."""
        return None if self.process_set_id is None else registered(self).group

    def size(self) -> int | None:
        """Return the number of ranks, None if it is not registered. Not collective."""
        return None if self.process_set_id is None else len(registered(self).ranks)

    def rank(self) -> int | None:
        """Return this process's rank in the set, None if it is not registered. Not collective.

        Raises:
            ValueError: this process is not in the set.
        """
        if self.process_set_id is None:
            return None
        ranks, own = registered(self).ranks, table().rank
        if own not in ranks:
            raise ValueError(f"rank {own} is not in process set {self.process_set_id} of {ranks}")
        return ranks.index(own)

    def included(self) -> bool | None:
        """Return whether this process is in the set; None if its ranks are not known."""
        return None if self.ranks is None else table().rank in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


@dataclass
class Registered:
    """What this process has of a registered process set.

    Attributes:
        ranks: its ranks, as `hvd.rank` counts them.
        group: the process group of the ranks; None on others, as what follows.
    """

    ranks: list[int]
    group: ProcessGroup | None = None


@dataclass
class Table:
    """The registered process sets.

    Attributes:
        communicator: of all ranks of Horovod; it belongs to this table.
        rank: this process's rank in it.
        world_ranks: torch.distributed's rank of each of them.
        sets: by number. 0 is all ranks.
    """

    communicator: MPI.Intracomm
    rank: int
    world_ranks: list[int]
    sets: dict[int, Registered] = field(default_factory=dict)
    next_id: int = 0


_table: Table | None = None


def table() -> Table:
    """Return the table of process sets. Not collective.

    Raises:
        ValueError: Horovod is not initialised.
    """
    if _table is None:
        raise ValueError(NOT_INITIALISED)
    return _table


def is_open() -> bool:
    """Return whether Horovod is initialised. Not collective."""
    return _table is not None


def registered(process_set: ProcessSet) -> Registered:
    """Return what this process has of a set. Not collective.

    Raises:
        ValueError: Horovod is not initialised, or the set is not registered.
    """
    known = table().sets.get(
        -1 if process_set.process_set_id is None else process_set.process_set_id
    )
    if known is None:
        raise ValueError(f"{process_set} is not registered; see hvd.add_process_set")
    return known


def open_table(communicator: MPI.Intracomm, process_sets: Sequence[ProcessSet]) -> None:
    """Register all ranks, and `process_sets`. Collective over `communicator`, which it takes."""
    global _table
    import torch.distributed as dist

    world: Any = dist.group.WORLD
    mine, everyone = communicator.Get_group(), world.communicator.Get_group()
    world_ranks = [int(rank) for rank in mine.Translate_ranks(None, everyone)]
    mine.Free()
    everyone.Free()
    _table = Table(communicator, communicator.Get_rank(), world_ranks)
    global_process_set.ranks = list(range(communicator.Get_size()))
    _register(global_process_set)
    for process_set in process_sets:
        add_process_set(process_set)


def close_table() -> None:
    """Forget all process sets and free what belongs to them. Collective over all ranks."""
    global _table
    for number in sorted(table().sets):
        _free(table().sets.pop(number))
    table().communicator.Free()
    _table = None


def _register(process_set: ProcessSet) -> None:
    from mpiddp.torch_internals.versions import new_group_in_order

    made = table()
    ranks = process_set.ranks
    assert ranks is not None
    entry = Registered(ranks)
    if made.rank in ranks:
        import torch.distributed as dist

        world: Any = dist.group.WORLD
        entry.group = new_group_in_order(
            [made.world_ranks[rank] for rank in ranks],
            timeout=world.timeout,
            use_local_synchronization=True,
        )
    process_set.process_set_id = made.next_id
    made.sets[made.next_id] = entry
    made.next_id += 1


def _free(entry: Registered) -> None:
    import torch.distributed as dist

    if entry.group is not None and dist.is_initialized():
        dist.destroy_process_group(entry.group)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set, and return it.

    Collective over all ranks of Horovod, also those that are not in the set.

    Raises:
        ValueError: it has no ranks, a rank that there is not, or the ranks of another set.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _register(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a process set out of use; return whether that was done.

    Collective over all ranks of Horovod. Never done with the set of all ranks.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    entry = table().sets.pop(number)
    process_set.process_set_id = None
    _free(entry)
    return True
