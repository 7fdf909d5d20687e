"""Models that hvd.DistributedOptimizer trains, beside one process with the whole batch."""

import torch
from models import mlp
from replicas import (
    assert_close,
    assert_replicated,
    batch_of,
    together,
)
from torch import Tensor, nn

import mpiddp.horovod as hvd

__all__ = ["assert_trained_alike", "distributed", "draw", "loss_of", "net", "sgd", "step_alone"]


def net() -> nn.Sequential:
    return mlp(6, 16, 16, 1)


def draw() -> Tensor:
    return batch_of(4, 6, dtype=torch.float64)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def sgd(model: nn.Module, **settings: object) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **settings)


def distributed(model: nn.Module, **arguments: object) -> torch.optim.SGD:
    return hvd.DistributedOptimizer(
        sgd(model), named_parameters=model.named_parameters(), **arguments
    )


def step_alone(alone: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """Make the step that the others are compared with, of the whole batch in one process."""
    optimizer.zero_grad()
    loss_of(alone, batch).backward()
    optimizer.step()


def assert_trained_alike(model: nn.Module, alone: nn.Module, factor: float = 8) -> None:
    with together():
        pairs = zip(model.named_parameters(), alone.parameters(), strict=True)
        for (name, ours), theirs in pairs:
            assert_close(ours, theirs, name, factor)
    assert_replicated(model)
