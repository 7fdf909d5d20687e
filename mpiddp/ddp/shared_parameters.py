"""Parameters that the ranks of a node share: where they lie, and who may read and write when.

Note [Whose turn it is]
~~~~~~~~~~~~~~~~~~~~~~~
All ranks of a node read the same parameters in forward and backward, and each rank steps its part
of them. So
* a rank that comes to its optimizer's step is done with reading, and says so; it writes when all
  ranks of the node have come;
* when it has written it says so again, and goes on. Whoever reads next (forward, `state_dict`,
  `parameters`, the next step) waits first for all ranks.
Both are rounds of one NodeMeeting. Between the two, ranks that load data or write logs hold nobody
up. A rank that fails while it writes marks the meeting, and from then on every rank raises where it
would have read: parameters of which only some parts are stepped are never used, nor saved.

Note [Partial means]
~~~~~~~~~~~~~~~~~~~~
With a NodeOptimizer, each rank needs the mean of a gradient only where it steps. So means go to
their owners only, see Note [Means for owners only] in shared.pyx, and what else is in ``.grad`` is
the rank's own gradient. Whoever needs all of it copies the other parts from their owners first
(`complete`). That is done for the user where a backward adds to such gradients.
"""

from __future__ import annotations

import faulthandler
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mpiddp import settings
from mpiddp.ddp import shared_reads
from mpiddp.ddp.node_parts import BucketLayout, lay_out
from mpiddp.engine import forks
from mpiddp.mpi import nodes
from mpiddp.reducer.bucket import view_like
from mpiddp.transports.node_meeting import NodeMeeting
from mpiddp.transports.shared import SharedBuckets
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


class SharedParameters:
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
        self._debug = settings.DEBUG.read()
        if self._debug and not faulthandler.is_enabled():
            faulthandler.enable()  # says in which line a page was written that must not be
        self._pending = False
        self._writing = False
        # Whether some NodeOptimizer wants that, and none wants whole means.
        self._means_to_owners: bool | None = None
        self._bound: list[Any] | None = None
        self._whole_at = [0] * len(self.parameters)
        # Do on a rank without inputs what an optimizer does on the others, see UnevenInputs.
        self.followers: list[weakref.WeakMethod[Follower]] = []
        with self._node() as node:
            self._meeting = NodeMeeting(node, crowded=nodes.is_crowded(node))
            self._ranks: list[int] = node.allgather(group.rank())
            self.layouts = [
                lay_out(bucket, self.parameters, node.Get_size()) for bucket in reducer.buckets
            ]
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
        self._protect()

    # Turns, see Note [Whose turn it is].

    def wait(self) -> None:
        """Wait until the parameters may be read: all ranks of the node have written.

        Not collective: it waits for steps that all ranks have begun.

        Raises:
            RuntimeError: a rank failed while it wrote, or did not come within the group's timeout.
        """
        if forks.forked():
            return  # what the parent has is all there is
        if self._pending:
            self._wait("the optimizer's step")
            self._pending = False
            shared_reads.end(self)
        self._check()

    def check_unwritten(self) -> None:
        """Raise RuntimeError if a parameter was changed where that is forbidden. Not collective."""
        versions = [parameter._version for parameter in self._shared]
        if versions == self._versions or self._writing or forks.forked():
            return
        number = next(n for n, version in enumerate(versions) if version != self._versions[n])
        name = self._names[id(self._shared[number])]
        raise RuntimeError(
            f"rank {self.group.rank()}: parameter {name} was changed in place, and the ranks of "
            f"this node share it, so each of them has changed it. Step it with "
            f"mpiddp.optim.NodeOptimizer, and do other changes in `with model.writing():`"
        )

    def check_places(self) -> None:
        """Raise RuntimeError if a parameter lies somewhere else by now. Not collective."""
        for parameter, address in zip(self._shared, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                raise RuntimeError(
                    f"rank {self.group.rank()}: parameter {self._names[id(parameter)]} does not "
                    f"lie in the memory that the ranks of this node share any more: convert or "
                    f"move a module before it is wrapped, and leave `.data` alone"
                )

    def exchange(self, number: float) -> list[float]:
        """Return the number of each rank of the node, by rank. Collective."""
        self._meet("an exchange of numbers", number)
        return self._meeting.numbers_of_all()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Let all ranks of all nodes have rank 0's tensor. Collective."""
        self.group.broadcast([tensor]).wait()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let each rank of the node write its part of the parameters. Collective.

        Raises:
            RuntimeError: another rank failed, or did not come within the group's timeout.
        """
        forks.check("step of a NodeOptimizer")
        self.check_unwritten()
        self.check_places()
        self._meet("the optimizer's step")
        try:
            if self._debug:
                self._mapping.allow_writes(True)
            yield
            self._protect()
        except BaseException:
            self._meeting.fail()
            raise
        # Autograd sees it where a graph is used that saved a parameter.
        torch.autograd.graph.increment_version(self.parameters)
        self._note_versions()
        self._meeting.arrive()
        self._pending = True
        shared_reads.begin(self)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let the user change parameters, see `DistributedDataParallel.writing`. Collective."""
        if self._writing:
            yield
            return
        # No check for changes: torch.distributed.checkpoint loads in place before load_state_dict.
        forks.check("writing()")
        self._meet("writing()")
        self._mapping.make_private()
        self._writing = True
        try:
            yield
            self._meet("the end of writing()")
            if self.rank == 0:
                self._mapping.keep_writes()
        except BaseException:
            self._meeting.fail()
            raise
        finally:
            self._writing = False
            self._mapping.share_again()
            self._protect()
        self._note_versions()
        self._meet("the end of writing()")

    def _meet(self, where: str, number: float = 0) -> None:
        """Wait for all ranks of the node. Collective."""
        self.wait()
        self._meeting.arrive(number)
        self._wait(where)
        self._check()

    def _wait(self, where: str) -> None:
        if not self._meeting.wait(self._timeout):
            missing = ", ".join(str(self._ranks[rank]) for rank in self._meeting.missing())
            self._meeting.fail()
            raise RuntimeError(
                f"rank {self.group.rank()} has waited {self._timeout:g} s in {where} for rank "
                f"{missing}, with which it shares its parameters. All ranks of a node must call "
                f"the same steps"
            )

    def _check(self) -> None:
        failed = self._meeting.failed
        if failed is not None:
            raise RuntimeError(
                f"rank {self._ranks[failed]} failed while it wrote parameters that this rank "
                f"{self.group.rank()} shares with it. They may be half changed, so they are not "
                f"used any more: start again from the last checkpoint"
            )

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

    # Gradients, see Note [Partial means].

    def send_means_to_owners(self, wanted: bool) -> None:
        """Write means only where they are stepped, if the transport can. Collective.

        Args:
            wanted: False: whole means from now on, also if that was called before, or is later.
        """
        self.complete()
        self._means_to_owners = wanted and self._means_to_owners is not False
        self._bound = None
        self.bind()
        self.note_whole(range(len(self.parameters)))
        self._meet("construction of a NodeOptimizer")

    def bind(self) -> bool:
        """Prepare buckets that are new; return whether they are. Not collective."""
        buckets = self.reducer.buckets
        if buckets is self._bound:
            return False
        self._bound = buckets
        owners = _owner_of_memory(buckets)
        self.sends_to_owners = (
            bool(self._means_to_owners)
            and owners is not None
            and all(bucket.gradient_buffer is None for bucket in buckets)
        )
        if owners is not None:
            owned = [layout.elements * layout.dtype.itemsize for layout in self.layouts]
            owners.send_to_owners(owned if self.sends_to_owners else [0] * len(owned))
        return True

    def note_whole(self, indices: Iterable[int]) -> None:
        """Note that the gradients of these parameters are not partial means. Not collective."""
        for index in indices:
            self._whole_at[index] = self.reducer.reductions

    def has_partial_means(self) -> bool:
        """Whether some gradient is the mean only where this rank steps. Not collective."""
        return (
            self._bound is self.reducer.buckets
            and self.sends_to_owners
            and any(
                at < self.reducer.reductions and parameter.grad is not None
                for at, parameter in zip(self._whole_at, self.parameters, strict=True)
            )
        )

    def complete(self, always: bool = False) -> None:
        """Bring the means of other ranks' parts into ``.grad``. Collective.

        Args:
            always: also where this rank needs none, because others do.
        """
        if not always and not self.has_partial_means():
            return
        self._meet("gradients()")
        for number, (bucket, layout) in enumerate(
            zip(self.reducer.buckets, self.layouts, strict=True)
        ):
            memory: Any = bucket.memory.owner if bucket.memory is not None else None
            size = layout.elements * layout.dtype.itemsize
            for start, stop, owner in layout.parts():
                if owner != self.rank:
                    theirs = memory.buffer(number, owner, size).view(layout.dtype)
                    bucket.gradients[start:stop].copy_(theirs[start:stop])
        self._meet("gradients()")
        self.note_whole(range(len(self.parameters)))

    def watch(self, outputs: Iterable[torch.Tensor], uneven: bool) -> None:
        """Complete gradients when a backward from `outputs` begins to add to them.

        Not collective; the backward is.

        Args:
            outputs: of the forward.
            uneven: whether other ranks may be without inputs by now, within join().
        """
        if not self.has_partial_means():
            return

        def complete(gradient: torch.Tensor) -> None:
            if uneven and self.has_partial_means():
                raise RuntimeError(
                    f"rank {self.group.rank()}: this backward adds to gradients that are means "
                    f"only where this rank steps, and within join() other ranks may be without "
                    f"inputs: call zero_grad before it, or use "
                    f"NodeOptimizer(..., whole_gradients=True)"
                )
            self.complete()

        for output in outputs:
            if output.requires_grad:
                output.register_hook(complete)  # type: ignore[no-untyped-call]


def _owner_of_memory(buckets: Sequence[Any]) -> SharedBuckets | None:
    """Return what can write means to their owners only, None if nothing can."""
    memory = buckets[0].memory.owner
    if isinstance(memory, SharedBuckets) and memory.has_owners:
        return memory
    return None


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
