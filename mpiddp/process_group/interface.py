"""What the parts of a process group need from the group itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from mpiddp.collectives.operation import Group

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from mpiddp.collectives.operation import SentBlock
    from mpiddp.engine.engine import Engine
    from mpiddp.engine.requests import Pending
    from mpiddp.flight_recorder.call_text import Call
    from mpiddp.flight_recorder.sources import Source
    from mpiddp.process_group.group_state import GroupState
    from mpiddp.process_group.wrapped_modules import WrappedModules


class CountedGroup(Protocol):
    """A group that counts its collectives, so that others may ask how far it has come."""

    def rank(self) -> int:
        """Return this rank's number in the group."""

    @property
    def timeout(self) -> timedelta:
        """How long an operation may wait for other ranks."""

    @property
    def group_name(self) -> str:
        """The name that torch.distributed gave to this group."""

    @property
    def world_ranks(self) -> Sequence[int]:
        """The world rank of each of this group's ranks."""

    @property
    def source(self) -> Source:
        """What the flight recorder knows of the group."""

    @property
    def entered(self) -> int:
        """How many collectives this rank has called."""

    @property
    def last(self) -> Call | None:
        """The last of them."""

    def hear(self, reason: str) -> None:
        """Take from another rank that the group is broken. In any thread."""

    @property
    def modules(self) -> WrappedModules:
        """The modules that average their gradients over this group."""

    @property
    def without_limit(self) -> set[int]:
        """The records of what waits in MPI without a time limit."""


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
