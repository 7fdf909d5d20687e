"""What the parts of a process group need from the group itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from mpiddp.collectives.operation import Group
from mpiddp.watch.interface import CountedGroup

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from mpiddp.collectives.operation import SentBlock
    from mpiddp.engine.engine import Engine
    from mpiddp.engine.requests import Pending
    from mpiddp.process_group.group_state import GroupState


class RunningGroup(CountedGroup, Group, Protocol):
    """A group that starts operations, waits for them and counts them."""

    @property
    def own_size(self) -> str:
        """How many ranks there are, for messages."""

    def describe_ranks(self, members: Iterable[int]) -> str:
        """Return words such as "ranks 0 to 3 and 7"."""

    @property
    def engine(self) -> Engine:
        """The process's progress engine."""

    @property
    def completion(self) -> Any:
        """The `FutureCompleter` of the process."""

    def wait_for(self, request: MPI.Request, call: str, name: str, *memory: torch.Tensor) -> None:
        """Wait for what the MPI function `call` began, as a part of the operation `name`."""

    def abandon(self, *memory: object) -> None:
        """Keep memory that MPI may still use though nobody waits any more."""

    @property
    def state(self) -> GroupState:
        """Whether the group can go on."""

    def ends(self, pending: Pending, name: str, until: float, number: int = 0) -> bool:
        """Wait for a part of an operation; return whether it has ended by the running time."""

    def misfit_in(self, sent: SentBlock) -> RuntimeError:
        """Return the error of ranks that have said in a block what does not fit together."""

    def timed_out(
        self, name: str, seconds: float, number: int | None = None, gives_up: bool = True
    ) -> RuntimeError:
        """Return the error of an operation that waited in vain; it may take seconds."""

    def misfit(self, error: BaseException, number: int) -> RuntimeError | None:
        """Return an error that shows what the ranks have called, if MPI says a message is cut."""

    def explain_missing(self, number: int | None = None) -> str:
        """Return which ranks keep a collective waiting; it may take seconds."""


class StateGroup(RunningGroup, Protocol):
    """A group that copies a module's state."""

    def allgather_objects(self, value: Any) -> list[Any]:
        """Return the picklable `value` of every rank, by rank. Collective."""
