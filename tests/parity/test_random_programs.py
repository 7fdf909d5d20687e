"""Programs drawn at random do with our classes what they do with torch's on Gloo, step by step.

With a NodeOptimizer they may be refused, too, on all ranks.
"""

import copy
import random

import pytest
import torch
from models import loss_of, mlp
from replicas import (
    RANK,
    assert_close,
    assert_gradients_close,
    gather,
    gradients_of,
    together,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer

pytestmark = pytest.mark.mpi(min_size=2)

# Some of these programs only begin to read gradients late.
node_warning = pytest.mark.filterwarnings("ignore:the program reads or changes .grad")

LAYERS = (0, 2, 4)
ACTIONS = ["step", "accumulate", "clip", "edit", "zero", "freeze", "thaw", "eval", "save", "load"]
# What else is done with optimizers.
EDITS = ["rate", "scale state", "drop state", "clear state", "remove", "put back"]


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.02}),
}


class Program:
    """One model, its optimizer, and what may be done with them."""

    def __init__(self, model: nn.Module, name: str = "SGD", node: bool = False) -> None:
        self.model = model
        optimizer_class, settings = OPTIMIZERS[name]
        if node:
            self.optimizer = NodeOptimizer(model, optimizer_class, **settings)
        else:
            self.optimizer = optimizer_class(model.parameters(), **settings)
        self.all = list(self.optimizer.param_groups[0]["params"])
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
        elif action in EDITS:
            self.edit(action, number)
        else:
            model, optimizer = copy.deepcopy(self.saved)
            self.model.module.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)

    def edit(self, action: str, number: int) -> None:
        """Change what the optimizer keeps."""
        (group,) = self.optimizer.param_groups
        parameter = self.all[number % len(self.all)]
        state = self.optimizer.state.get(parameter, {})
        if action == "rate":
            group["lr"] *= 0.5 if number % 2 else 1.5
        elif action == "scale state":
            for key, value in list(state.items()):
                if isinstance(value, torch.Tensor) and value.dim():
                    state[key] = value * 0.5
        elif action == "drop state":
            self.optimizer.state.pop(parameter, None)
        elif action == "clear state":
            self.optimizer.state.clear()
        else:
            left = [each for each in group["params"] if each is not parameter]
            group["params"] = left if action == "remove" and left else list(self.all)


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


def error_of(program: Program, action: str, number: int) -> str:
    """Run an action; return what it raises, in words."""
    try:
        program.run(action, number)
    except (RuntimeError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compare_on_node(seed: int, gloo: object, actions: int) -> None:
    """Of the actions each program has some; and it reads gradients after each, or never."""
    draw = random.Random(seed)
    module = mlp(3, 4, 4, 2)
    name, reads = draw.choice(sorted(OPTIMIZERS)), draw.random() < 0.5
    drawn = ["step", *draw.sample(ACTIONS + EDITS, draw.randrange(2, 9))]
    options = {"find_unused_parameters": True, "bucket_cap_mb": draw.choice([25, 1e-4])}
    pair = [
        Program(DDP(copy.deepcopy(module), shared_parameters=True, **options), name, node=True),
        Program(TorchDDP(copy.deepcopy(module), process_group=gloo, **options), name),
    ]
    done = []
    for _ in range(actions):
        done.append((draw.choice(drawn), draw.randrange(1000)))
        words = f"seed {seed}, {name}, {options}, after {done}"
        raised = [error_of(program, *done[-1]) for program in pair]
        of_all = gather(raised)
        assert all(own for own, _ in of_all) == any(own for own, _ in of_all), (words, of_all)
        if raised[0]:
            return
        with together():
            assert not raised[1], words
            try:
                if reads:
                    assert_gradients_close(*(gradients_of(each.model) for each in pair), 1e3)
                for key, parameter in pair[0].model.module.named_parameters():
                    theirs = pair[1].model.module.get_parameter(key)
                    assert_close(parameter, theirs, key, 1e3)
            except AssertionError as error:
                raise AssertionError(f"{words}: {error}") from error


@pytest.mark.parametrize("seed", range(12))
def test_same_as_torch(seed, gloo):
    compare(seed, gloo, 25)


@pytest.mark.parametrize("seed", range(12))
@node_warning
def test_same_on_a_node_as_torch(seed, gloo):
    compare_on_node(seed, gloo, 25)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 100))
@node_warning
def test_many_more_on_a_node(first, gloo):
    for seed in range(first, first + 100):
        compare_on_node(seed, gloo, 40)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_many_more(first, gloo):
    for seed in range(first, first + 100):
        compare(seed, gloo, 40)
