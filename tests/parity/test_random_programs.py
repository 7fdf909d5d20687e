"""Programs drawn at random do with our class what they do with torch's on Gloo, step by step."""

import copy
import random

import pytest
import torch
from models import loss_of, mlp
from replicas import RANK, assert_close, assert_gradients_close, gradients_of, together
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi(min_size=2)

LAYERS = (0, 2, 4)
ACTIONS = ["step", "accumulate", "clip", "edit", "zero", "freeze", "thaw", "eval", "save", "load"]


class Program:
    """One model, its optimizer, and what may be done with them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.saved = copy.deepcopy((model.module.state_dict(), self.optimizer.state_dict()))

    def run(self, action: str, number: int) -> None:
        """Do one thing; `number` is drawn, the same on all ranks."""
        x = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        x, layer = x + RANK, self.model.module[LAYERS[number % 3]]
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
            trained = sum(self.model.module[each].weight.requires_grad for each in LAYERS)
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
        else:
            model, optimizer = copy.deepcopy(self.saved)
            self.model.module.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)


def compare(seed: int, gloo: object, actions: int) -> None:
    draw = random.Random(seed)
    module = mlp(3, 4, 4, 2)
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": draw.random() < 0.5}
    options["bucket_cap_mb"] = draw.choice([25, 1e-4])
    pair = [
        Program(DDP(copy.deepcopy(module), **options)),
        Program(TorchDDP(copy.deepcopy(module), process_group=gloo, **options)),
    ]
    done = []
    for _ in range(actions):
        done.append((draw.choice(ACTIONS), draw.randrange(1000)))
        for program in pair:
            program.run(*done[-1])
        with together():
            try:
                assert_gradients_close(*(gradients_of(each.model) for each in pair), 1e3)
                for name, parameter in pair[0].model.module.named_parameters():
                    theirs = pair[1].model.module.get_parameter(name)
                    assert_close(parameter, theirs, name, 1e3)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {options}, after {done}: {error}") from error


@pytest.mark.parametrize("seed", range(12))
def test_same_as_torch(seed, gloo):
    compare(seed, gloo, 25)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_many_more(first, gloo):
    for seed in range(first, first + 100):
        compare(seed, gloo, 40)
