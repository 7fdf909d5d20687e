"""Programs drawn at random do with our classes what they do with torch's on Gloo, step by step.

With one model a node they may be refused, too, on all ranks.
"""

import copy
import random

import pytest
import torch
from random_programs import ACTIONS, OPTIMIZERS, Program, chain, draw_some, error_of
from replicas import (
    assert_close,
    assert_gradients_close,
    gather,
    gradients_of,
    together,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import adopted

pytestmark = pytest.mark.mpi(min_size=2)

WIDTHS, DTYPES = (3, 4, 4, 2), (torch.float64,) * 3


def compare(seed: int, gloo: object, actions: int) -> None:
    draw = random.Random(seed)
    module = chain(WIDTHS, DTYPES)
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


def compare_on_node(seed: int, gloo: object, actions: int) -> None:
    """Of the actions each program has some; and it reads gradients after each, or never.

    Its optimizer is a NodeOptimizer, or torch's own that is adopted.
    """
    adopted.install()
    draw = random.Random(seed)
    module = chain(WIDTHS, DTYPES)
    name, reads = draw.choice(sorted(OPTIMIZERS)), draw.random() < 0.5
    drawn, groups, node = draw_some(draw), draw.random() < 0.5, draw.random() < 0.5
    options = {"find_unused_parameters": True, "bucket_cap_mb": draw.choice([25, 1e-4])}
    own = DDP(copy.deepcopy(module), shared_parameters=True, **options)
    pair = [
        Program(own, name, node=node, groups=groups),
        Program(
            TorchDDP(copy.deepcopy(module), process_group=gloo, **options), name, groups=groups
        ),
    ]
    done = []
    for _ in range(actions):
        done.append((draw.choice(drawn), draw.randrange(1000)))
        words = f"seed {seed}, {name}, node {node}, groups {groups}, {options}, after {done}"
        raised = [error_of(program, *done[-1]) for program in pair]
        of_all = gather(raised)
        assert all(own for own, _ in of_all) == any(own for own, _ in of_all), (words, of_all)
        if raised[0]:
            assert node or raised[1], words  # an optimizer of torch refuses what torch refuses
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
def test_same_on_a_node_as_torch(seed, gloo):
    compare_on_node(seed, gloo, 25)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_many_more_on_a_node(first, gloo):
    for seed in range(first, first + 100):
        compare_on_node(seed, gloo, 40)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_many_more(first, gloo):
    for seed in range(first, first + 100):
        compare(seed, gloo, 40)
