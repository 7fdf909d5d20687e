"""The same model with torch's plain optimizer and with that of the node, trained side by side."""

from collections.abc import Callable
from typing import Any

import torch
from models import loss_of, mlp
from replicas import assert_close, batch_of, share, together
from torch import nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
}


class CountingSign(torch.optim.Optimizer):
    """A user's optimizer, as Lion: it makes its state anew and counts with Python's numbers."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                mean = state.get("mean", torch.zeros_like(parameter))
                state["mean"] = mean * group["beta"] + parameter.grad * (1 - group["beta"])
                parameter -= group["lr"] / state["count"] * state["mean"].sign()


OPTIMIZERS["the user's"] = (CountingSign, {})


def pair(
    make: Callable[[], nn.Module], name: str, **settings: Any
) -> tuple[tuple[DDP, torch.optim.Optimizer], tuple[DDP, NodeOptimizer]]:
    """Return the same model twice: with the plain optimizer, and with that of the node."""
    optimizer_class, own = OPTIMIZERS[name]
    settings = {**own, **settings}
    torch.manual_seed(1)
    plain = DDP(make())
    torch.manual_seed(1)
    shared = DDP(make(), shared_parameters=True)
    return (
        (plain, optimizer_class(plain.parameters(), **settings)),
        (shared, NodeOptimizer(shared, optimizer_class, **settings)),
    )


def assert_same_parameters(
    actual: nn.Module, expected: nn.Module, exact: bool = True, rounding: float = 0
) -> None:
    """Assert equal parameters, to the last bit or to rounding, see assert_close. Collective."""
    with together():
        for (name, own), (_, truth) in zip(
            actual.named_parameters(), expected.named_parameters(), strict=True
        ):
            if exact:
                assert torch.equal(own, truth), name
            else:
                assert_close(own, truth, name, factor=10, rounding=rounding)


def wide() -> nn.Module:
    """Return a model whose parameters belong to several ranks, and to one."""
    return mlp(30, 400, 300, 7, dtype=torch.float32)


def assert_same_state(
    actual: torch.optim.Optimizer, expected: torch.optim.Optimizer, nones: bool = True
) -> None:
    """Assert equal state_dicts, to rounding; unless `nones`, without what is None. Collective."""
    own, plain = actual.state_dict(), expected.state_dict()
    with together():
        assert own["param_groups"] == plain["param_groups"]
        assert own["state"].keys() == plain["state"].keys()
        for index, state in plain["state"].items():
            kept = {key: value for key, value in state.items() if nones or value is not None}
            found = own["state"][index]
            assert found.keys() == kept.keys()
            for key, value in kept.items():
                assert type(found[key]) is type(value)
                if isinstance(value, torch.Tensor):
                    assert_close(found[key], value, key)
                else:
                    assert found[key] == value


def train(
    models: Any, steps: int, rows: int = 3, width: int = 30, dtype: torch.dtype = torch.float32
) -> None:
    """Train models side by side on the same batches."""
    for step in range(steps):
        torch.manual_seed(step)
        batch = share(batch_of(rows, width, dtype=dtype))
        for model, optimizer in models:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
