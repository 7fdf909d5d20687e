"""Elastic training as Horovod has it, on `mpiddp.elastic`."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from mpiddp.elastic import random_states, running
from mpiddp.elastic.committed import Committed
from mpiddp.horovod import world
from mpiddp.horovod.adasum_optimizer import AdasumMethods
from mpiddp.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from mpiddp.horovod.optimizer import DistributedMethods

__all__ = ["ElasticSampler", "TorchState", "run"]

Training = TypeVar("Training", bound=Callable[..., Any])


def run(func: Training) -> Training:
    """Return a training function that goes on when ranks are lost, as `mpiddp.elastic.run` says.

    Collective when it is called, after `hvd.init`. Hosts are not discovered: the ranks that are
    left go on. ``mpiddp.elastic.run(replace=True)`` instead of this starts others for those lost,
    and ``mpiddp.elastic.grow`` more of them. As with Horovod, an exception of the function ends its
    rank alone (``exceptions_are_losses=True``), but after a HorovodInternalError all go back to the
    last commit, and call the function again in a new world; after a HostsUpdatedInterrupt they call
    it without going back.

    Args:
        func: takes a `TorchState`, and whatever else.
    """

    @functools.wraps(func)
    def told(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except HorovodInternalError:
            world.end_operations()
            raise
        except HostsUpdatedInterrupt:
            state._note()  # it does not go back
            raise

    wrapped: Training = running.run_again_after(
        (HorovodInternalError, HostsUpdatedInterrupt), told, exceptions_are_losses=True
    )
    return wrapped


class TorchState(Committed):
    """The state of a training: a commit copies it, and a loss of ranks goes back to that.

    Collective where its methods say so. A `DistributedOptimizer` in it averages over the new ranks
    after a loss. Process sets other than the global one are gone then.

    Args:
        model: of torch, or None.
        optimizer: of torch, or a DistributedOptimizer; or None.
        kwargs: samplers, schedulers, and values such as the epoch. Each becomes an attribute.

    Raises:
        ValueError: a part has the name of a method, or one that begins with an underscore.
    """

    _to_read_them = "only if you name the types: torch.serialization.add_safe_globals"

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._begin(None, 0, None, {"model": model, "optimizer": optimizer} | kwargs)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these when the number of ranks has changed. Not collective.

        They may adapt the learning rate, say. Where the state is synchronized afterwards, that
        takes what they change in it from one rank.
        """
        self._callbacks.extend(callbacks)

    def save(self) -> None:
        """Do what `commit` does. Collective where that is."""
        self.commit()

    def check_host_updates(self) -> None:
        """Do nothing: no hosts come by themselves. Not collective."""

    def sync(self) -> None:
        """Give all ranks the state of the one that has come farthest. Collective.

        Raises:
            RuntimeError: see `mpiddp.elastic.State.sync`.
        """
        self._note()
        super().sync()

    def _leave(self) -> None:
        world.leave_lost_world()

    def _arrive(self) -> None:
        self.restore()
        world.init()
        for name in self._keepers:
            part = getattr(self, name)
            if isinstance(part, DistributedMethods | AdasumMethods):
                part.renew()
        for callback in self._callbacks:
            callback()
        random_states.put_back(self._random)  # whatever the callbacks have drawn
        self._note()


class ElasticSampler(Sampler[int]):
    """Deals the elements that were not processed in this epoch out to the ranks that there are.

    Not collective. As Horovod's: call `record_batch` after each batch, and `set_epoch` after each
    epoch. It deals in the same order as Horovod 0.28, and each takes the other's states.

    Args:
        dataset: its length counts.
        shuffle: whether each epoch has another order.
        seed: of the orders; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.processed_indices: set[int] = set()  # of a state that does not count, but names them
        self.reset()

    def reset(self) -> None:
        """Deal out anew, to the ranks that there are."""
        self.rank, self.num_replicas = _place()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)  # noqa: S311  # not secret
        left = [index for index in order if index not in self.processed_indices]
        self.remaining_indices = left[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.indices: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing is processed."""
        self.epoch, self.processed_num, self.processed_indices = epoch, 0, set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch.

        Args:
            batch_idx: its number since the loader was asked for batches.
            batch_size: how many elements each rank's batches have.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes, the same on all ranks."""
        named = {"processed_indices": sorted(self.processed_indices)}
        counted = {"epoch": self.epoch, "processed_num": self.processed_num}
        return counted | named if self.processed_indices else counted

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, on any number of ranks.

        A state of Horovod before 0.28 names elements; it is to name those of all ranks.

        Raises:
            KeyError: the state does not say what was processed.
        """
        if "processed_num" not in state_dict and "processed_indices" not in state_dict:
            raise KeyError(
                f"a state of an ElasticSampler has processed_num or processed_indices; this one "
                f"has {', '.join(map(str, state_dict)) or 'nothing'}"
            )
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict.get("processed_num", 0)
        self.processed_indices = set(state_dict.get("processed_indices", ()))
        self.reset()

    def __iter__(self) -> Iterator[int]:
        order = self.remaining_indices
        # Every rank gets equally many: the first ones are dealt out twice.
        order = order + (order * self.num_replicas)[: self.total_size - len(order)]
        self.indices = order[self.rank : self.total_size : self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


def _place() -> tuple[int, int]:
    """Return this process's rank, and how many there are."""
    if world.is_initialized():
        return world.rank(), world.size()
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
