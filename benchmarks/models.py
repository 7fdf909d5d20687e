"""The models that the benchmarks train, each with one batch of inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Workload:
    """A model to train.

    Attributes:
        make: returns a new model and a batch for it, drawn from torch's random state.
        buffers: whether the classes of DDP synchronise the model's buffers at each forward.
    """

    make: Callable[[], tuple[nn.Module, torch.Tensor]]
    buffers: bool = True


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
