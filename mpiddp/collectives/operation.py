"""What an operation is, and what it needs of the process group that runs it."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from mpiddp.collectives.group_lanes import GroupLanes, LanePending
    from mpiddp.collectives.group_memory import GroupMemory, MemoryPending
    from mpiddp.engine.requests import Arrival, Pending
    from mpiddp.mpi.blocks import Block

# See Note [An operation is a generator].
Operation = Generator["Pending | MemoryPending | LanePending | list[Pending]", None, Any]


class SentBlock(NamedTuple):
    """A block under way.

    Attributes:
        block: its memory.
        pending: its all-reduce.
        number: which of the group's collectives it is of.
        name: the operation.
    """

    block: Block
    pending: Pending
    number: int
    name: str

    @property
    def differs(self) -> bool:
        """Whether it is known that the ranks have called what does not fit together."""
        return self.pending.done and self.block.differs


class Place(Protocol):
    """Where the ranks of a group are."""

    all_here: bool
    memory: GroupMemory | None
    lanes: GroupLanes | None


class Group(Protocol):
    """The ranks of one communicator, as operations see them."""

    def rank(self) -> int:
        """Return this rank's number in the group. Not collective."""

    def size(self) -> int:
        """Return the number of ranks in the group. Not collective."""

    @property
    def me(self) -> str:
        """This rank's number in the world, for messages."""

    def describe_ranks(self, members: Iterable[int]) -> str:
        """Return words such as "ranks 0 to 3 and 7" for ranks in the group. Not collective."""

    @property
    def state(self) -> Place:
        """Whether all ranks share this node's memory, and more."""

    @property
    def communicator(self) -> MPI.Intracomm:
        """The group's communicator; operations start on it in the same order on all ranks."""

    @property
    def memory(self) -> GroupMemory:
        """That of its ranks, for a collective that is carried out there in order of the calls."""

    @property
    def lanes(self) -> GroupLanes:
        """Those of its ranks, for a collective that goes there in order of the calls."""

    def pending(self, request: MPI.Request | Arrival, call: str, *memory: object) -> Pending:
        """Return what to yield for a request that the MPI function `call` has made.

        Not collective. `memory` is kept until the request has ended.
        """

    @property
    def has_blocks(self) -> bool:
        """Whether calls are compared in blocks, see Note [Calls in a block]."""

    def send_block(self, block: Block) -> SentBlock:
        """Begin the all-reduce of a block, the operation's only call of MPI. Collective."""

    def check_block(self, sent: SentBlock) -> None:
        """Raise RuntimeError if the ranks call what does not fit together. Not collective."""

    def unlike(self, name: str, words: str) -> RuntimeError:
        """Return the error of a collective whose ranks disagree on sizes. Not collective."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Reduce tensors over all ranks in place. Collective."""

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Gather each input from all ranks into a list. Collective."""

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """Gather equal inputs into one output tensor. Collective."""
