"""A wrapped module whose process group has been destroyed."""

import pytest
import torch
import torch.distributed as dist
from group_data import rank, size

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi


@pytest.mark.essential
@pytest.mark.parametrize("training", [False, True])
def test_forward_says_so_and_wrapping_again_works(training: bool) -> None:
    group = dist.new_group()
    wrapped = DDP(torch.nn.Linear(2, 1), process_group=group)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    x = torch.full((1, 2), 1.0 + rank())
    wrapped(x).sum().backward()
    dist.destroy_process_group(group)
    wrapped.train(training)
    with pytest.raises(RuntimeError, match="of this DistributedDataParallel has been destroyed"):
        wrapped(x)
    optimizer.zero_grad()
    again = DDP(wrapped.module)
    again(x).sum().backward()
    mean = sum(range(1, size() + 1)) / size()
    assert again.module.weight.grad is not None
    assert again.module.weight.grad.tolist() == [[mean, mean]]
    optimizer.step()
