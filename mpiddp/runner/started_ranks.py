"""Run a function that a script wants started as its ranks in the ranks that MPI has started.

Note [The ranks are there already]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A script with `mp.spawn` has one parent on each node, and the parent starts the ranks. Under
`mpirun python -m mpiddp` every rank runs the script, so every rank is parent and child in one
process: it calls the function itself, with its own index. What the script can see of a parent is
kept where that is possible:

- The children of one parent get the same arguments, in copies. So a node's ranks get those of its
  lowest rank: a free port, a folder's name or a random seed is one value. Tensors on the CPU are
  shared with the parent; here each rank's own tensor takes the values of the lowest rank's and is
  passed on, so that the parent sees what its own child has done to it.
- The parent goes on when all of its children have ended. So the ranks meet after the function.
- A child's process group ends with the child. So one that was left behind is destroyed.
- A child that fails ends the others, and the parent raises. Ranks cannot be ended without the job.
  So if all ranks come to the end of the function soon, all raise; otherwise the job ends.
"""

from __future__ import annotations

import array
import contextlib
import io
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpiddp.mpi import nodes
from mpiddp.runner.program import without_own_frames

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Failure", "Outcome", "Place", "StartedRanks"]

# Seconds that a rank whose function failed waits for the others to end theirs, too.
_PATIENCE = 2.0
# Seconds after which a rank says that it waits for others to call what it has called.
_LATE = 60.0
_LONGEST_NAP = 0.01


@dataclass(frozen=True)
class Place:
    """This process among those that a script asks for.

    Attributes:
        index: its number among them.
        in_job: whether they are all ranks of the job; otherwise they are those of this node.
    """

    index: int
    in_job: bool


@dataclass(frozen=True)
class Failure:
    """How the function ended on the lowest rank where it failed.

    Attributes:
        rank: that rank.
        index: the index that it had among the processes that the script asked for.
        local_rank: its rank on its node.
        process_id: its process.
        text: its traceback, as printed; "" if it called sys.exit.
        exit_code: what it gave to sys.exit; 1 if it raised.
    """

    rank: int
    index: int
    local_rank: int
    process_id: int
    text: str
    exit_code: int


@dataclass(frozen=True)
class Outcome:
    """What came of a function that all ranks called.

    Attributes:
        ranks: the ranks whose processes the script would have started with this one.
        process_ids: of these ranks.
        values: what these ranks returned; empty after a failure.
        failure: of some rank of the job, the same on all; None if there was none.
    """

    ranks: tuple[int, ...]
    process_ids: tuple[int, ...]
    values: tuple[Any, ...]
    failure: Failure | None


class StartedRanks:
    """The ranks of this job, as what a script's own launcher would start.

    Args:
        communicator: of all ranks, for this object alone.
        topology: this process's place among them.
        end_job: prints an exception and ends the job.
    """

    def __init__(
        self,
        communicator: MPI.Intracomm,
        topology: nodes.Topology,
        end_job: Callable[[BaseException], object],
    ) -> None:
        self.topology = topology
        self._communicator = communicator
        self._end_job = end_job
        self._process_id = os.getpid()
        self._running = False
        # The process group that a function left when it failed.
        self._left_group: dist.ProcessGroup | None = None

    def may_launch(self) -> bool:
        """Return whether a call that starts processes now would launch the ranks. Not collective.

        It would not in a process that a rank started, within a function that was launched, or when
        the ranks have a process group already.

        Raises:
            RuntimeError: that process group was left behind by a launched function that failed.
        """
        if self._running or os.getpid() != self._process_id:
            return False
        if dist.is_initialized() and self._left_group is dist.group.WORLD:
            raise RuntimeError(
                f"rank {self.topology.rank}: the function that the script launched before failed, "
                f"and left its process group; it cannot launch another one"
            )
        return not dist.is_initialized()

    def place_among(self, count: int, name: str) -> Place:
        """Return this process's place among `count` processes that the script asks for.

        Not collective.

        Args:
            count: the number of all ranks, or of those on this node.
            name: what the script called, for the message.

        Raises:
            ValueError: it is another number.
        """
        if count == self.topology.world_size:
            return Place(self.topology.rank, True)
        if count == self.topology.local_world_size:
            return Place(self.topology.local_rank, False)
        raise ValueError(self.refusal(name, f"{count} process{'es' * (count != 1)}", count))

    def refusal(self, name: str, asked: str, count: int) -> str:
        """Return the words that refuse to start other processes than MPI did. Not collective."""
        topology = self.topology
        here = ""
        if topology.node_count > 1:
            here = f" on {topology.node_count} nodes, {topology.local_world_size} of them on this"
        hint = f"start the script with mpirun -n {count}, or let it ask for {topology.world_size}"
        if not count:
            hint = f"let the script ask for {topology.world_size} (it may have counted GPUs)"
        return (
            f"rank {topology.rank}: {name} was asked for {asked}, but MPI started "
            f"{topology.world_size}{here}, and python -m mpiddp starts none itself: {hint}. If "
            f"these processes are not to be ranks, run python -m mpiddp --keep-spawn"
        )

    def run(self, function: Callable[..., Any], place: Place, arguments: Sequence[Any]) -> Outcome:
        """Call ``function(*arguments)`` here, as all ranks do, and return what came of it.

        Collective. See Note [The ranks are there already]. Ends the job if the function fails here
        and other ranks do not come to the end of theirs soon.

        Args:
            function: called once on each rank.
            place: this process's among those that the script asked for.
            arguments: those of the node's lowest rank are used, unless they cannot be pickled.
        """
        self._running = True
        try:
            return self._run(function, place, arguments)
        finally:
            self._running = False

    def _run(self, function: Callable[..., Any], place: Place, arguments: Sequence[Any]) -> Outcome:
        before = dist.group.WORLD
        late = "mpiddp: rank %d waits for all ranks to start what the script launches"
        _wait(self._communicator.Ibarrier(), say=late % self.topology.rank)
        node = nodes.ranks_of_node(self._communicator)
        group = self._communicator if place.in_job else node
        ranks = group.allgather((self.topology.rank, os.getpid()))
        arguments = _arguments_of_lowest(node, arguments)
        value, failure, error = self._call(function, place.index, arguments)
        del arguments
        failure = self._meet(failure, error)
        given = () if failure else group.allgather(value)
        values = tuple(pickle.loads(one) for one in given)  # noqa: S301  # of ranks of this job
        node.Free()
        if dist.group.WORLD is not before:
            if failure is None:
                dist.destroy_process_group()
            else:
                self._left_group = dist.group.WORLD  # there may be work in it that never ends
        numbers, process_ids = zip(*ranks, strict=True)
        return Outcome(numbers, process_ids, values, failure)

    def _call(
        self, function: Callable[..., Any], index: int, arguments: Sequence[Any]
    ) -> tuple[bytes, Failure | None, BaseException | None]:
        """Return the function's value, pickled, or how it failed. Not collective."""
        value, text, code = b"", "", 0
        caught: BaseException | None = None
        try:
            value = pickle.dumps(function(*arguments))
        except SystemExit as error:
            caught = error
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            code &= 0xFF  # what the system keeps of it
            if code and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
            value = pickle.dumps(None)
        except Exception as error:
            caught, code = error, 1
            own = without_own_frames(error.__traceback__)
            text = "".join(traceback.format_exception(type(error), error, own))
        if not code:
            return value, None, None
        topology = self.topology
        failure = Failure(topology.rank, index, topology.local_rank, os.getpid(), text, code)
        return value, failure, caught

    def _meet(self, own: Failure | None, error: BaseException | None) -> Failure | None:
        """Wait until the function has ended on all ranks; return the lowest rank's failure.

        Collective.
        """
        from mpi4py import MPI

        nobody = self.topology.world_size
        failed = array.array("q", [nobody if own is None else self.topology.rank])
        lowest = array.array("q", [nobody])
        request = self._communicator.Iallreduce(
            [failed, MPI.INT64_T], [lowest, MPI.INT64_T], op=MPI.MIN
        )
        if not _wait(request, limit=None if own is None else _PATIENCE):
            assert error is not None
            if not isinstance(error, SystemExit):  # which ends the job by itself
                self._end_job(error)
            raise error
        if lowest[0] == nobody:
            return None
        failure: Failure | None = self._communicator.bcast(own, root=lowest[0])
        return failure


class _Pickler(pickle.Pickler):
    """Pickles arguments without the values of their CPU tensors, which it collects.

    The k-th tensor that it meets becomes the number k.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, Connection):
            raise pickle.PicklingError("a pipe's end stays in its process")
        if not isinstance(obj, torch.Tensor) or obj.device.type != "cpu":
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def _arguments_of_lowest(node: MPI.Comm, arguments: Sequence[Any]) -> Sequence[Any]:
    """Return a copy of the arguments of the node's lowest rank, or the own ones.

    Collective over `node`.
    """
    arguments = tuple(arguments)
    lowest = node.Get_rank() == 0
    file = io.BytesIO()
    pickler = _Pickler(file)
    problem = values = None
    try:
        pickler.dump(arguments)
        values = pickle.dumps([one.detach() for one in pickler.tensors]) if lowest else None
    # Objects raise what they like when they are pickled.
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    everyone = node.allgather(problem)
    problem = next((text for text in everyone if text), None)
    if problem is not None:
        if lowest and node.Get_size() > 1:
            _say(
                f"mpiddp: each rank passes arguments of its own to the function that the script "
                f"launches, and shares nothing through them, because they cannot be copied to "
                f"other processes ({problem})"
            )
        return arguments
    own = pickler.tensors
    if lowest and node.Get_size() > 1 and any(_is_shared(one) for one in own):
        _say(
            "mpiddp: the script launches a function with tensors in shared memory; each rank has "
            "its own, because MPI started the ranks"
        )
    data, values = node.bcast((file.getvalue(), values) if lowest else None)
    tensors = own
    if not lowest:
        received = pickle.loads(values)  # noqa: S301  # of a rank of this job
        tensors = own if _alike(own, received) else received
        if tensors is own:
            with torch.no_grad():
                for mine, theirs in zip(own, received, strict=True):
                    mine.copy_(theirs)
    with contextlib.suppress(Exception):  # such as a manager's, which knows its own children only
        return tuple(_Unpickler(data, tensors).load())
    return arguments


def _is_shared(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _alike(own: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> bool:
    def kinds(tensors: Sequence[torch.Tensor]) -> list[object]:
        return [(one.shape, one.dtype, one.layout) for one in tensors]

    return kinds(own) == kinds(received)


def _wait(request: MPI.Request, limit: float | None = None, say: str = "") -> bool:
    """Return whether `request` completed within `limit` seconds, napping until then.

    Args:
        request: of a nonblocking collective.
        limit: None waits for ever.
        say: printed once if it takes long.
    """
    start, nap = time.monotonic(), 0.0001
    while not request.Test():
        waited = time.monotonic() - start
        if limit is not None and waited > limit:
            return False
        if say and waited > _LATE:
            _say(say)
            say = ""
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)
    return True


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
