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
"""

from __future__ import annotations

import faulthandler
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mpiddp import settings
from mpiddp.ddp import shared_data, shared_reads
from mpiddp.ddp.node_parts import BucketLayout, lay_out
from mpiddp.ddp.partial_means import PartialMeans
from mpiddp.engine import forks
from mpiddp.mpi import nodes
from mpiddp.reducer.bucket import view_like
from mpiddp.transports.node_meeting import NodeMeeting
from mpiddp.transports.shared_memory import Mapping, allocate_common

# Takes what to do and its arguments; returns whether the step has ended with it.
Follower = Callable[[str, tuple[Any, ...]], bool]

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.ddp.torch_reducer import TorchReducer
    from mpiddp.process_group.group import ProcessGroup

# Areas begin at a multiple of this, so that a rank's part of a bucket begins at a page.
AREA_BYTES = 1 << 16
# Parameters that are not trained, which no rank steps, lie closer.
ALIGNMENT = 64

# Why a rank has failed.
WROTE, WAITED, INTERRUPTED = 1, 2, 3
_WHY = {
    0: "rank {rank} failed",
    WROTE: "rank {rank} failed while it wrote parameters",
    WAITED: "rank {rank} failed: it has waited too long for the other ranks of its node",
    INTERRUPTED: "rank {rank} failed: an exception, as of a signal handler, came while it waited "
    "for the other ranks of its node",
}


class SharedParameters(PartialMeans):
    """The parameters of a module in memory that the ranks of a node share.

    Collective. Each node keeps the values of its first rank.

    Args:
        named: all parameters that are to be shared, by name; each lies there only once.
        reducer: of the module; its buckets are not rebuilt any more.
        group: the module's process group.

    Raises:
        OSError: some rank has too little memory, or cannot share it; raised on all ranks.
    """

    def __init__(
        self, named: dict[str, torch.nn.Parameter], reducer: TorchReducer, group: ProcessGroup
    ) -> None:
        reducer.keep_buckets()
        self.reducer = reducer
        self.parameters: list[torch.Tensor] = list(reducer.parameters)
        self.group = group
        self._timeout = group.timeout.total_seconds()
        self._debug = settings.DEBUG.read() > 0
        if self._debug and not faulthandler.is_enabled():
            faulthandler.enable()  # says in which line a page was written that must not be
        self._writing = False
        self._whole_at = [0] * len(self.parameters)
        self._versions_then = []
        self._hooks = []
        # Whether this is within join(), where other ranks may be without inputs.
        self.is_uneven: Callable[[], bool] = bool
        # Do on a rank without inputs what an optimizer does on the others, see UnevenInputs.
        self.followers: list[weakref.WeakMethod[Follower]] = []
        with self._node() as node:
            self._meeting = NodeMeeting(node, crowded=nodes.is_crowded(node))
            self._ranks: list[str] = node.allgather(group.me)
            self.layouts = [
                lay_out(bucket, self.parameters, node.Get_size()) for bucket in reducer.buckets
            ]
        # Of each rank, why it has failed.
        self._reasons = memoryview(self.allocate(8 * self.ranks, ())).cast("B").cast("q")
        self._place(named)

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
        """Whether there are other nodes."""
        return self.group.size() > self.ranks

    @contextmanager
    def _node(self) -> Iterator[MPI.Comm]:
        """Lend a communicator of the node's ranks. Collective."""
        node = nodes.ranks_of_node(self.group.communicator)
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
        self._mapping = self.allocate(size, ranges)
        everything = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.flat = [
            everything[start : start + layout.elements * layout.dtype.itemsize].view(layout.dtype)
            for start, layout in zip(starts, self.layouts, strict=True)
        ]
        places: list[tuple[torch.Tensor, torch.Tensor, int]] = [
            (self.parameters[index], flat, start)
            for flat, layout in zip(self.flat, self.layouts, strict=True)
            for index, start in layout.starts.items()
        ]
        for other, start in others.values():
            part = everything[start : start + other.nbytes].view(other.dtype)
            places.append((other, part, 0))
        with torch.no_grad():
            if self.rank == 0:
                for tensor, flat, start in places:
                    view_like(flat, start, tensor).copy_(tensor)
            self._meet("construction")
            for tensor, flat, start in places:
                tensor.data = _on_its_own(view_like(flat, start, tensor))
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._shared = [parameter for parameter, _, _ in places]
        self._addresses = [parameter.data_ptr() for parameter in self._shared]
        self._note_versions()
        shared_data.show_changes(self, self._shared)
        self._protect()

    # Turns, see Note [Whose turn it is].

    def check(self) -> None:
        """Raise RuntimeError if a rank has failed: parameters may not be read. Not collective."""
        if forks.forked():
            return  # the meeting's memory is not there; what the parent has is all there is
        failed = self._meeting.failed
        if failed is None:
            return
        why = _WHY[self._reasons[failed]].format(rank=self._ranks[failed])
        raise RuntimeError(
            f"{why}, and this rank {self.group.me} shares parameters with it. They may be half "
            f"changed, so they are not used any more: start again from the last checkpoint"
        )

    def check_unwritten(self) -> None:
        """Raise RuntimeError if a parameter was changed where that is forbidden. Not collective."""
        self.check()
        versions = [parameter._version for parameter in self._shared]
        if versions == self._versions or self._writing or forks.forked():
            return
        number = next(n for n, version in enumerate(versions) if version != self._versions[n])
        name = self._names[id(self._shared[number])]
        raise RuntimeError(
            f"rank {self.group.me}: parameter {name} was changed in place, and the ranks of "
            f"this node share it, so each of them has changed it. Step it with "
            f"mpiddp.optim.NodeOptimizer, and do other changes in `with model.writing():`"
        )

    def check_places(self) -> None:
        """Raise RuntimeError if a parameter lies somewhere else by now. Not collective."""
        for parameter, address in zip(self._shared, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise RuntimeError(
                    f"rank {self.group.me}: parameter {self._names[id(parameter)]} does not "
                    f"lie in the memory that the ranks of this node share any more: convert or "
                    f"move a module before it is wrapped, and leave `.data` alone"
                )

    @property
    def is_writing(self) -> bool:
        """Whether this rank changes a private copy."""
        return self._writing

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name of a parameter in the module. Not collective."""
        return self._names.get(id(parameter), f"one of shape {tuple(parameter.shape)}")

    def exchange(self, number: float) -> list[float]:
        """Return the number of each rank of the node, by rank. Collective."""
        self._meet("an exchange of numbers", number)
        return self._meeting.numbers_of_all()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Let all ranks of all nodes have rank 0's tensor. Collective."""
        self.group.broadcast([tensor]).wait()

    @contextmanager
    def stepping(self, number: int, refused: str, explain: Callable[[], str]) -> Iterator[None]:
        """Let each rank of the node write its part of the parameters. Collective.

        Args:
            number: stands for what the step uses, the same on all ranks.
            refused: why this cannot be stepped.
            explain: says how the ranks differ, if numbers do; collective over all ranks.

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
        self.check_unwritten()
        self.check_places()
        self.check()
        problem = ""
        try:
            self._meet("the optimizer's step", self.asks | number << 2)
            told = [int(number) for number in self._meeting.numbers_of_all()]
            problem = self.agree_on_means(told) or self._compare(told, refused, explain)
            if problem:
                raise RuntimeError(problem)
            if self._debug:
                self._mapping.allow_writes(True)
            yield
            self._protect()
            # Autograd sees it where a graph is used that saved a parameter.
            torch.autograd.graph.increment_version(self.parameters)
            self._note_versions()
            self._stepped = True
            self._meet("the end of the optimizer's step")
        except BaseException:
            if not problem:
                self._fail(WROTE)
                shared_reads.refuse(self, self._shared)
            raise

    def _compare(self, told: list[int], refused: str, explain: Callable[[], str]) -> str:
        if len({number >> 2 for number in told}) > 1:
            return explain()
        return f"rank {self.group.me}: {refused}" if refused else ""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let the user change parameters, see `DistributedDataParallel.writing`. Collective."""
        if self._writing:
            yield
            return
        self.begin_writing()
        try:
            yield
        except BaseException:
            self._fail(WROTE)
            self._end_private()
            raise
        self.end_writing()

    def begin_writing(self) -> None:
        """Let this rank change a private copy from now on. Collective."""
        # No check for changes: torch.distributed.checkpoint loads in place before load_state_dict.
        forks.check("writing()")
        self._meet("writing()")
        self._mapping.make_private()
        self._writing = True

    def end_writing(self, raised: bool = False) -> None:
        """Let all ranks have what the first rank of the node has written. Collective.

        Args:
            raised: whether this rank could not write all of it.

        Raises:
            RuntimeError: some ranks could, and others could not. The parameters are as before.
        """
        try:
            self._meet("the end of writing()", raised)
            failed = [rank for rank, each in enumerate(self._meeting.numbers_of_all()) if each]
            if failed and len(failed) < self.ranks:
                raise RuntimeError(
                    f"rank {self.group.me}: a load into parameters that the ranks of this node "
                    f"share raised on rank {self._world_rank(failed[0])}, and not on all ranks"
                )
            if self.rank == 0:
                self._mapping.keep_writes()
        except BaseException:
            self._fail(WROTE)
            raise
        finally:
            self._end_private()
        self._note_versions()
        self._meet("the end of writing()")

    def _end_private(self) -> None:
        self._writing = False
        self._mapping.share_again()
        self._protect()

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

    def _world_rank(self, rank: int) -> str:
        return self._ranks[rank]

    def _note_versions(self) -> None:
        self._versions = [parameter._version for parameter in self._shared]

    def _protect(self) -> None:
        if self._debug:
            self._mapping.allow_writes(False)

    def step_for_others(self) -> None:
        """Step this rank's part where it has no inputs any more. Collective with their step."""
        left = {number for number, each in enumerate(self.followers) if each() is not None}
        nothing: Any = None
        while left:
            told = self.group.allgather_objects(nothing)
            number, what, arguments = next(each for each in told if each is not None)
            follow = self.followers[number]()
            if follow is not None and follow(what, arguments):
                left.discard(number)

    def tell_followers(self, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        """Let ranks without inputs do what this rank will do. Collective.

        Args:
            number: of the follower.
            what: to do.
            arguments: for it.
        """
        self.group.allgather_objects((number, what, arguments))


def _on_its_own(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the memory of a view whose storage has nothing else.

    Otherwise whoever saved one parameter would save all of them.
    """
    if not view.numel():
        return view.detach()
    start = view.storage_offset() * view.itemsize
    memory = view.untyped_storage()[start : start + view.nbytes]
    tensor = torch.empty(0, dtype=view.dtype)
    tensor.set_(memory, 0, view.size(), view.stride())
    return tensor


def _nothing() -> None:
    return None


__all__ = ["BucketLayout", "SharedParameters"]
