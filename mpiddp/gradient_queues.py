"""The engine's queues for the gradients of the modules of one process group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import AllreduceOptions

from mpiddp.device_runtime import runtime_of
from mpiddp.transport import open_channel, open_channel_of_one, shares_memory

if TYPE_CHECKING:
    from mpiddp.engine import Channel
    from mpiddp.process_group import ProcessGroup


class GradientQueues:
    """Lends queues, each with a communicator of its own, to the reducers of a process group.

    Communicators are a limited resource and may only be freed together, while reducers are
    garbage-collected at a different time on each rank: so queues are kept and lent again, and the
    ranks agree on one that is idle on all of them.

    Args:
        group: the process group, whose communicator is duplicated for each queue.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._channels: list[Channel] = []
        self._kinds: list[tuple[str, torch.device | None]] = []
        self._lent: set[int] = set()

    def lend(self, transport: str, device: torch.device | None = None) -> Channel:
        """Return a queue over `transport`. Collective.

        Args:
            transport: one of `mpiddp.transport.TRANSPORTS`, the same on all ranks.
            device: where the gradients are, which may be another one on each rank; None on all
                ranks for the CPU.
        """
        kind = (transport, device)
        free = torch.ones(len(self._channels), dtype=torch.uint8)
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

    def lend_for(
        self, transport: str, parameters: Iterable[torch.Tensor]
    ) -> dict[torch.device, Channel]:
        """Return a queue for each device that some of `parameters` are on. Collective.

        Args:
            transport: as for `lend`.
            parameters: on all ranks on as many devices, in the same order.
        """
        lent: dict[torch.device, Channel] = {}
        try:
            for device in dict.fromkeys(parameter.device for parameter in parameters):
                on_gpu = runtime_of(device) is not None
                lent[device] = self.lend(transport, device if on_gpu else None)
        except BaseException:
            self.take_back(lent)
            raise
        return lent

    def replace_shared(self, lent: dict[torch.device, Channel], device: torch.device) -> bool:
        """Put a queue over MPI in the place of one over shared memory; return whether it was one.

        Collective. Only where the user did not ask for shared memory.

        Args:
            lent: queues of `lend_for`.
            device: whose queue in `lent` to replace.
        """
        channel = lent[device]
        transport, kind = self._kinds[self._channels.index(channel)]
        if transport != "auto" or not shares_memory(channel):
            return False
        lent[device] = self.lend("mpi", kind)
        self.take_back({device: channel})
        return True

    def take_back(self, lent: Mapping[torch.device, Channel]) -> None:
        """Let queues of `lend_for` be lent again. Not collective."""
        for channel in lent.values():
            if channel in self._channels:
                self._lent.discard(self._channels.index(channel))

    def free(self) -> None:
        """Free the communicators of the queues that are idle. Collective."""
        for channel in self._channels:
            if channel.idle and channel.communicator is not None:
                channel.engine.close_channel(channel)
                if channel.transport is not None:
                    channel.transport.free()
                channel.communicator.Free()
        self._channels.clear()

    def forget(self) -> None:
        """Make `free` do nothing. Not collective."""
        self._channels.clear()

    def _open(self, transport: str, device: torch.device | None) -> Channel:
        if self._group.size() == 1:
            return open_channel_of_one(self._group.engine, device)
        communicator = self._group.communicator.Dup()
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
        communicator.Set_name(f"mpiddp gradients {len(self._channels)}")
        return open_channel(self._group.engine, communicator, transport, device)
