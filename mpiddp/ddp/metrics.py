"""Numbers of a wrapped module's steps, for logs: `mpiddp.metrics`."""

from __future__ import annotations

from typing import Any

import torch

from mpiddp.ddp.slow_ranks import StepComparison, slowest_of
from mpiddp.ddp.torch_reducer import TorchReducer

__all__ = ["metrics"]


class Asked:
    """What is dear to find out of a module, as it was when it was last asked for.

    Attributes:
        of: the window that `slowest` was found in.
        slowest: the slowest rank, its share of the steps, and seconds that this rank has waited.
        layout: which of the reducer's layouts of buckets has `size` bytes; -1: none yet.
    """

    def __init__(self) -> None:
        self.of: Any = None
        self.slowest: tuple[int, float, float] = (-1, 0.0, 0.0)
        self.layout = -1
        self.size = 0


def metrics(model: torch.nn.Module) -> dict[str, float]:
    """Return how long the last step of a wrapped module took, and where its time went.

    Not collective. It takes some microseconds, so it may be called after each step. All times are
    of this rank, in milliseconds. A step ends when gradients have been reduced; before the first
    one all numbers are 0.

    Args:
        model: a module wrapped in `mpiddp.DistributedDataParallel`, compiled or not.

    Returns:
        Of the last step: ``step_ms``, the whole of it; ``forward_ms``; ``backward_ms``, until this
        rank had all of its gradients; ``exposed_ms``, what it waited for the means after that;
        ``between_ms``, from the reduction before to the forward: optimizer, data, logging, and
        passes in `no_sync`. ``hidden_share``, which part of the time from the first bucket's
        launch to the last mean backward has hidden.
        ``steps``, how many have ended since `metrics` was last called, and their means, such as
        ``mean_step_ms``. ``step`` counts all. ``bytes``: of the buckets of a step, as they travel.
        ``bucket_cap_mb``: the size of a bucket in MiB. Where several are measured
        (``bucket_cap_mb="auto"``), ``bucket_tuning`` is 1 meanwhile, and ``bucket_gain`` which part
        of a step the chosen one saves, against the default.
        Of the last 25 steps that the ranks have compared: ``slowest_rank``, the rank of the group
        that the others have waited for most often, and ``slowest_share``, in which share of the
        steps; -1 and 0 if there was none. ``waiting_ms``: what of ``exposed_ms`` this rank has
        waited for the last one, in the mean; the rest is communication. Not known on GPUs, nor
        with MPIDDP_SLOW_RANKS=0.

    Raises:
        TypeError: the model is not wrapped in our class.
    """
    reducer = _reducer_of(model)
    asked: Asked = reducer.asked or Asked()
    reducer.asked = asked
    tuning = reducer.tuning
    found = reducer.times.numbers()
    found["bytes"] = _bytes_of(reducer, asked)
    found["bucket_cap_mb"] = reducer.assign_buckets.size_limits[-1] / 2**20
    found["bucket_tuning"] = int(tuning is not None and tuning.goes_on)
    found["bucket_gain"] = 0.0 if tuning is None else tuning.gain
    slowest, share, waiting = _slowest(reducer, asked)
    found["slowest_rank"] = slowest
    found["slowest_share"] = share
    found["waiting_ms"] = waiting * 1e3
    return found


def _reducer_of(model: Any) -> TorchReducer:
    # Not an attribute that may be missing: a module takes long to say so.
    reducer = vars(model).get("reducer")
    if reducer is None and "_orig_mod" in vars(model).get("_modules", ()):  # torch.compile
        model = model._orig_mod
        reducer = vars(model).get("reducer")
    if not isinstance(reducer, TorchReducer):
        raise TypeError(
            f"mpiddp.metrics() takes a module that is wrapped in mpiddp.DistributedDataParallel, "
            f"not {type(model).__name__}"
        )
    return reducer


def _bytes_of(reducer: TorchReducer, asked: Asked) -> int:
    if asked.layout != reducer.layout:  # not the buckets: whoever keeps these keeps their memory
        asked.layout = reducer.layout
        asked.size = sum(
            bucket.buffer.nbytes for bucket in reducer.buckets if bucket.buffer is not None
        )
    return asked.size


def _slowest(reducer: TorchReducer, asked: Asked) -> tuple[int, float, float]:
    comparison = reducer.comparison
    if not isinstance(comparison, StepComparison):
        return asked.slowest
    last = comparison.last
    if last is not None and last is not asked.of:
        asked.of = last
        slow = slowest_of([last])
        waited = float(last.waited[reducer.process_group.rank()])
        rank, share = (-1, 0.0) if slow is None else (slow.ranks[0], slow.steps / slow.of)
        asked.slowest = rank, share, waited
    return asked.slowest
