"""A model, its optimizer, and what programs drawn at random do with them."""

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
from models import loss_of
from replicas import RANK
from torch import nn

from mpiddp.optim import NodeOptimizer

__all__ = ["ACTIONS", "OPTIMIZERS", "Program", "chain", "draw_some", "error_of"]

ACTIONS = ["step", "accumulate", "clip", "edit", "zero", "freeze", "thaw", "eval", "save", "load"]
# What else is done with optimizers.
_EDITS = ["rate", "scale state", "drop state", "clear state", "remove", "put back", "own clip"]
_EDITS += ["weights"]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.02}),
}

# Places of the layers in what `chain` returns.
_LAYERS = (0, 2, 4)


class Layer(nn.Linear):
    """A linear layer that takes inputs of any dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


def chain(widths: Sequence[int], dtypes: Sequence[torch.dtype]) -> nn.Sequential:
    """Return three layers with tanh between them, each of its own dtype."""
    one, two, three = (
        Layer(before, after, dtype=dtype)
        for before, after, dtype in zip(widths, widths[1:], dtypes, strict=False)
    )
    return nn.Sequential(one, nn.Tanh(), two, nn.Tanh(), three)


class Program:
    """One model, its optimizer, and what may be done with them.

    Args:
        model: what `chain` returns, wrapped.
        name: of the optimizer.
        node: whether it is a NodeOptimizer.
        groups: whether each layer has a group of parameters, with a learning rate of its own.
    """

    def __init__(
        self, model: nn.Module, name: str = "SGD", node: bool = False, groups: bool = False
    ) -> None:
        self.model = model
        optimizer_class, settings = OPTIMIZERS[name]
        params: Any = list(model.parameters())
        if groups:
            layers = [list(model.module[layer].parameters()) for layer in _LAYERS]
            rates = [settings["lr"], settings["lr"] / 2, settings["lr"] / 4]
            params = [
                {"params": of_layer, "lr": rate}
                for of_layer, rate in zip(layers, rates, strict=True)
            ]
        if node:
            self.optimizer = NodeOptimizer(model, optimizer_class, params, **settings)
        else:
            self.optimizer = optimizer_class(params, **settings)
        self.all = [list(group["params"]) for group in self.optimizer.param_groups]
        self.saved = copy.deepcopy((model.module.state_dict(), self.optimizer.state_dict()))

    def run(self, action: str, number: int) -> None:
        """Do one thing; `number` is drawn, the same on all ranks."""
        x = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        x, layer = x + RANK, self.model.module[_LAYERS[number % 3]]
        parameters = list(self.model.parameters())
        if action == "step":
            loss_of(self.model, x).backward()
            self.optimizer.step()
        elif action == "accumulate":
            with self.model.no_sync():
                loss_of(self.model, x).backward()
            loss_of(self.model, -x).backward()
        elif action == "clip":
            nn.utils.clip_grad_norm_(parameters, 0.1)
        elif action == "edit":
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * 2 if number % 2 else parameter.grad.mul_(0.5)
        elif action == "zero":
            self.optimizer.zero_grad(set_to_none=number % 2 == 0)
        elif action == "freeze":
            trained = sum(self.model.module[each].weight.requires_grad for each in _LAYERS)
            layer.requires_grad_(trained == 1 and layer.weight.requires_grad)
        elif action == "thaw":
            layer.requires_grad_(True)
        elif action == "eval":
            with torch.no_grad():
                self.model.eval()(x)
            self.model.train()
        elif action == "save":
            state = self.model.module.state_dict(), self.optimizer.state_dict()
            self.saved = copy.deepcopy(state)
        elif action in _EDITS:
            self._edit(action, number)
        else:
            model, optimizer = copy.deepcopy(self.saved)
            self.model.module.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)

    def _edit(self, action: str, number: int) -> None:
        """Change what the optimizer keeps, or the gradients that it steps with."""
        chosen = number % len(self.all)
        group, all_of_group = self.optimizer.param_groups[chosen], self.all[chosen]
        parameter = all_of_group[number // 3 % len(all_of_group)]
        state = self.optimizer.state.get(parameter, {})
        if action == "rate":
            group["lr"] *= 0.5 if number % 2 else 1.5
        elif action == "own clip":
            self._clip(0.1 if number % 2 else 0.05)
        elif action == "scale state":
            for key, value in list(state.items()):
                if isinstance(value, torch.Tensor) and value.dim():
                    state[key] = value.mul_(0.5) if number % 2 else value * 0.5
        elif action == "weights":
            parameter.data.clamp_(-1, 1)
        elif action == "drop state":
            self.optimizer.state.pop(parameter, None)
        elif action == "clear state":
            self.optimizer.state.clear()
        else:
            left = [each for each in group["params"] if each is not parameter]
            group["params"] = left if action == "remove" and left else list(all_of_group)

    def _clip(self, most: float) -> None:
        if isinstance(self.optimizer, NodeOptimizer):
            self.optimizer.clip_grad_norm_(most)
        else:
            every = [each for group in self.optimizer.param_groups for each in group["params"]]
            nn.utils.clip_grad_norm_(every, most)


def error_of(program: Program, action: str, number: int) -> str:
    """Run an action; return what it raises, in words."""
    try:
        program.run(action, number)
    except (RuntimeError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def draw_some(draw: random.Random) -> list[str]:
    """Return what a program does: of all actions some."""
    return ["step", *draw.sample(ACTIONS + _EDITS, draw.randrange(2, 9))]
