"""Optimizers that step while backward runs do what the same ones do after it on torch's class."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES, GivenGradients, loss_of, mlp
from replicas import RANK, SIZE, assert_close, assert_replicated, gather, share, together
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, optimizer_overlap_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch warns of its own torch.jit.script
    from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers
    from torch.distributed.optim.utils import as_functional_optim

pytestmark = pytest.mark.mpi

SMALL_BUCKETS = 0.0005
OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99)}),
}


@pytest.fixture(params=OPTIMIZERS)
def optimizer(request: pytest.FixtureRequest) -> tuple[Callable[..., Any], dict[str, Any]]:
    return OPTIMIZERS[request.param]


def fuse(model: nn.Module, kind: Any, options: dict[str, Any]) -> None:
    model._register_fused_optim(kind, **options)  # type: ignore[operator]


def hook_then_optimizer(model: nn.Module, kind: Any, options: dict[str, Any]) -> None:
    state = optimizer_overlap_hooks._OptimizerHookState(as_functional_optim(kind, **options))
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    model.register_comm_hook(None, hook)  # type: ignore[operator]


def in_backward(model: nn.Module, kind: Any, options: dict[str, Any]) -> None:
    _apply_optimizer_in_backward(kind, model.parameters(), options)


WAYS = {"fused": fuse, "hook": hook_then_optimizer, "in backward": in_backward}


@pytest.mark.essential(keep=4)
@pytest.mark.smoke(keep=1)
@pytest.mark.thorough(keep=6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["mlp", "channels_last"])
def test_as_after_backward(case, way, optimizer, views, gloo):
    kind, options = optimizer
    module = CASES[case].make().double()
    ours = DDP(copy.deepcopy(module), gradient_as_bucket_view=views, bucket_cap_mb=SMALL_BUCKETS)
    theirs = TorchDDP(module, process_group=gloo)
    WAYS[way](ours, kind, options)
    plain = kind(theirs.parameters(), **options)
    for _ in range(4):
        batch = share(CASES[case].batch(2 * SIZE).double())
        ours.zero_grad()
        loss_of(ours, batch).backward()
        plain.zero_grad()
        loss_of(theirs, batch).backward()
        plain.step()
        with together():
            for (name, own), other in zip(
                ours.named_parameters(), theirs.parameters(), strict=True
            ):
                assert_close(own, other, name, 100)
                if way == "in backward":
                    assert own.grad is None
        assert_replicated(ours)


def test_fused_on_some_parameters(views, gloo):
    module = mlp(3, 4, 2)
    pair = (
        DDP(copy.deepcopy(module), gradient_as_bucket_view=views),
        TorchDDP(module, process_group=gloo, gradient_as_bucket_view=views),
    )
    for model in pair:
        chosen = [model.module[0].weight]
        model._register_fused_optim(torch.optim.SGD, 0.5, optim_params=chosen)
    for _ in range(3):
        batch = torch.randn(2, 3, dtype=torch.float64) + RANK
        for model in pair:
            model.zero_grad()
            loss_of(model, batch).backward()
    with together():
        for own, theirs in zip(*(model.parameters() for model in pair), strict=True):
            assert_close(own, theirs, "parameter", 10)
            assert_close(own.grad, theirs.grad, "gradient", 10)
        assert not torch.equal(pair[0].module[0].weight, mlp(3, 4, 2)[0].weight)
    with together(), pytest.raises(RuntimeError, match="can only be called once"):
        pair[0]._register_fused_optim(torch.optim.SGD, 0.5)


def test_optimizer_without_functional_counterpart():
    wrapped = DDP(nn.Linear(3, 2))
    with together(), pytest.raises(ValueError, match="does not have a functional counterpart"):
        wrapped._register_fused_optim(torch.optim.LBFGS, 0.1)


@pytest.mark.essential(keep=1)
def test_in_backward_on_some_parameters(views):
    """The others are averaged as ever, and keep their gradients."""
    model = mlp(3, 4, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, model[0].parameters(), {"lr": 0.5})
    alone = copy.deepcopy(model)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for _ in range(3):
        batch = torch.randn(2 * SIZE, 3, dtype=torch.float64)
        for module, rows in ((wrapped, share(batch)), (alone, batch)):
            module.zero_grad()
            loss_of(module, rows).backward()
        with together(), torch.no_grad():
            for parameter in alone[0].parameters():
                parameter -= 0.5 * parameter.grad
            for (name, own), other in zip(
                model.named_parameters(), alone.parameters(), strict=True
            ):
                assert_close(own, other, name, 10)
                if name.startswith("0."):
                    assert own.grad is None
                else:
                    assert_close(own.grad, other.grad, name, 10)
    with together():
        assert len(_get_in_backward_optimizers(wrapped)) == 2
        assert wrapped._get_ddp_logging_data()["comm_hook"] == "step_on_mean"


def test_in_backward_where_a_rank_uses_less(views):
    model = GivenGradients(a=torch.zeros(3), b=torch.zeros(2), c=torch.zeros(4))
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    wrapped = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=views)
    used = {"a": torch.ones(3), "b": torch.ones(2)} if RANK else {"a": torch.ones(3)}
    for step in range(3):
        wrapped(used).backward()
        with together():
            assert model.a.tolist() == [-(step + 1)] * 3
            assert_close(model.b, torch.full((2,), -(step + 1) * (SIZE - 1) / SIZE), "b")
            assert not model.c.any()
            assert all(parameter.grad is None for parameter in model.parameters())
        assert_replicated(wrapped)


def test_evaluated_on_one_rank_first():
    """Nothing collective happens under no_grad, whatever is still to be set up."""
    model = nn.Linear(3, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    wrapped = DDP(model)
    if RANK == 0:
        with torch.no_grad():
            wrapped(torch.ones(1, 3))
    gather("rank 0 is through")
    before = model.weight.detach().clone()
    wrapped(torch.full((1, 3), 1.0 + RANK)).sum().backward()
    with together():
        assert_close(model.weight, before - (SIZE + 1) / 2, "weight")


def test_copies_have_no_optimizers():
    """As copies of parameters have none; what is left is the averaging."""
    model = nn.Linear(3, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    wrapped = DDP(model)
    wrapped(torch.ones(1, 3)).sum().backward()
    copied = copy.deepcopy(wrapped)
    del wrapped
    copied(torch.full((1, 3), 1.0 + RANK)).sum().backward()
    with together():
        assert copied.module.weight.grad.unique().tolist() == [(SIZE + 1) / 2]


def test_another_process_group():
    """They go on to step."""
    model = nn.Linear(3, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    wrapped = DDP(model)
    wrapped(torch.ones(1, 3)).sum().backward()
    wrapped._update_process_group(dist.group.WORLD)
    before = model.weight.detach().clone()
    wrapped(torch.full((1, 3), 1.0 + RANK)).sum().backward()
    with together():
        assert_close(model.weight, before - (SIZE + 1) / 2, "weight")
        assert model.weight.grad is None


def test_beside_another_hook():
    """As on torch's class, at the first forward."""
    model = nn.Linear(3, 2)
    wrapped = DDP(model)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 1.0})
    with together(), pytest.raises(RuntimeError, match="can only be called once"):
        wrapped(torch.ones(1, 3))
