"""A model whose bucket size is measured, and its training."""

from collections.abc import Callable
from typing import Any

import torch
from replicas import RANK
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP

__all__ = [
    "STEPS",
    "TRYING",
    "WIDTH",
    "Net",
    "Step",
    "batch",
    "layout",
    "plain_step",
    "train",
    "watched",
]

WIDTH = 256
# 3 MiB: two sizes make different buckets.
LAYERS = 12
# More than a search between two takes.
STEPS = 50
# After so many, another size than the default is being tried.
TRYING = 11


class Net(nn.Module):
    """A chain of layers, with buffers, and one that may be left out."""

    def __init__(self, layers: int = LAYERS, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(layers))
        self.norm = nn.BatchNorm1d(WIDTH, dtype=dtype)

    def forward(self, x: Tensor, leave_out: int = -1) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != leave_out:
                x = x + layer(x).tanh()
        result: Tensor = self.norm(x)
        return result


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + RANK))


Step = Callable[[DDP, torch.optim.Optimizer, int], Tensor]


def plain_step(model: DDP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(batch(step)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(model: DDP, one_step: Step = plain_step, steps: int = STEPS) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return [one_step(model, optimizer, step) for step in range(steps)]


def layout(model: DDP) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(bucket.parameter_indices) for bucket in model.reducer.buckets)


def watched(one_step: Step, layouts: list[Any]) -> Step:
    """Return a step that notes each change of the buckets."""

    def stepping(model: DDP, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
        loss = one_step(model, optimizer, step)
        if not layouts or layouts[-1] != layout(model):
            layouts.append(layout(model))
        return loss

    return stepping
