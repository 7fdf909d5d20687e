"""delay_all_reduce_named_params: some parameters are averaged in one all-reduce of their own."""

import copy

import pytest
import torch
from models import mlp
from replicas import (
    RANK,
    SIZE,
    assert_gradients_close,
    assert_replicated,
    assert_same_bits,
    gradients_of,
    mean_of_ranks,
    together,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi


def loss_of_rank(model: nn.Module, rank: int) -> Tensor:
    x = torch.linspace(-1, 1, 6).view(2, 3) + rank
    loss: Tensor = model(x).square().sum()
    return loss


def delayed(module: nn.Module, names: list[str]) -> dict[str, object]:
    """Delay some parameters until the gradient of the first one of all, the last to come."""
    parameters = dict(module.named_parameters())
    return {
        "delay_all_reduce_named_params": [(name, parameters[name]) for name in names],
        "param_to_hook_all_reduce": parameters["0.bias"],
    }


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("names", [["2.weight", "2.bias"], ["2.weight"]], ids="".join)
def test_gradients(names, views, gloo):
    """On Gloo torch's class does not wait for that all-reduce: read after a barrier."""
    modules = [mlp(3, 4, 2, dtype=torch.float32)]
    modules.append(copy.deepcopy(modules[0]))
    ours = DDP(modules[0], gradient_as_bucket_view=views, **delayed(modules[0], names))
    theirs = TorchDDP(modules[1], process_group=gloo, **delayed(modules[1], names))
    for _ in range(3):
        expected = mean_of_ranks(modules[0], loss_of_rank)
        for model in (ours, theirs):
            model.zero_grad()
            loss_of_rank(model, RANK).backward()
        torch.distributed.barrier(gloo)
        with together():
            assert_gradients_close(gradients_of(ours), expected)
            assert_gradients_close(gradients_of(ours), gradients_of(theirs))
        assert_replicated(ours)


def test_all_parameters_that_are_trained():
    """Torch's class constructs this and fails in the first forward."""
    module = mlp(3, 4, 2, dtype=torch.float32)
    module.append(nn.Linear(2, 2).requires_grad_(False))
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    outside = nn.Parameter(torch.zeros(3))  # its gradient comes after all of the module's
    options = {**delayed(module, names), "param_to_hook_all_reduce": outside}
    wrapped = DDP(module, **options)
    x = torch.linspace(-1, 1, 6).view(2, 3)
    for _ in range(2):
        expected = mean_of_ranks(module, loss_of_rank)
        wrapped.zero_grad()
        wrapped(x + RANK + outside).square().sum().backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), expected)


@pytest.mark.mpi(min_size=2)
def test_parameters_start_from_rank_0():
    torch.manual_seed(RANK)
    module = mlp(3, 4, 2, dtype=torch.float32)
    wrapped = DDP(module, **delayed(module, ["2.weight", "2.bias"]))
    assert_same_bits(wrapped.named_parameters())
    with together():
        assert SIZE > 1
