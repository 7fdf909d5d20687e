"""The models that the benchmarks train, each with one batch of inputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Workload:
    """A model to train.

    Attributes:
        make: returns a new model and a batch for it, drawn from torch's random state.
        buffers: whether the classes of DDP synchronise the model's buffers at each forward.
        sleeps: whether backward sleeps: `with_backward_of` then sets how long.
    """

    make: Callable[[], tuple[nn.Module, torch.Tensor]]
    buffers: bool = True
    sleeps: bool = False


class _Sleep(torch.autograd.Function):
    """Hand a tensor on; in backward, sleep before its gradient is handed on."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SleepingLinear(nn.Linear):
    """A linear layer whose backward first sleeps, as a thread does while a device computes."""

    seconds = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return what a linear layer does."""
        outputs: torch.Tensor = _Sleep.apply(super().forward(inputs), self.seconds)
        return outputs


class Transformer(nn.Module):
    """A small causal language model: 6 layers of width 384, a vocabulary of 8192."""

    def __init__(self, width: int = 384, layers: int = 6, vocabulary: int = 8192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits for each position of `tokens`, shape (batch, length)."""
        logits: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits


def linears(count: int, width: int) -> nn.Sequential:
    """Return `count` square linear layers, one after another."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def _convolutions() -> tuple[nn.Module, torch.Tensor]:
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 64, 128, 128):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*layers), torch.randn(4, 3, 16, 16)


MODELS = {
    "8 x Linear(1024)": Workload(lambda: (linears(8, 1024), torch.randn(32, 1024))),
    "3 x Linear(4096)": Workload(lambda: (linears(3, 4096), torch.randn(8, 4096))),
    "200 x Linear(64)": Workload(lambda: (linears(200, 64), torch.randn(32, 64))),
    "transformer": Workload(lambda: (Transformer(), torch.randint(8192, (4, 32)))),
    "convolutions": Workload(_convolutions),
    # What one writes by hand with mpi4py synchronises no buffers: compared with that.
    "convolutions, buffers off": Workload(_convolutions, buffers=False),
}

# Many gradients, evenly over backward: what can be hidden at all is not left to the last layer.
EVEN = "64 x Linear(512)"
# The same, where backward needs no core: nothing is taken from it.
ELSEWHERE = f"{EVEN}, backward sleeps"
MODELS_BETWEEN_HOSTS = {
    EVEN: Workload(lambda: (linears(64, 512), torch.randn(128, 512))),
    ELSEWHERE: Workload(
        lambda: (
            nn.Sequential(*(SleepingLinear(512, 512) for _ in range(64))),
            torch.randn(8, 512),
        ),
        sleeps=True,
    ),
    f"{EVEN}, bfloat16": Workload(
        lambda: (linears(64, 512).bfloat16(), torch.randn(128, 512).bfloat16())
    ),
}


def seconds_of_parts(model: nn.Module, inputs: torch.Tensor) -> tuple[float, float]:
    """Return what forward and backward take on the slowest rank, alone. Collective."""
    samples = []
    for _ in range(7):
        model.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        loss = model(inputs).float().square().mean()
        middle = time.perf_counter()
        loss.backward()
        samples.append((middle - began, time.perf_counter() - middle))
    model.zero_grad()
    slowest = torch.tensor([statistics.median(part) for part in zip(*samples, strict=True)])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest[0].item(), slowest[1].item()


def with_backward_of(workload: Workload, seconds: float) -> Workload:
    """Return `workload` with a batch for which backward takes about `seconds`. Collective.

    One whose backward sleeps gets longer sleeps, not a larger batch.
    """
    if workload.sleeps:
        return _with_sleeps_of(workload, seconds)
    model, inputs = workload.make()
    for _ in range(2):  # time is not quite in proportion to the batch
        _, backward = seconds_of_parts(model, inputs)
        rows = max(1, round(len(inputs) * seconds / backward))
        inputs = inputs[torch.arange(rows) % len(inputs)]

    def make() -> tuple[nn.Module, torch.Tensor]:
        return workload.make()[0], inputs

    return Workload(make, workload.buffers)


def _with_sleeps_of(workload: Workload, seconds: float) -> Workload:
    def make() -> tuple[nn.Module, torch.Tensor]:
        model, inputs = workload.make()
        layers = [each for each in model.modules() if isinstance(each, SleepingLinear)]
        for layer in layers:
            layer.seconds = seconds / len(layers)
        return model, inputs

    return Workload(make, workload.buffers, workload.sleeps)
