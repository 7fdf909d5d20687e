"""A sampler that knows what was consumed, and deals out the rest to any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler as TorchSampler

__all__ = ["Sampler"]


class Sampler(TorchSampler[int]):
    """Deals each epoch's elements out to the ranks that there are, without those consumed before.

    Not collective. Give it to `State` and to the ``DataLoader``, and call `record_batch` after
    each batch, before `State.commit`.

    Args:
        dataset: its length counts.
        shuffle: whether each epoch has another order.
        seed: of the orders; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self._dataset, self._shuffle, self._seed = dataset, shuffle, seed
        self._epoch = self._before = self.consumed = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it is the one that goes on. Not collective."""
        if epoch != self._epoch:
            self._epoch, self._before, self.consumed = epoch, 0, 0

    def record_batch(self, batch: int, size: int) -> None:
        """Note that every rank has consumed a batch. Not collective.

        Args:
            batch: its number since the loader was asked for batches.
            size: how many elements each rank's batches have.
        """
        mine = min((batch + 1) * size, len(self))
        self.consumed = min(self._before + mine * _ranks(), len(self._dataset))

    def __iter__(self) -> Iterator[int]:
        self._before = self.consumed
        order = list(range(len(self._dataset)))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        rest = order[self._before :]
        # Every rank gets equally many: the first ones are dealt out twice.
        each = len(self)
        rest += (rest * (1 + _ranks()))[: each * _ranks() - len(rest)]
        rank = dist.get_rank() if dist.is_initialized() else 0
        return iter(rest[rank :: _ranks()])

    def __len__(self) -> int:
        return -(-(len(self._dataset) - self._before) // _ranks())

    def state_dict(self) -> dict[str, Any]:
        """Return what is left of the epoch is told by. Not collective."""
        return {"epoch": self._epoch, "consumed": self.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, on any number of ranks. Not collective."""
        self._epoch = state["epoch"]
        self.consumed = self._before = state["consumed"]


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
