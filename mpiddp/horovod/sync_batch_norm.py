"""Horovod's SyncBatchNorm: that of mpiddp, over the ranks of Horovod."""

from __future__ import annotations

from torch import Tensor

from mpiddp.ddp import sync_batch_norm
from mpiddp.horovod.process_sets import global_process_set, is_open

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(sync_batch_norm.SyncBatchNorm):
    """Normalise by the statistics of all ranks' batches.

    Collective in training mode, forward and backward. For CPU tensors too, unlike Horovod's; see
    `mpiddp.SyncBatchNorm`.

    Args:
        num_features: the number of channels.
        eps: added to the variance.
        momentum: the fraction of the running statistics that a batch replaces; None averages over
            all batches.
        affine: whether there is a weight and a bias.
        track_running_stats: whether there are running statistics.
    """

    __module__ = "mpiddp.horovod"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised `input`. Collective in training mode."""
        # Known since hvd.init(), which may come after the model; and a group cannot be copied.
        self.process_group = global_process_set.group if is_open() else None
        try:
            return super().forward(input)
        finally:
            self.process_group = None
