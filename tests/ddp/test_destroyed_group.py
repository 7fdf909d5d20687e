"""A wrapped module whose process group has been destroyed."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_data import rank, size
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi


def gradients(wrapped: Any) -> list[list[float]]:
    wrapped.zero_grad()
    wrapped(torch.full((1, 2), 1.0 + rank())).sum().backward()
    found: list[list[float]] = wrapped.module.weight.grad.tolist()
    return found


@pytest.mark.essential
@pytest.mark.parametrize("with_hook", [False, True])
@pytest.mark.parametrize("as_views", [False, True])
def test_of_all_ranks_the_world_is_taken(with_hook: bool, as_views: bool) -> None:
    """As with Gloo, whose groups go on working."""
    group = dist.new_group()
    wrapped = DDP(torch.nn.Linear(2, 1), process_group=group, gradient_as_bucket_view=as_views)
    if with_hook:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    mean = [[(size() + 1) / 2] * 2]
    assert gradients(wrapped) == mean
    optimizer.step()
    dist.destroy_process_group(group)
    for _ in range(3):
        assert gradients(wrapped) == mean
        optimizer.step()
    everyone: list[Any] = [None] * size()
    dist.all_gather_object(everyone, wrapped.module.weight.tolist())
    assert everyone == [everyone[0]] * size()


@pytest.mark.mpi(min_size=2)
def test_of_some_ranks_it_says_so_and_wrapping_again_works() -> None:
    group: Any = dist.new_group([0])
    if rank() == 0:
        wrapped = DDP(torch.nn.Linear(2, 1), process_group=group)
        gradients(wrapped)
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match="of this DistributedDataParallel has been destr"):
            gradients(wrapped)
    again: Any = dist.new_group([0])
    if rank() == 0:
        assert gradients(DDP(wrapped.module, process_group=again)) == [[1.0, 1.0]]
        dist.destroy_process_group(again)
    dist.barrier()
