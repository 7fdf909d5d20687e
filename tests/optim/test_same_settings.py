"""All ranks and nodes step one model with the same settings, or all of them raise."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pretended_nodes import NODES, group_on
from replicas import RANK, SIZE, assert_same_bits, gather, together

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer

pytestmark = [pytest.mark.mpi, pytest.mark.sizes]

ODD = RANK == SIZE - 1


@pytest.fixture(params=["one node", "one rank a node", "three and one"])
def group(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dist.ProcessGroup]:
    """Return a group for whose modules the ranks are on these nodes."""
    with group_on(NODES.get(request.param, [0] * 4), monkeypatch) as made:
        yield made


class TwoDtypes(torch.nn.Module):
    """Float32, and a few elements of another dtype, so few that not every rank has some."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(50, 400)
        self.few = torch.nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.wide(inputs).double().std() * self.few.sum()


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_norms_of_several_dtypes(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """A norm has torch's dtype and the same bits everywhere, and so have what is clipped by it."""
    torch.manual_seed(0)
    model = DDP(TwoDtypes(dtype), process_group=group, shared_parameters=True)
    optimizer = NodeOptimizer(model, torch.optim.SGD, lr=1.0)
    expected = torch.promote_types(torch.float32, dtype)
    for step in range(5):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + RANK)
        model(torch.randn(8, 50)).square().mean().mul(1e6).backward()
        norm = optimizer.clip_grad_norm_(3.0)
        optimizer.step()
        with together():
            assert norm.dtype == expected
        assert_same_bits([("norm", norm)])
        assert_same_bits(model.named_parameters())


def make(group: dist.ProcessGroup, **settings: Any) -> "tuple[DDP, NodeOptimizer]":
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(40, 40), process_group=group, shared_parameters=True)
    return model, NodeOptimizer(model, torch.optim.AdamW, **({"lr": 0.01} | settings))


def backward(model: DDP) -> None:
    model(torch.randn(4, 40)).square().mean().backward()


def change_rate(optimizer: NodeOptimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5 if ODD else 0.25


def change_betas(optimizer: NodeOptimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.75) if ODD else (0.25, 0.75)


def clip(optimizer: NodeOptimizer) -> None:
    optimizer.clip_grad_norm_(0.5 if ODD else 0.25)


def edit_state(optimizer: NodeOptimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * (0.5 if ODD else 0.25)


def remove(optimizer: NodeOptimizer) -> None:
    del optimizer.param_groups[0]["params"][0 if ODD else 1]


def drop_gradient(optimizer: NodeOptimizer) -> None:
    optimizer.param_groups[0]["params"][0 if ODD else 1].grad = None


@pytest.mark.thorough(keep=3)
@pytest.mark.essential(keep=1)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_rate, [r"param_groups\[0\]\['lr'\]", "0.5", "0.25"]),
        (change_betas, [r"'betas'", "0.5, 0.75", "0.25, 0.75"]),
        (clip, ["max_norm", "0.5", "0.25"]),
        (edit_state, ["optimizer.state of weight, 'exp_avg'"]),
        (remove, ["removed from their groups", "weight", "bias"]),
        (drop_gradient, ["without a gradient", "weight", "bias"]),
    ],
)
def test_a_step_with_other_settings(
    group: dist.ProcessGroup, change: Callable[[NodeOptimizer], None], words: "list[str]"
) -> None:
    """Every rank raises in this very step, with both values and who has the other one."""
    model, optimizer = make(group)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    optimizer.zero_grad()
    backward(model)
    change(optimizer)
    with together(), pytest.raises(RuntimeError, match="step with different settings") as caught:
        optimizer.step()
    with together():
        assert f"on rank {SIZE - 1} " in str(caught.value)
        for word in words:
            caught.match(word)


def test_the_same_changes(group: dist.ProcessGroup) -> None:
    """What all ranks change alike is no difference, nor what only looks at the optimizer."""
    model, optimizer = make(group, lr=torch.tensor(0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        if ODD:
            optimizer.state_dict()
            repr(optimizer)
        optimizer.param_groups[0]["note"] = object()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        scheduler.step()
    assert_same_bits(model.named_parameters())


@pytest.mark.thorough(keep=2)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", ["lr", "groups", "fused", "class", "added"])
def test_an_optimizer_made_in_other_ways(group: dist.ProcessGroup, what: str) -> None:
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(40, 40), process_group=group, shared_parameters=True)
    weight, bias = model.module.weight, model.module.bias
    optimizer_class: Any = torch.optim.SGD if what == "class" and ODD else torch.optim.AdamW
    settings: dict[str, Any] = {"lr": 0.5 if what == "lr" and ODD else 0.25}
    groups: Any = [weight, bias]
    if what == "groups":
        groups = [{"params": [weight, bias]}] if ODD else [{"params": [each]} for each in groups]
    elif what == "added":
        groups = [weight]
    elif what == "fused":
        settings[what] = ODD

    def construct() -> None:
        optimizer = NodeOptimizer(model, optimizer_class, groups, **settings)
        optimizer.add_param_group({"params": [bias], "lr": 0.5 if ODD else 0.25})

    with together(), pytest.raises(RuntimeError, match="make a NodeOptimizer with diff") as caught:
        construct()
    with together():
        assert f"on rank {SIZE - 1} " in str(caught.value)
    assert len({str(error)[8:] for error in gather(str(caught.value))}) == 1
