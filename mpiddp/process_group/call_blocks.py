"""Between nodes, compare what the ranks call in a block that goes ahead, or has the data in it.

See Note [Calls in a block] in blocks.pyx. Who waits for a collective at once waits for its block
before anything else is sent. An asynchronous one waits for nobody: there the block goes beside the
data, and tells which of both it was if they do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mpiddp.collectives.operation import SentBlock
from mpiddp.mpi.blocks import Block
from mpiddp.process_group.call_table import balance, call_digest

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

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


class BlockGroup(Protocol):
    """What this needs of the group itself."""

    def rank(self) -> int:
        """Return this rank's number in the group."""

    @property
    def bare_communicator(self) -> MPI.Intracomm:
        """The group's, without any comparison."""

    def pending(self, request: MPI.Request, call: str, *memory: object) -> Pending:
        """Return what waits for a request that the MPI function `call` has made."""

    def leave(self, pending: Pending) -> None:
        """Let the engine move something along that nobody waits for."""

    def wait_until(self, pending: Pending, name: str, limit: float, number: int) -> None:
        """Wait for the first part of a collective that is being started, `limit` seconds."""

    def misfit_in(self, sent: SentBlock) -> RuntimeError:
        """Return the error of ranks that have said in a block what does not fit together."""


class CallBlocks:
    """The blocks of a group whose ranks do not share memory. Not collective.

    Args:
        group: whose calls are compared.
    """

    def __init__(self, group: BlockGroup) -> None:
        self._group = group

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
        """Wait for a block, `limit` seconds at most, and check it.

        Raises:
            RuntimeError: the ranks have called what does not fit together, or one did not come.
        """
        self._group.wait_until(sent.pending, sent.name, limit, sent.number)
        self.check(sent)

    def check(self, sent: SentBlock) -> None:
        """Raise if the ranks have called what does not fit together. The block has ended.

        Raises:
            RuntimeError: they have. The group is broken.
        """
        if sent.block.differs:
            raise self._group.misfit_in(sent)

    def _start(self, block: Block, number: int, name: str) -> SentBlock:
        communicator = self._group.bare_communicator
        pending = self._group.pending(block.start(communicator), "MPI_Iallreduce", block)
        return SentBlock(block, pending, number, name)
