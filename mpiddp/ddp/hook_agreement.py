"""Whether a communication hook is registered on all ranks or on none.

Note [A hook on some ranks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Registering a hook is collective. So a rank that registers one alone waits there, while the others
wait for its buffers in a forward or for its gradients in a backward. For this reason all ranks say
how gradients travel where they would meet for the first time, too: in the first forward that copies
buffers, before anything is copied, or beside the communication of the first backward that is
reduced. It goes through the communicator of the module's own gradients: a
backward may run in another thread than what this rank calls in the process group meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpiddp.reducer.errors import ranks_of

if TYPE_CHECKING:
    from mpiddp.reducer.state import ReducerState

__all__ = ["HookAgreement"]

# Of the words of each rank, in UTF-8; what is longer is cut.
_BYTES = 256


class HookAgreement:
    """Compares between all ranks how the gradients of a module travel. Collective.

    Args:
        reducer: the module's. No gradients of it are under way.
        travel: how gradients travel, in words.
    """

    def __init__(self, reducer: ReducerState, travel: str) -> None:
        from mpiddp.mpi import datatypes  # which would initialise MPI

        self._group = group = reducer.process_group
        communicator = reducer.channel.communicator
        own = torch.zeros(_BYTES, dtype=torch.uint8, device="cpu")
        words = travel.encode()[:_BYTES]
        own[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        self._everyone = torch.empty(group.size(), _BYTES, dtype=torch.uint8, device="cpu")
        source, target = datatypes.buffer_of(own), datatypes.buffer_of(self._everyone)[0]
        self._pending = group.pending(
            lambda: communicator.Iallgather(source, [target, _BYTES, source[-1]]),
            "MPI_Iallgather",
            own,
            self._everyone,
        )
        self._pending.begin()

    def wait(self, seconds: float) -> bool:
        """Return whether all ranks have said it in that time, and the same. Not collective.

        Raises:
            RuntimeError: they differ; the error names the first differences and their ranks.
        """
        if not self._pending.wait(seconds):
            return False
        ranks: dict[str, list[int]] = {}
        for rank, row in enumerate(self._everyone):
            words = bytes(row.tolist()).rstrip(b"\0").decode("utf-8", "replace")
            ranks.setdefault(words, []).append(rank)
        (words, first), *others = ranks.items()
        if others:
            found = "; ".join(
                f"on {ranks_of(self._group, some)} gradients travel {other}"
                for other, some in others
            )
            raise RuntimeError(
                f"rank {self._group.me}: the ranks register different communication hooks, so "
                f"their gradients cannot be averaged: {found}, but {words} on "
                f"{ranks_of(self._group, first)}. Register the same hook on all ranks"
            )
        return True
