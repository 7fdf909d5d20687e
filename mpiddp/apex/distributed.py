"""Apex's DistributedDataParallel: its arguments, on the wrapper of mpiddp."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mpiddp.ddp import wrapper

__all__ = ["DistributedDataParallel"]

# Apex's, in elements. It leaves the size of buckets to mpiddp.
_DEFAULT_MESSAGE_SIZE = 10_000_000


class DistributedDataParallel(wrapper.DistributedDataParallel):
    """Average gradients over all ranks while backward runs, as `apex.parallel`'s class did.

    Collective: all ranks construct the same model with the same arguments. They start from rank
    0's parameters and buffers; buffers are then each rank's own. Parameters that no rank uses keep
    their gradient. This is a `mpiddp.DistributedDataParallel` on the world.

    Args:
        module: the module to train.
        message_size: the number of elements of a bucket; the default leaves it to mpiddp.
        delay_allreduce: whether gradients are averaged at the end of backward, in one message
            for each dtype.
        shared_param: refused, as Apex does.
        allreduce_trigger_params: parameters at which Apex ends a bucket; ignored, mpiddp ends
            buckets by size, and the gradients are the same.
        retain_allreduce_buffers: refused: mpiddp does not hand out its buckets.
        allreduce_always_fp32: whether gradients of 16 bits travel and are added in float32.
        num_allreduce_streams: ignored; mpiddp chooses how many messages are under way at once.
        allreduce_communicators: refused: mpiddp makes its own.
        gradient_average: whether the sum is divided by the number of ranks.
        gradient_predivide_factor: gradients are divided by it before they are added, and the sum
            is multiplied by it if it is averaged.
        gradient_average_split_factor: refused: Apex's old name of `gradient_predivide_factor`,
            which it ignored.
        prof: ignored; torch's profiler shows the work of mpiddp.

    Raises:
        ValueError: an argument is one of those refused, `message_size` is negative, or
            `delay_allreduce` is combined with triggers or streams.
        RuntimeError: as for `mpiddp.DistributedDataParallel`.
    """

    # Where users import it from: pickles hold this name, and survive when the file moves.
    __module__ = "mpiddp.apex"

    def __init__(
        self,
        module: torch.nn.Module,
        message_size: int = _DEFAULT_MESSAGE_SIZE,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Iterable[torch.nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        _refuse(
            shared_param=shared_param is not None,
            retain_allreduce_buffers=retain_allreduce_buffers,
            allreduce_communicators=allreduce_communicators is not None,
            gradient_average_split_factor=gradient_average_split_factor is not None,
        )
        if delay_allreduce and (allreduce_trigger_params is not None or num_allreduce_streams > 1):
            raise ValueError(
                "delay_allreduce=True leaves one moment to reduce gradients: leave out "
                "allreduce_trigger_params and num_allreduce_streams"
            )
        super().__init__(
            module,
            forward_sync_buffers=False,
            bucket_cap_mb=_bucket_size(module, message_size, delay_allreduce),
            find_unused_parameters=True,
        )
        narrow = any(parameter.dtype.itemsize < 4 for parameter in module.parameters())
        scaling = _Scaling(
            gradient_average, float(gradient_predivide_factor), allreduce_always_fp32 and narrow
        )
        if scaling != _Scaling():
            self.register_comm_hook(scaling, _add)

    def disable_allreduce(self) -> None:
        """Leave gradients as they are from the next forward on. Not collective."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Average gradients again from the next forward on. Not collective."""
        self.require_backward_grad_sync = True


def _refuse(**given: bool) -> None:
    reasons = {
        "shared_param": "Apex dropped it: use delay_allreduce=True to reduce after backward",
        "retain_allreduce_buffers": "mpiddp does not hand out its buckets: read .grad",
        "allreduce_communicators": "mpiddp makes its own communicators and streams: leave it out",
        "gradient_average_split_factor": "use gradient_predivide_factor",
    }
    for name, refused in given.items():
        if refused:
            raise ValueError(f"{name} is not supported; {reasons[name]}")


def _bucket_size(module: torch.nn.Module, message_size: int, delayed: bool) -> float | None:
    """Return the size of a bucket in MiB, None for mpiddp's own choice."""
    if message_size < 0:
        raise ValueError(f"message_size must not be negative, not {message_size}")
    parameters = list(module.parameters())
    if delayed:
        return sum(one.numel() * one.element_size() for one in parameters) / 2**20 + 1
    if message_size == _DEFAULT_MESSAGE_SIZE:
        return None
    return message_size * max((one.element_size() for one in parameters), default=4) / 2**20


@dataclass(frozen=True)
class _Scaling:
    """How gradients are added.

    Attributes:
        average: whether the sum is divided by the number of ranks.
        before: the divisor before they are added.
        widened: whether those of 16 bits are added in float32.
    """

    average: bool = True
    before: float = 1.0
    widened: bool = False


# Without annotations: register_comm_hook refuses those that are text, as they are in this file.
def _add(scaling, bucket):  # type: ignore[no-untyped-def]
    """Add a bucket over the ranks, scaled: a communication hook. Collective."""
    gradients: torch.Tensor = bucket.buffer()
    sent = gradients.float() if scaling.widened and gradients.dtype.itemsize < 4 else gradients
    if scaling.before != 1:
        sent.mul_(1 / scaling.before)
    work: Any = dist.all_reduce(sent, async_op=True)

    def finish(future: torch.futures.Future[Any]) -> torch.Tensor:
        future.value()  # raises if the all-reduce failed
        if scaling.average:
            sent.mul_(scaling.before / dist.get_world_size())
        return sent if sent is gradients else gradients.copy_(sent)

    future: torch.futures.Future[Any] = work.get_future()
    return future.then(finish)
