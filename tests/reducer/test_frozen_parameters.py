"""Layers that are frozen and thawed after wrapping, and transforms of torch.func: as torch's."""

import copy

import pytest
import torch
from models import loss_of, mlp
from replicas import RANK, assert_gradients_close, assert_replicated, gradients_of, together
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi(min_size=2)

UNUSED = {"find_unused_parameters": True}
OPTIONS = {
    "unused": UNUSED,
    "views": {**UNUSED, "gradient_as_bucket_view": True},
    "small buckets": {**UNUSED, "bucket_cap_mb": 1e-5},
}
# Which layers need a gradient, by step.
SCHEDULES = {
    "first": [(0, 1, 2), (0, 1, 2), (1, 2), (1, 2), (0, 1, 2)],
    "last": [(0, 1, 2), (0, 1), (0, 1), (0, 1, 2)],
    "gradually": [(0, 1, 2), (2,), (1, 2), (0, 1, 2)],
    "adapters in turn": [(0, 1, 2), (0, 2), (1, 2), (0, 2), (1, 2)],
    "all but one": [(0, 1, 2), (1,), (1,), (0,)],
}


def set_trained(model: nn.Module, layers: tuple[int, ...]) -> None:
    for index in range(3):
        model.module[2 * index].requires_grad_(index in layers)


def pair_of(gloo, **options):
    module = mlp(3, 4, 4, 2)
    return (
        DDP(copy.deepcopy(module), **options),
        TorchDDP(copy.deepcopy(module), process_group=gloo, **options),
    )


@pytest.mark.essential(keep=3)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_frozen_after_wrapping(options, schedule, gloo):
    pair = pair_of(gloo, **options)
    for step, layers in enumerate(schedule):
        x = torch.randn(2, 3, dtype=torch.float64) + RANK
        for model in pair:
            set_trained(model, layers)
            model.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, x).backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair))
        assert_replicated(pair[0])


def test_frozen_on_one_rank():
    """The others wait for its zeros; torch's class waits for ever."""
    model = DDP(mlp(3, 4, 2), **UNUSED)
    if RANK == 0:
        model.requires_grad_(False)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    loss_of(model, x).backward()
    model.requires_grad_(True)
    with together():
        assert all(parameter.grad is not None for parameter in model.parameters()) or RANK == 0


@pytest.mark.parametrize("options", [UNUSED, {"static_graph": True}, {}], ids=str)
def test_all_frozen(options, gloo):
    """As for adversarial inputs: no gradient is due, and training goes on after it."""
    pair = pair_of(gloo, **options)
    x = torch.randn(2, 3, dtype=torch.float64) + RANK
    for frozen in (False, True, True, False, False):
        inputs = []
        for model in pair:
            model.zero_grad()
            model.requires_grad_(not frozen)
            inputs.append(x.clone().requires_grad_())
            loss_of(model, inputs[-1]).backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair))
            assert_gradients_close(*({"x": each.grad} for each in inputs))


def test_frozen_between_forward_and_backward():
    """On all ranks alike: no error without a word, and the same gradients everywhere."""
    model = DDP(mlp(3, 4, 2), **UNUSED)
    for _ in range(3):
        model.zero_grad()
        model.requires_grad_(True)
        loss = loss_of(model, torch.ones(2, 3, dtype=torch.float64) * (1 + RANK))
        model.module[0].requires_grad_(False)
        loss.backward()
        assert_replicated(model)


@pytest.mark.parametrize("how", ["grad", "vjp", "jacrev", "vmap"])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_transforms_of_torch_func(how, options, gloo):
    """They return their own gradients, and change nothing for the next step.

    torch's class refuses them in the first iteration with a static graph.
    """
    module = mlp(3, 4, 2)
    x = torch.randn(2, 3, dtype=torch.float64) + RANK
    model = DDP(copy.deepcopy(module), **options)
    plain = nn.ModuleDict({"module": copy.deepcopy(module)})
    plain.forward = plain["module"].forward
    for _ in range(2):
        with together():
            theirs, ours = (transformed(how, each, x) for each in (plain, model))
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other)
            assert all(parameter.grad is None for parameter in model.parameters())
    other = TorchDDP(copy.deepcopy(module), process_group=gloo)
    for each in (model, other):
        loss_of(each, x).backward()
    with together():
        assert_gradients_close(gradients_of(model), gradients_of(other))
    assert_replicated(model)


def transformed(how: str, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    if how == "grad":
        return list(torch.func.grad(loss)(parameters).values())
    if how == "vjp":
        value, pull = torch.func.vjp(loss, parameters)
        return list(pull(torch.ones_like(value))[0].values())
    if how == "jacrev":
        return list(torch.func.jacrev(loss)(parameters).values())
    return [torch.func.vmap(lambda row: model(row).sum())(x).detach()]
