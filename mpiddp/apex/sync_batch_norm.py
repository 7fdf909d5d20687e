"""Apex's SyncBatchNorm, and what puts it into a model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp.ddp import sync_batch_norm

__all__ = ["SyncBatchNorm", "convert_syncbn_model", "create_syncbn_process_group"]


class SyncBatchNorm(sync_batch_norm.SyncBatchNorm):
    """Normalise by the statistics of all ranks' batches, with the arguments of Apex.

    Collective in training mode. A `mpiddp.SyncBatchNorm`.

    Args:
        num_features: the number of channels.
        eps: added to the variance.
        momentum: the fraction of the running statistics that a batch replaces; None averages over
            all batches.
        affine: whether there is a weight and a bias.
        track_running_stats: whether there are running statistics.
        process_group: whose batches count; None is the world.
        channel_last: whether the last dimension is the channel, instead of the second.
        fuse_relu: whether the output goes through ReLU.
    """

    # Where users import it from: pickles hold this name, and survive when the file moves.
    __module__ = "mpiddp.apex"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Return the normalised `input`, plus `z`. Collective in training mode."""
        channel_last = self.channel_last and input.dim() > 2
        output = super().forward(input.movedim(-1, 1) if channel_last else input)
        if channel_last:
            output = output.movedim(1, -1)
        if z is not None:
            output = output + z
        return torch.relu(output) if self.fuse_relu else output


def convert_syncbn_model(
    module: torch.nn.Module,
    process_group: dist.ProcessGroup | None = None,
    channel_last: bool = False,
) -> torch.nn.Module:
    """Replace every BatchNorm layer of `module` by a SyncBatchNorm. Not collective.

    Args:
        module: changed in place, unless it is such a layer itself.
        process_group: whose batches count; None is the world.
        channel_last: whether the layers find the channels in the last dimension.

    Returns:
        `module`, or what replaces it.
    """
    converted = SyncBatchNorm.convert_sync_batchnorm(module, process_group)
    for layer in converted.modules():
        if isinstance(layer, SyncBatchNorm):
            layer.channel_last = channel_last
    return converted


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Divide the ranks into groups of `group_size` that follow each other; return this rank's.

    Collective.

    Args:
        group_size: a divisor of the number of ranks; 0 is all ranks, and returns None.

    Raises:
        ValueError: it does not divide the number of ranks.
    """
    if group_size == 0:
        return None
    world_size = dist.get_world_size()
    if group_size < 0 or world_size % group_size:
        raise ValueError(f"groups of {group_size} do not divide {world_size} ranks")
    parts = [list(range(first, first + group_size)) for first in range(0, world_size, group_size)]
    groups = [dist.new_group(part) for part in parts]
    own = groups[dist.get_rank() // group_size]
    assert isinstance(own, dist.ProcessGroup)
    return own
