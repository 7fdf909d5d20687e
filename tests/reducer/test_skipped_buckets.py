"""skip_all_reduce_unused_params: what no rank uses is not reduced, in torch's class and ours."""

import copy

import pytest
import torch
from models import GivenGradients, loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    assert_gradients_close,
    gradients_of,
    share,
    together,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi

HOW = pytest.mark.parametrize("how", ["find_unused_parameters", "static_graph"])


class _Model(nn.Module):
    """Uses two of its three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = mlp(3, 4)
        self.idle = mlp(20, 20)
        self.last = mlp(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x))
        return y


@pytest.mark.essential(keep=1)
@HOW
def test_gradients_and_what_travels(how, views, gloo):
    options = {
        "skip_all_reduce_unused_params": True,
        how: True,
        "bucket_cap_mb": 1e-4,
        "gradient_as_bucket_view": views,
    }
    module = _Model()
    ours = DDP(copy.deepcopy(module), **options)
    theirs = TorchDDP(copy.deepcopy(module), process_group=gloo, **options)
    counters = ours.reducer.channel.engine.counters
    for step in range(4):
        x = share(torch.randn(2 * SIZE, 3, dtype=torch.float64))
        for model in (ours, theirs):
            model.zero_grad()
            loss_of(model, x).backward()
        with together():
            assert_gradients_close(*map(gradients_of, (ours, theirs)))
            before, counters = counters, ours.reducer.channel.engine.counters
            launched = counters["submitted"] - before["submitted"]
            idle = set(map(id, ours.module.idle.parameters()))
            buckets = [
                {id(ours.reducer.parameters[index]) for index in bucket.parameter_indices}
                for bucket in ours.reducer.buckets
            ]
            assert any(some <= idle for some in buckets)
            # The first reduction tells all ranks what no rank uses.
            if step > 0:
                assert launched == sum(not some <= idle for some in buckets)
            else:
                assert launched == len(buckets)


@pytest.mark.mpi(min_size=2)
@HOW
def test_used_on_one_rank(how):
    """Where torch needs the same unused parameters on all ranks, ours does not."""
    model = GivenGradients(**{name: torch.zeros(3) for name in "abc"})
    wrapped = DDP(model, skip_all_reduce_unused_params=True, bucket_cap_mb=1e-6, **{how: True})
    names = "ab" if RANK == SIZE - 1 else "a"
    for _ in range(3):
        wrapped.zero_grad()
        wrapped({name: torch.ones(3) for name in names}).backward()
        with together():
            assert torch.equal(model.b.grad, torch.full((3,), 1.0) / SIZE)
            assert model.c.grad is None


@HOW
def test_used_later(how):
    """An error that names the parameter, instead of ranks that wait for each other."""
    model = GivenGradients(a=torch.zeros(3), b=torch.zeros(3))
    wrapped = DDP(model, skip_all_reduce_unused_params=True, bucket_cap_mb=1e-6, **{how: True})
    for _ in range(2):
        wrapped({"a": torch.ones(3)}).backward()
    said = r"'b' of shape \(3,\).*skip_all_reduce_unused_params=True"
    with together(), pytest.raises(RuntimeError, match=said):
        wrapped({"b": torch.ones(3), "a": torch.ones(3)}).backward()


@pytest.mark.mpi(min_size=2)
def test_with_join(views):
    """A rank that has joined leaves out the same buckets."""
    model = GivenGradients(a=torch.zeros(3), b=torch.zeros(3))
    wrapped = DDP(
        model,
        skip_all_reduce_unused_params=True,
        find_unused_parameters=True,
        bucket_cap_mb=1e-6,
        gradient_as_bucket_view=views,
    )
    with wrapped.join():
        for _ in range(3 * RANK):
            wrapped.zero_grad()
            wrapped({"a": torch.ones(3)}).backward()
    with together():
        assert model.b.grad is None


class _TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(3, 4)
        self.heads = nn.ModuleList([mlp(4, 2), mlp(4, 2)])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(self.body(x)) for head in self.heads]


def test_output_that_no_loss_uses(views, gloo):
    """Its layers' hooks run in every iteration, and bring no gradient."""
    options = {
        "skip_all_reduce_unused_params": True,
        "find_unused_parameters": True,
        "bucket_cap_mb": 1e-6,
        "gradient_as_bucket_view": views,
    }
    module = _TwoOutputs()
    ours = DDP(copy.deepcopy(module), **options)
    theirs = TorchDDP(copy.deepcopy(module), process_group=gloo, **options)
    for _ in range(3):
        x = share(torch.randn(2 * SIZE, 3, dtype=torch.float64))
        for model in (ours, theirs):
            model.zero_grad()
            outputs = model(x)
            (outputs[0].sum() + 0 * outputs[1].detach().sum()).backward()
        with together():
            assert_gradients_close(*map(gradients_of, (ours, theirs)))
