"""Parameters that the ranks of a node share: where they lie, and who may read and write when.

Note [Whose turn it is]
~~~~~~~~~~~~~~~~~~~~~~~
All ranks of a node read the same parameters in forward and backward, and each rank steps its part
of them. So
* a rank that comes to its optimizer's step is done with reading, and says so; it writes when all
  ranks of the node have come;
* when it has written it says so again, and waits for all ranks: nobody reads what is half stepped,
  also not through a reference that the program has kept. The parts are of one size, so that is
  short, and ranks that load data or write logs afterwards hold nobody up.
Both are rounds of one NodeMeeting. A rank that fails while it writes, or leaves a meeting with an
exception, as of a signal handler, marks the meeting: it could not be told any more which round it
is in. From then on every rank raises where it would have read, see shared_reads.py: parameters of
which only some parts are stepped are never used, nor saved.

Note [Changes of the program]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Programs change parameters themselves: they swap averages in and out, clamp, load. Each rank does
so, as with a replica of its own. So the program's tensors lie in a mapping in which what a process
writes stays its own, page by page, and only the optimizer writes to the file below it, through
another mapping. What a rank has changed it reads from then on, and nobody else does, as in plain
DistributedDataParallel: no line of the program has to be another. When the ranks meet for the next
step they compare what they have changed. The same on all ranks goes into the file, and costs memory
no more; changes that differ, with which replicas would be different models from then on, are
refused. A tensor that the program has put in place of a parameter's, through `.data`, is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.ddp import memory_domains, shared_reads
from mpiddp.ddp.mean_scaling import MeanScaling
from mpiddp.ddp.node_parts import BucketLayout, lay_out
from mpiddp.ddp.shared_piece import Piece, at, bytes_of, on_its_own
from mpiddp.ddp.step_followers import StepFollowers
from mpiddp.engine import forks
from mpiddp.mpi import nodes
from mpiddp.transports.node_meeting import NodeMeeting
from mpiddp.transports.shared_memory import Mapping, allocate_common

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.ddp.torch_reducer import TorchReducer
    from mpiddp.process_group.group import ProcessGroup

# Areas begin at a multiple of this, so that a rank's part of a bucket begins at a page.
AREA_BYTES = 1 << 16
# Parameters that are not trained, which no rank steps, lie closer.
ALIGNMENT = 64

# Names in an error.
_SHOWN = 5

# Two digests are one number that a double keeps.
_DIGEST_SHIFT = 16

# Why a rank has failed.
WROTE, WAITED, INTERRUPTED = 1, 2, 3
_WHY = {
    0: "rank {rank} failed",
    WROTE: "rank {rank} failed while it wrote parameters",
    WAITED: "rank {rank} failed: it has waited too long for the other ranks of its node",
    INTERRUPTED: "rank {rank} failed: an exception, as of a signal handler, came while it waited "
    "for the other ranks of its node",
}


class SharedParameters:
    """The parameters of a module in memory that the ranks of a node share.

    Collective. Each node keeps the values of its first rank.

    Args:
        named: all parameters that are to be shared, by name; each lies there only once.
        reducer: of the module; its buckets are not rebuilt any more.
        group: the module's process group.
        domain: a number; ranks of a node with the same one share, see Note [Domains] in
            memory_domains.py. For them "node" is said here.

    Raises:
        OSError: some rank has too little memory, or cannot share it; raised on all ranks.
    """

    # Returns the module's wrapper, or None.
    wrapper: Callable[[], Any]
    # Whether nobody steps them any more.
    has_left = False

    def __init__(
        self,
        named: dict[str, torch.nn.Parameter],
        reducer: TorchReducer,
        group: ProcessGroup,
        domain: int = 0,
    ) -> None:
        reducer.keep_buckets()
        self.reducer = reducer
        self.parameters: list[torch.Tensor] = list(reducer.parameters)
        self.group = group
        self._domain = domain
        self._timeout = group.timeout.total_seconds()
        self._writing = False
        self._pieces: list[weakref.ref[Piece]] = []
        # Whether this is within join(), where other ranks may be without inputs.
        self.is_uneven: Callable[[], bool] = bool
        self.followers = StepFollowers(group)
        with self._node() as node:
            self._meeting = NodeMeeting(node, crowded=nodes.is_crowded(node))
            self._ranks: list[str] = node.allgather(group.me)
            sizes = set(group.allgather_objects(node.Get_size()))
            self.layouts = [
                lay_out(bucket, self.parameters, node.Get_size(), sizes)
                for bucket in reducer.buckets
            ]
        # Of each rank, why it has failed.
        self._reasons = memoryview(self.allocate(8 * self.ranks, ())).cast("B").cast("q")
        self._place(named)
        self._places = {
            index: (bucket.index, position)
            for bucket in reducer.buckets
            for position, index in enumerate(bucket.parameter_indices)
        }
        self.scaling = MeanScaling(self)
        _all.add(self)
        _generation[0] += 1
        self.number = _generation[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # copies of the module have parameters of their own

    @property
    def rank(self) -> int:
        """This rank's number in the node."""
        return self._meeting.rank

    @property
    def ranks(self) -> int:
        """How many ranks the node has."""
        return self._meeting.ranks

    @property
    def across_nodes(self) -> bool:
        """Whether there are other nodes, or domains."""
        return self.group.size() > self.ranks

    @contextmanager
    def _node(self) -> Iterator[MPI.Comm]:
        """Lend a communicator of the node's ranks. Collective."""
        node = memory_domains.ranks_of_domain(self.group.communicator, self._domain)
        try:
            yield node
        finally:
            node.Free()

    # Memory.

    def allocate(self, size: int, ranges: Iterable[tuple[int, int]]) -> Mapping:
        """Return memory of zeros that the node's ranks share. Collective.

        Args:
            size: in bytes, the same on all ranks of the node.
            ranges: first and last byte (exclusive) of what this rank will write.

        Raises:
            OSError: some rank of any node has none; raised on all ranks.
        """
        mapping, problem = None, ""
        with self._node() as node:
            try:
                mapping = allocate_common(node, max(size, 1), ranges)
            except OSError as error:
                problem = str(error)
        problems = [text for text in self.group.allgather_objects(problem) if text]
        if mapping is None or problems:
            raise OSError(f"no memory to share parameters in: {problems[0]}")
        return mapping

    def share(self, size: int, ranges: Iterable[tuple[int, int]]) -> Piece:
        """Return one of `pieces`, which is yet to be `make_private`. Collective, as `allocate`."""
        piece = Piece(self.allocate(size, ranges))
        self._pieces.append(weakref.ref(piece))
        return piece

    @property
    def pieces(self) -> list[Piece]:
        """Where parameters and the states of optimizers lie, in the order of making."""
        return [piece for piece in (each() for each in self._pieces) if piece is not None]

    def _place(self, named: dict[str, torch.nn.Parameter]) -> None:
        """Move the parameters into shared memory. Collective."""
        starts, ranges, size = [], [], 0
        for layout in self.layouts:
            starts.append(size)
            width = layout.dtype.itemsize
            ranges += [
                (size + start * width, size + stop * width)
                for start, stop, owner in layout.parts()
                if owner == self.rank
            ]
            size += -(-layout.elements * width // AREA_BYTES) * AREA_BYTES
        trained = {id(parameter) for parameter in self.parameters}
        others = {}
        for parameter in named.values():
            if id(parameter) not in trained:
                others[id(parameter)] = (parameter, size)
                if self.rank == 0:
                    ranges.append((size, size + parameter.nbytes))
                size += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
        # See Note [Changes of the program].
        self._piece = self.share(size, ranges)
        self._mapping, self._file = self._piece.shown, self._piece.file
        everything, shown = bytes_of(self._file), bytes_of(self._mapping)
        # What is stepped.
        self.flat = [
            everything[start : start + layout.elements * layout.dtype.itemsize].view(layout.dtype)
            for start, layout in zip(starts, self.layouts, strict=True)
        ]
        places = [
            (self.parameters[index], start + first * layout.dtype.itemsize)
            for start, layout in zip(starts, self.layouts, strict=True)
            for index, first in layout.starts.items()
        ]
        places += others.values()
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._shared = [parameter for parameter, _ in places]
        self._starts = [start for _, start in places]
        with torch.no_grad():
            if self.rank == 0:
                for tensor, start in places:
                    at(everything, start, tensor).copy_(tensor)
            self._meet("construction")
            self._mapping.make_private()
            self._shown_places = [on_its_own(at(shown, start, tensor)) for tensor, start in places]
            for tensor, place in zip(self._shared, self._shown_places, strict=True):
                tensor.data = place

    # Turns, see Note [Whose turn it is].

    def leave(self) -> None:
        """Be used no more; parameters, maybe half stepped, stay where they are. Not collective."""
        self.has_left = True
        self.scaling.forget()
        shared_reads.allow(self._shared)
        _all.discard(self)
        _generation[0] += 1

    def check(self) -> None:
        """Raise RuntimeError if a rank has failed: parameters may not be read. Not collective."""
        if self.has_left or forks.forked():
            return  # the meeting's memory is not there; what the parent has is all there is
        failed = self._meeting.failed
        if failed is None:
            return
        why = _WHY[self._reasons[failed]].format(rank=self._ranks[failed])
        raise RuntimeError(
            f"{why}, and this rank {self.group.me} shares parameters with it. They may be half "
            f"changed, so they are not used any more: start again from the last checkpoint"
        )

    def own_changes(self) -> str:
        """Return what the program has changed on this rank since the last step, in words.

        Not collective. See Note [Changes of the program]. Equal words stand for equal changes.

        Raises:
            RuntimeError: a parameter was converted, or moved to a device.
        """
        self.put_in_place()
        if not self._mapping.has_own_pages():
            return ""
        digest, pages = self._mapping.changes(self._file)
        if not digest:
            self._mapping.make_private()  # as it was before: nothing needs to be its own
            return ""
        names = [
            self._names[id(parameter)]
            for parameter, start in zip(self._shared, self._starts, strict=True)
            if any(low < start + parameter.nbytes and start < high for low, high in pages)
        ]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"{', '.join(names[:_SHOWN])}{more} (digest {digest:016x})"

    def put_in_place(self) -> None:
        """Copy what the program has put in place of a parameter's tensor into it."""
        for parameter, place in zip(self._shared, self._shown_places, strict=True):
            if parameter.data_ptr() == place.data_ptr():
                continue
            if (parameter.shape, parameter.dtype) != (place.shape, place.dtype) or (
                parameter.device != place.device
            ):
                raise RuntimeError(
                    f"rank {self.group.me}: parameter {self._names[id(parameter)]} was changed "
                    f"from {_kind(place)} to {_kind(parameter)}, and the ranks of this node share "
                    f"it: convert or move a module before it is wrapped"
                )
            with torch.no_grad():
                place.copy_(parameter)
                parameter.data = place

    def _take_changes(self) -> None:
        """Let the node have what all of its ranks have changed in the same way. Collective."""
        if self.rank == 0:
            self._mapping.keep_writes(self._file)
        self._meet("a change of parameters")
        self._mapping.make_private()

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name of a parameter in the module. Not collective."""
        return self._names.get(id(parameter), f"one of shape {tuple(parameter.shape)}")

    def exchange(self, number: float, where: str = "an exchange of numbers") -> list[float]:
        """Return the number of each rank of the node, by rank. Collective."""
        self._meet(where, number)
        return self._meeting.numbers_of_all()

    def lies_once(self, index: int, gradient: torch.Tensor) -> bool:
        """Return whether a gradient is the mean that lies once for all ranks. Not collective."""
        number, position = self._places[index]
        bucket = self.reducer.buckets[number]
        return bucket.means is not None and gradient.data_ptr() == bucket.views[position].data_ptr()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Let all ranks of all nodes have rank 0's tensor. Collective."""
        self.group.broadcast([tensor]).wait()

    @contextmanager
    def stepping(
        self, number: int, explain: Callable[[], str], has_changes: bool, whole: bool
    ) -> Iterator[None]:
        """Let each rank of the node write its part of the parameters. Collective.

        Args:
            number: stands for what the step uses, the same on all ranks.
            explain: says how the ranks differ, if numbers do; collective over all ranks.
            has_changes: whether there are `own_changes`, for which `number` stands, too.
            whole: whether this rank steps parts that others own, too.

        Raises:
            RuntimeError: another rank failed, or did not come within the group's timeout; or the
                ranks do not agree on what to do, and then nothing was changed.
        """
        forks.check("step of a NodeOptimizer")
        if self._writing:
            raise RuntimeError(
                f"rank {self.group.me}: step() within writing() would step this rank's private "
                f"copy of the parameters: leave writing() before it"
            )
        self.check()
        problem = ""
        try:
            noted = self.scaling.digest
            if len(set(self.exchange(number ^ noted << _DIGEST_SHIFT, "the optimizer's step"))) > 1:
                if len(set(self.exchange(noted))) > 1:
                    self.scaling.multiply_all()
                    noted = 0
                if len(set(self.exchange(number))) > 1:
                    problem = explain()
            if problem:
                raise RuntimeError(problem)
            self.scaling.multiply_once()
            if noted and whole:
                self._meet("the end of a clip")
            if has_changes:
                self._take_changes()
            yield
            # Autograd sees it where a graph is used that saved a parameter.
            torch.autograd.graph.increment_version(self.parameters)
            self._meet("the end of the optimizer's step")
        except BaseException:
            if not problem:
                self._fail(WROTE)
                shared_reads.refuse(self, self._shared)
            raise

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let the user change parameters, see `DistributedDataParallel.writing`. Collective."""
        if self._writing:
            yield
            return
        forks.check("writing()")
        self._meet("writing()")
        self._writing = True
        try:
            yield
            self._meet("the end of writing()")
            self.put_in_place()
            if self.rank == 0:
                self._mapping.keep_writes(self._file)
        except BaseException:
            self._fail(WROTE)
            raise
        finally:
            self._writing = False
            self._mapping.make_private()
        self._meet("the end of writing()")

    def refuse_in_join(self) -> None:
        """Raise RuntimeError where other ranks may be without inputs. Not collective."""
        if self.is_uneven():
            raise RuntimeError(
                f"rank {self.group.me}: writing() changes parameters on all ranks, and within "
                f"join() some may be without inputs: do it before or after"
            )

    def _meet(self, where: str, number: float = 0) -> None:
        """Wait for all ranks of the node. Collective."""
        self.check()
        try:
            self._meeting.arrive(number)
            if not self._meeting.wait(self._timeout):
                missing = ", ".join(self._ranks[rank] for rank in self._meeting.missing())
                self._fail(WAITED)
                raise RuntimeError(
                    f"rank {self.group.me} has waited {self._timeout:g} s in {where} for rank "
                    f"{missing}, with which it shares its parameters. All ranks of a node must "
                    f"call the same steps"
                )
        except BaseException:
            self._fail(INTERRUPTED)
            raise
        self.check()

    def _fail(self, reason: int) -> None:
        """Let no rank go on."""
        if self._meeting.failed is None:
            self._reasons[self.rank] = reason
            self._meeting.fail()


# Those of this process, and how many there have been.
_all: weakref.WeakSet[SharedParameters] = weakref.WeakSet()
_generation = [0]


def generation() -> int:
    """Return how many modules of this process have shared their parameters. Not collective."""
    return _generation[0]


def all_of_process() -> list[SharedParameters]:
    """Return the shared parameters of this process, in the order of wrapping. Not collective."""
    return sorted(_all, key=lambda each: each.number)


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"


def _nothing() -> None:
    return None


def leave_all() -> None:
    """Leave all of this process, see `SharedParameters.leave`. Not collective."""
    for each in all_of_process():
        each.leave()


__all__ = ["BucketLayout", "SharedParameters", "all_of_process", "generation", "leave_all"]
