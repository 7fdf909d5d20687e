"""What an operation is, and what it needs of the process group that runs it."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

    from mpiddp.engine.requests import Pending

# See Note [An operation is a generator].
Operation = Generator["Pending | list[Pending]", None, Any]


class Group(Protocol):
    """The ranks of one communicator, as operations see them."""

    def rank(self) -> int:
        """Return this rank's number in the group. Not collective."""

    def size(self) -> int:
        """Return the number of ranks in the group. Not collective."""

    @property
    def communicator(self) -> MPI.Intracomm:
        """The group's communicator; operations start on it in the same order on all ranks."""

    def pending(self, request: MPI.Request, call: str, *memory: object) -> Pending:
        """Return what to yield for a request that the MPI function `call` has made.

        Not collective. `memory` is kept until the request has ended.
        """

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
