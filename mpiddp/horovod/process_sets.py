"""Process sets: ranks that run operations of Horovod together, apart from all others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpiddp.horovod.agreement import Agreement
from mpiddp.horovod.coordinator import Request
from mpiddp.horovod.environment import Settings
from mpiddp.horovod.execution import Submission
from mpiddp.horovod.progress import ProgressThread
from mpiddp.mpi import communicators, losses
from mpiddp.torch_internals.versions import new_group_in_order

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.process_group.group import ProcessGroup

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]

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
        """A process group of these ranks; None on a rank that is not one of them.

        The operations of Horovod do not run on it, so its collectives may be called as on any
        process group: in one order on all ranks.
        """
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
        group: a process group of the ranks, which only its users call; None on other ranks, as
            what follows.
        operations: another one, which runs what the ranks have agreed on.
        communicator: for the messages of the agreement.
        agreement: what this rank has submitted.
    """

    ranks: list[int]
    group: ProcessGroup | None = None
    operations: ProcessGroup | None = None
    communicator: MPI.Intracomm | None = None
    agreement: Agreement | None = None


@dataclass
class Table:
    """The registered process sets.

    Attributes:
        communicator: of all ranks of Horovod; it belongs to this table.
        settings: of Horovod, from the environment.
        thread: moves their operations along.
        rank: this process's rank.
        world_ranks: torch.distributed's rank of each rank.
        sets: by number. 0 is all ranks.
        next_id: the number of the next set.
    """

    communicator: MPI.Intracomm
    settings: Settings
    thread: ProgressThread
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


def agreement_of(process_set: ProcessSet, what: str) -> Agreement:
    """Return the agreement of a set that this process is in. Not collective.

    Raises:
        ValueError: Horovod is not initialised, the set is not registered, or this process is not
            in it.
    """
    entry = registered(process_set)
    if entry.agreement is None:
        raise ValueError(
            f"{what}: rank {table().rank} is not in process set {process_set.process_set_id} of "
            f"ranks {entry.ranks}"
        )
    return entry.agreement


def agreements() -> list[Agreement]:
    """Return the agreements that this process takes part in. Not collective."""
    found = [entry.agreement for entry in table().sets.values()] if is_open() else []
    return [agreement for agreement in found if agreement is not None]


def open_table(communicator: MPI.Intracomm, settings: Settings) -> None:
    """Register the set of all ranks. Collective over `communicator`, which it takes."""
    global _table
    import torch.distributed as dist
    from mpi4py import MPI

    world: Any = dist.group.WORLD
    mine, everyone = communicator.Get_group(), world.communicator.Get_group()
    world_ranks = [int(rank) for rank in mine.Translate_ranks(None, everyone)]
    mine.Free()
    everyone.Free()
    thread = ProgressThread(MPI.Query_thread() == MPI.THREAD_MULTIPLE)
    _table = Table(communicator, settings, thread, communicator.Get_rank(), world_ranks)
    global_process_set.ranks = list(range(communicator.Get_size()))
    _register(global_process_set)


def close_table() -> None:
    """Wait for all ranks, forget all process sets and free what they have.

    Collective over all ranks.
    """
    global _table
    closing = table()
    for number in sorted(closing.sets):
        _leave(closing.sets[number])
    closing.thread.stop()
    for number in sorted(closing.sets):
        _free(closing.sets.pop(number))
    communicators.free(closing.communicator)
    _table = None


def abandon_table() -> None:
    """End at the interpreter's exit: tell coordinators, wait for nobody. Not collective."""
    closing = table()
    for agreement in agreements():
        agreement.say_goodbye()
    closing.thread.stop()


def leave_lost_table() -> None:
    """Forget all process sets where ranks were lost, or have left alone. Not collective.

    A communicator on which a rank has said goodbye stays, unless the MPI has ended what was under
    way: nobody may have received that, and the next communicator can have the same number.
    """
    global _table
    closing = table()
    closing.thread.stop()
    for entry in closing.sets.values():
        said_goodbye = entry.agreement is not None and entry.agreement.closed
        if entry.communicator is not None and (losses.can_go_on() or not said_goodbye):
            communicators.free(entry.communicator)
    communicators.free(closing.communicator)
    _table = None


def _register(process_set: ProcessSet) -> None:
    """Give a set its number, its group and its communicator. Collective over its ranks."""
    import torch.distributed as dist

    here = table()
    ranks = process_set.ranks
    assert ranks is not None
    entry = Registered(ranks)
    if here.rank in ranks:
        world: Any = dist.group.WORLD
        members_in_world = [here.world_ranks[rank] for rank in ranks]
        entry.group, entry.operations = (
            new_group_in_order(
                members_in_world, timeout=world.timeout, use_local_synchronization=True
            )
            for _ in range(2)
        )
        everyone = here.communicator.Get_group()
        members = everyone.Incl(ranks)
        entry.communicator = communicators.note(here.communicator.Create_group(members))
        members.Free()
        everyone.Free()
        entry.agreement = Agreement(
            entry.communicator, ranks, entry.operations, here.settings, here.thread.wake
        )
        here.thread.add(entry.agreement)
    process_set.process_set_id = here.next_id
    here.sets[here.next_id] = entry
    here.next_id += 1


def _leave(entry: Registered) -> None:
    if entry.agreement is not None:
        entry.agreement.leave()
        table().thread.remove(entry.agreement)


def _free(entry: Registered) -> None:
    import torch.distributed as dist

    if entry.communicator is not None:
        communicators.free(entry.communicator)
    for group in (entry.operations, entry.group):
        # The user may have ended torch.distributed before.
        if group is not None and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def _agree(what: str, detail: str) -> None:
    """Wait until all ranks of Horovod say the same. Collective over them."""
    agreement = agreement_of(global_process_set, what)
    submission = Submission(Request(what, what, detail=detail))
    agreement.submit(submission)
    agreement.wait(submission)
    if submission.error is not None:
        raise submission.error


def _known_ranks(process_set: ProcessSet) -> list[int]:
    """Return the ranks of a set that is to be registered."""
    size = len(table().world_ranks)
    if process_set.ranks is None:
        assert process_set.mpi_comm is not None
        theirs, everyone = process_set.mpi_comm.Get_group(), table().communicator.Get_group()
        ranks = sorted(int(rank) for rank in theirs.Translate_ranks(None, everyone))
        theirs.Free()
        everyone.Free()
    else:
        ranks = process_set.ranks
    if not ranks or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"a process set needs ranks from 0 to {size - 1}, not {ranks}")
    return ranks


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set, and return it.

    Collective over all ranks of Horovod, also those that are not in the set. Unlike Horovod this
    needs no HOROVOD_DYNAMIC_PROCESS_SETS.

    Raises:
        ValueError: it has no ranks, a rank that there is not, or the ranks of another set.
        NotImplementedError: it is made from a communicator, which only its ranks know; `init`
            takes such sets.
        HorovodInternalError: the ranks add different sets.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.ranks is None:
        raise NotImplementedError(  # ranks outside of the communicator cannot know its ranks
            "a process set of an MPI communicator can only be registered by hvd.init(); give ranks"
        )
    ranks = _known_ranks(process_set)
    _agree("add_process_set", f"ranks {ranks}")
    if ranks in (entry.ranks for entry in table().sets.values()):
        raise ValueError(f"there is a process set of ranks {ranks} already")
    _register(process_set)
    return process_set


def add_first_process_sets(process_sets: Sequence[ProcessSet]) -> None:
    """Register the process sets that `init` was given. Collective over all ranks.

    Each rank names the same sets in the same order; of a set made from a communicator only its
    own ranks need to know.

    Raises:
        ValueError: on all ranks: a set is wrong on one.
        HorovodInternalError: the ranks were given different sets.
    """
    everyone = table().communicator
    named: list[list[int]] = []
    problem = ""
    for process_set in process_sets:
        try:
            ranks = _known_ranks(process_set)
        except ValueError as error:
            problem = str(error)
            break
        if ranks in named or ranks == global_process_set.ranks:
            problem = f"process_sets has two sets of ranks {ranks}; all ranks are one already"
            break
        named.append(ranks)
    problems = [text for text in everyone.allgather(problem) if text]
    if problems:
        raise ValueError(problems[0])
    _agree("init", f"process sets {named}")
    for process_set, ranks in zip(process_sets, named, strict=True):
        process_set.ranks = ranks
        _register(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a process set out of use; return whether that was done.

    Collective over all ranks of Horovod. Never done with the set of all ranks. Operations of the
    set that wait for other ranks fail.

    Raises:
        HorovodInternalError: the ranks remove different sets.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    entry = registered(process_set)
    _agree("remove_process_set", f"set {number} of ranks {entry.ranks}")
    _leave(entry)
    del table().sets[number]
    process_set.process_set_id = None
    _free(entry)
    return True
