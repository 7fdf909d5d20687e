"""A script with DataParallel in its old habit: no main guard, the whole batch, prints its losses.

Run as `python` by one process, and by `python -m mpiddp --data-parallel` on several ranks.
"""

import argparse
import dataclasses
import enum
from collections import namedtuple
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import DataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--fail", choices=("main", "replica"))
parser.add_argument("--steps", type=int, default=4)
arguments = parser.parse_args()

WIDTH = 8
torch.manual_seed(3)


class Mode(enum.Enum):
    PLAIN = 1
    SQUARE = 2


@dataclasses.dataclass
class Options:
    scale: float = 0.5
    names: list = dataclasses.field(default_factory=list)


class Output(NamedTuple):
    prediction: torch.Tensor
    hidden: torch.Tensor


Pair = namedtuple("Pair", "inputs targets")


def activation(values):
    return torch.tanh(values) * options.scale


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    @property
    def width(self):
        return self.linear.in_features

    @staticmethod
    def twice(values):
        return 2 * values

    def forward(self, values):
        return self.twice(activation(self.linear(values)))


class Net(nn.Module):
    def __init__(self, make=lambda width: Block(width)):
        super().__init__()
        self.blocks = nn.ModuleList(make(WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.final = lambda values: values * WIDTH
        self.mode = Mode.PLAIN

    def forward(self, pair, mode=None):
        if arguments.fail == "replica" and len(pair.inputs) < 4:
            raise ValueError("a replica with few rows")
        values = pair.inputs
        for block in self.blocks:
            values = values + block(values)
        hidden = self.norm(values)
        assert mode is Mode.SQUARE, mode
        assert self.mode is Mode.PLAIN
        return Output(self.final(self.last(hidden)), hidden)


options = Options()
model = DataParallel(Net())
assert isinstance(model, torch.nn.DataParallel)
assert isinstance(model, torch.nn.parallel.DataParallel)
assert all(name.startswith("module.") for name in model.state_dict())
critic = torch.nn.parallel.DataParallel(nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 1)))
optimizer = torch.optim.Adam([*model.parameters(), *critic.parameters()], lr=0.05)

for step in range(arguments.steps):
    rows = torch.randn(11, WIDTH)
    output = model(Pair(rows, None), mode=Mode.SQUARE)
    loss = (output.prediction - rows.sum(1, keepdim=True)).square().mean()
    loss = loss + critic(output.hidden).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for parameter in critic.parameters():
        parameter.data.clamp_(-0.3, 0.3)
    print(f"step {step} loss {loss.item():.5f}", flush=True)
    if arguments.fail == "main" and step == 1:
        raise LookupError("the script fails")

model.eval()
with torch.no_grad():
    rows = torch.randn(2, WIDTH)
    print(f"evaluated {model(Pair(rows, None), mode=Mode.SQUARE)[0].sum().item():.5f}")
