"""The engine's channels for the gradients of the modules of one process group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import AllreduceOptions

from mpiddp.gpu.runtime import runtime_of
from mpiddp.mpi import communicators
from mpiddp.transports.choice import open_channel, open_channel_of_one, shares_memory

if TYPE_CHECKING:
    from mpiddp.engine.engine import Channel, Engine


class Owner(Protocol):
    """What the pool needs of the process group that it belongs to."""

    def size(self) -> int:
        """Return the number of ranks."""

    @property
    def engine(self) -> Engine:
        """The process's progress engine."""

    @property
    def communicator(self) -> MPI.Intracomm:
        """Of the group's ranks."""

    def allreduce(self, tensors: list[torch.Tensor], opts: AllreduceOptions) -> object:
        """Reduce tensors over all ranks. Collective."""


class ChannelPool:
    """Lends channels, each with a communicator of its own, to the reducers of a process group.

    Communicators are a limited resource, and all ranks must free one together. But reducers are
    garbage-collected at a different time on each rank. So channels are kept and lent again, and the
    ranks agree on one that is idle on all of them.

    Args:
        group: the process group, whose communicator is duplicated for each channel.
    """

    def __init__(self, group: Owner) -> None:
        self._group = group
        self._channels: list[Channel] = []
        self._kinds: list[tuple[str, torch.device | None]] = []
        self._lent: set[int] = set()

    def _acquire_one(self, transport: str, device: torch.device | None = None) -> Channel:
        """Return a channel over `transport`. Collective.

        Args:
            transport: one of `mpiddp.transports.choice.TRANSPORTS`, the same on all ranks.
            device: where the gradients are, which may differ between ranks; None on all ranks for
                the CPU.
        """
        kind = (transport, device)
        free = torch.ones(len(self._channels), dtype=torch.uint8, device="cpu")
        for index, channel in enumerate(self._channels):
            free[index] = index not in self._lent and channel.idle and self._kinds[index] == kind
        if len(self._channels):
            opts = AllreduceOptions()
            opts.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
            opts.asyncOp = False
            self._group.allreduce([free], opts)
        candidates = free.nonzero().flatten().tolist()
        if candidates:
            index = candidates[0]
        else:
            index = len(self._channels)
            self._channels.append(self._open(transport, device))
            self._kinds.append(kind)
        self._lent.add(index)
        return self._channels[index]

    def acquire(
        self, transport: str, parameters: Iterable[torch.Tensor]
    ) -> dict[torch.device, Channel]:
        """Return a channel for each device that some of `parameters` are on. Collective.

        Args:
            transport: as for `_acquire_one`.
            parameters: on the same number of devices on all ranks, in the same order.
        """
        lent: dict[torch.device, Channel] = {}
        try:
            for device in dict.fromkeys(parameter.device for parameter in parameters):
                on_gpu = runtime_of(device) is not None
                lent[device] = self._acquire_one(transport, device if on_gpu else None)
        except BaseException:
            self.release(lent)
            raise
        return lent

    def replace_shared(self, lent: dict[torch.device, Channel], device: torch.device) -> bool:
        """Replace a channel over shared memory by one over MPI; return whether it was replaced.

        Collective. Only where the user did not ask for shared memory.

        Args:
            lent: channels of `acquire`.
            device: whose channel in `lent` to replace.
        """
        channel = lent[device]
        transport, kind = self._kinds[self._channels.index(channel)]
        if transport != "auto" or not shares_memory(channel):
            return False
        lent[device] = self._acquire_one("mpi", kind)
        self.release({device: channel})
        return True

    def shares_memory(self, channel: Channel) -> bool:
        """Whether buckets of a channel lie in memory that the ranks share. Not collective."""
        return shares_memory(channel)

    def release(self, lent: Mapping[torch.device, Channel]) -> None:
        """Let channels of `acquire` be lent again. Not collective."""
        for channel in lent.values():
            if channel in self._channels:
                self._lent.discard(self._channels.index(channel))

    def free(self) -> None:
        """Free the communicators of the channels that are idle. Collective."""
        for channel in self._channels:
            if channel.idle and channel.communicator is not None:
                channel.engine.close_channel(channel)
                if channel.transport is not None:
                    channel.transport.free()
                communicators.free(channel.communicator)
        self._channels.clear()

    def forget(self) -> None:
        """Make `free` do nothing. Not collective."""
        self._channels.clear()

    def _open(self, transport: str, device: torch.device | None) -> Channel:
        if self._group.size() == 1:
            return open_channel_of_one(self._group.engine, device)
        communicator = communicators.note(self._group.communicator.Dup())
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
        communicator.Set_name(f"mpiddp gradients {len(self._channels)}")
        return open_channel(self._group.engine, communicator, transport, device)
