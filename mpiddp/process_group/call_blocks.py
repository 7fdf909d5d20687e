"""Between nodes, compare what the ranks call in a block that goes ahead, or has the data in it.

See Note [Calls in a block] in blocks.pyx. No data is sent before the block has ended: who waits for
a collective at once waits for its block first, and the data of an asynchronous one begins later,
see Note [Data in the order of calls].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mpi4py import MPI

from mpiddp.collectives.operation import SentBlock
from mpiddp.mpi import communicators
from mpiddp.mpi.blocks import Block
from mpiddp.process_group.call_table import balance, call_digest
from mpiddp.process_group.ordered_starts import OrderedStarts, StartingGroup

if TYPE_CHECKING:
    import torch

    from mpiddp.engine.requests import Pending

__all__ = ["Call", "CallBlocks"]

# What a rank says whose call has raised an error of its own before anything was sent.
_REFUSED = "refused"


class Call(NamedTuple):
    """What the ranks compare of a collective.

    Attributes:
        name: the operation.
        detail: its reduction, its root or both.
        agreed: those tensors whose sizes must be the same on all ranks.
        elements: returns how many elements go to each rank and are to come from each, where these
            may differ.
        tensors: the first is of their kind.
        limit: seconds that the caller waits, at once; None: it is asynchronous.
    """

    name: str
    detail: object
    agreed: Iterable[torch.Tensor]
    elements: Callable[[], tuple[Sequence[int], Sequence[int]]] | None
    tensors: Sequence[torch.Tensor]
    limit: float | None


class BlockGroup(StartingGroup, Protocol):
    """What this needs of the group itself."""

    def rank(self) -> int:
        """Return this rank's number in the group."""

    @property
    def completion(self) -> Any:
        """The `FutureCompleter` of the process."""

    def pending(self, request: MPI.Request, call: str, *memory: object) -> Pending:
        """Return what waits for a request that the MPI function `call` has made."""

    def leave(self, pending: Pending) -> None:
        """Let the engine move something along that nobody waits for."""

    def wait_until(self, pending: Pending, name: str, limit: float, number: int) -> None:
        """Wait for the first part of a collective that is being started, `limit` seconds."""


class CallBlocks:
    """The blocks of a group whose ranks do not share memory. Not collective.

    Args:
        group: whose calls are compared.
        communicator: of its ranks, for blocks alone; `release` frees it.

    Attributes:
        starts: the collectives whose data follows their blocks.
    """

    def __init__(self, group: BlockGroup, communicator: MPI.Intracomm) -> None:
        self._group = group
        self._communicator = communicator
        self.starts = OrderedStarts(group, group.completion.starter)

    def send(self, number: int, call: Call, digest: int, block: Block | None = None) -> SentBlock:
        """Begin to compare a collective. Collective.

        Args:
            number: which of the group's collectives it is.
            call: what is compared of it.
            digest: of its name, detail and sizes.
            block: with its data; None: the data does not fit in.
        """
        block = block or Block()
        group = self._group
        uneven = 0
        if call.elements is not None:
            size = call.tensors[0].element_size() if call.tensors else 1
            uneven = balance(group.rank(), size, *call.elements())
        block.say(digest, uneven)
        return self._start(block, number, call.name)

    def refuse(self, compared: int, number: int, name: str) -> None:
        """Tell the other ranks that this one has raised an error before anything was sent.

        Args:
            compared: how many of the group's collectives were compared.
            number: which of the group's collectives it is.
            name: the operation.
        """
        block = Block()
        block.say(call_digest(compared, _REFUSED, None, ()), 0)
        self._group.leave(self._start(block, number, name).pending)

    def wait(self, sent: SentBlock, limit: float) -> None:
        """Wait for a block, `limit` seconds at most, check it, and begin what was called before.

        Raises:
            RuntimeError: the ranks have called what does not fit together, or one did not come.
        """
        self._group.wait_until(sent.pending, sent.name, limit, sent.number)
        self.check(sent)
        if self.starts:
            self._begin_all(sent.name, limit, sent.number)

    def check(self, sent: SentBlock) -> None:
        """Raise if the ranks have called what does not fit together. The block has ended.

        Raises:
            RuntimeError: they have. The group is broken.
        """
        if sent.block.differs:
            raise self._group.misfit_in(sent)

    def release(self) -> None:
        """Begin nothing more, and free the communicator. Collective."""
        self.starts.close()
        if self._communicator != MPI.COMM_NULL:
            communicators.free(self._communicator)

    def forget_communicator(self) -> None:
        """Make `release` free nothing, for an exit that is not collective. Not collective."""
        self._communicator = MPI.Intracomm()

    def _begin_all(self, name: str, limit: float, number: int) -> None:
        def wait(pending: Pending) -> bool:
            self._group.wait_until(pending, name, limit, number)
            return True

        self.starts.wait(name, lambda: not self.starts, wait)

    def _start(self, block: Block, number: int, name: str) -> SentBlock:
        pending = self._group.pending(block.start(self._communicator), "MPI_Iallreduce", block)
        return SentBlock(block, pending, number, name)
