"""Copy parameters and buffers from one rank to all: at construction, at forward, after a join."""

from __future__ import annotations

from typing import Any

import torch

from mpiddp import shown_progress
from mpiddp.ddp.buffer_broadcast import broadcast_in_buffers
from mpiddp.torch_internals.compiler import skip_compilation
from mpiddp.torch_internals.versions import TorchWrapper
from mpiddp.transports.choice import MAKERS


@skip_compilation
class StateCopies(TorchWrapper):
    """A wrapper that copies state in memory that ranks share where it can, else by messages."""

    process_group: Any
    reducer: Any
    _init_sync_buffers: bool
    _transport: str

    def _default_broadcast_coalesced(
        self,
        bufs: list[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Copy buffers from a rank to all. Collective. Overrides torch's method of this name."""
        if bufs is None:  # in a forward
            self.reducer.reach_agreement()
        tensors = self.modules_buffers if bufs is None else bufs
        if not tensors or self.process_group.size() == 1:
            return
        if authoritative_rank == 0 and self._transport not in MAKERS:
            with torch.no_grad():
                if self.process_group.broadcast_state(tensors):
                    return
        super()._default_broadcast_coalesced(tensors, bucket_size, authoritative_rank)

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Copy tensors by messages. Collective. Overrides torch's method of this name."""
        with torch.no_grad():
            broadcast_in_buffers(self.process_group, tensors, buffer_size, authoritative_rank)

    def _broadcast_initial_state(self) -> None:
        """Let all ranks start from rank 0's parameters and buffers. Collective."""
        tensors = [
            tensor.detach()
            for named in (
                self.module.named_parameters(),
                self.module.named_buffers() if self._init_sync_buffers else (),
            )
            for name, tensor in named
            if name not in self.parameters_to_ignore
        ]
        group = self.process_group
        with shown_progress.shown(
            "broadcast of the model's state",
            lambda: sum(tensor.nbytes for tensor in tensors),
            shows=group.world_ranks[group.rank()] == 0,
        ):
            self._default_broadcast_coalesced(tensors, self.broadcast_bucket_size)
