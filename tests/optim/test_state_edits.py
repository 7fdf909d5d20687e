"""What users change in `optimizer.state` and in the groups takes effect, as in torch, or raises."""

import collections
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_pairs import assert_same_parameters, pair, train, wide
from replicas import RANK, SIZE, together
from torch import nn
from torch.optim import Optimizer

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer

pytestmark = [pytest.mark.mpi, pytest.mark.sizes]


def first(optimizer: Optimizer) -> torch.Tensor:
    parameter: torch.Tensor = optimizer.param_groups[0]["params"][0]
    return parameter


def replace_all(optimizer: Optimizer) -> None:
    optimizer.state = collections.defaultdict(dict)


def swap(optimizer: Optimizer) -> None:
    """Of tensors that are themselves the state."""
    for state in optimizer.state.values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()


def halve(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5


def restart(optimizer: Optimizer) -> None:
    optimizer.state[first(optimizer)]["step"] = torch.tensor(0.0)


def halve_in_place(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def halve_by_numpy(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        values = state["exp_avg"].numpy()
        values *= 0.5


def restart_in_place(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"].zero_()


def change_all(optimizer: Optimizer) -> None:
    """In place, and in the tables."""
    for number, state in enumerate(optimizer.state.values()):
        state["exp_avg"].data.mul_(0.5)
        if number % 2:
            state["exp_avg_sq"] = state["exp_avg_sq"] * 2
            state["step"] += 2


def remove(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][2:]


EDITS: dict[str, Callable[[Optimizer], Any]] = {
    "replaced": replace_all,
    "cleared": lambda optimizer: optimizer.state.clear(),
    "popped": lambda optimizer: optimizer.state.pop(first(optimizer)),
    "deleted": lambda optimizer: optimizer.state.__delitem__(first(optimizer)),
    "emptied": lambda optimizer: optimizer.state[first(optimizer)].clear(),
    "swapped": swap,
    "halved": halve,
    "restarted": restart,
    "in place": halve_in_place,
    "in place by numpy": halve_by_numpy,
    "numbers in place": restart_in_place,
    "in place and in the tables": change_all,
    "updated": lambda optimizer: optimizer.state[first(optimizer)].update(
        exp_avg=torch.ones_like(first(optimizer))
    ),
    "removed": remove,
    "removed in place": lambda optimizer: optimizer.param_groups[0]["params"].pop(),
    "only read": lambda optimizer: [optimizer.state[p] for p in list(optimizer.state)],
}


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_edits(edit: Callable[[Optimizer], Any]) -> None:
    models = pair(wide, "AdamW")
    train(models, 3)
    for _, optimizer in models:
        edit(optimizer)
    train(models, 3)
    assert_same_parameters(models[1][0], models[0][0])


def test_removed_and_put_back() -> None:
    models = pair(wide, "AdamW")
    removed = []
    for round_ in range(3):
        train(models, 2)
        for _, optimizer in models:
            parameters = optimizer.param_groups[0]["params"]
            if round_ == 0:
                removed.append(parameters.pop(1))
            elif round_ == 1:
                parameters.insert(1, removed.pop(0))
    assert_same_parameters(models[1][0], models[0][0])


class Skipping(nn.Module):
    """Does not use its middle layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = (nn.Linear(30, 30) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_unused_parameters_are_not_stepped_with_their_neighbours(
    load: bool, momentum: float
) -> None:
    """After all state is gone, or was loaded, they look alike."""
    models = []
    for shared in (False, True):
        torch.manual_seed(0)
        model = DDP(Skipping(), shared_parameters=shared, find_unused_parameters=True)
        settings = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.1}
        optimizer: torch.optim.Optimizer
        if shared:
            optimizer = NodeOptimizer(model, torch.optim.SGD, **settings)
        else:
            optimizer = torch.optim.SGD(model.parameters(), **settings)
        models.append((model, optimizer))
        train([(model, optimizer)], 2)
        if load:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        else:
            optimizer.state.clear()
        train([(model, optimizer)], 2)
    assert_same_parameters(models[1][0], models[0][0])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("edit", ["cleared", "in place", "numbers in place"])
def test_edits_of_one_rank(edit: str) -> None:
    _, (model, optimizer) = pair(wide, "AdamW")
    train([(model, optimizer)], 2)
    if RANK == SIZE - 1:
        EDITS[edit](optimizer)
    with together(), pytest.raises(RuntimeError, match="with different settings"):
        optimizer.step()


def test_parameters_that_are_new_in_a_group() -> None:
    _, (model, optimizer) = pair(wide, "AdamW")
    train([(model, optimizer)], 1)
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(2)))
    with together(), pytest.raises(RuntimeError, match="added by add_param_group"):
        optimizer.step()


def test_copies_are_plain() -> None:
    """What is saved needs nothing of ours to be loaded."""
    _, (model, optimizer) = pair(wide, "AdamW")
    train([(model, optimizer)], 1)
    saved = optimizer.state_dict()
    with together():
        assert type(pickle.loads(pickle.dumps(optimizer.state))) is collections.defaultdict
        assert all(type(state) is dict for state in saved["state"].values())
        assert all(type(state) is dict for state in copy.deepcopy(optimizer.state).values())
