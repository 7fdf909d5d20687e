"""Neighbouring parameters that a rank steps as one tensor, until they differ."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from optimizer_pairs import OPTIMIZERS, assert_same_parameters
from replicas import SIZE, gather, share, together
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.ddp.node_parts import BucketLayout, cut
from mpiddp.optim import NodeOptimizer

pytestmark = [pytest.mark.mpi, pytest.mark.sizes]

LAYERS = 12


class Layers(nn.Module):
    """Many small parameters, of which a forward leaves some out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(LAYERS))

    def forward(self, x: Tensor, unused: Sequence[int] = ()) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number in unused else x + layer(x).tanh()
        return x


def wrapped(shared: bool) -> DDP:
    """Return the same model each time."""
    torch.manual_seed(1)
    return DDP(Layers(), shared_parameters=shared, find_unused_parameters=True)


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert equal states of optimizers, to the last bit."""
    assert actual["param_groups"] == expected["param_groups"]
    assert actual["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert actual["state"][index].keys() == state.keys()
        for key, value in state.items():
            found = actual["state"][index][key]
            assert type(found) is type(value)
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(value)), (index, key)


def step_all(models: Any, step: int, unused: Sequence[int]) -> None:
    """Step models on the same batch, and compare them with the first."""
    torch.manual_seed(step)
    x = share(torch.randn(3 * SIZE, 64))
    for model, optimizer in models:
        optimizer.zero_grad()
        model(x, unused).square().mean().backward()
        optimizer.step()
    for model, optimizer in models[1:]:
        assert_same_parameters(model, models[0][0])
        with together():
            assert_same_state(optimizer.state_dict(), models[0][1].state_dict())


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["momentum", "AdamW", "NAdam", "Adagrad", "the user's"])
def test_unused_parameters(name: str, foreach: bool) -> None:
    """Each counts its own steps, also from a state_dict of the plain optimizer."""
    optimizer_class, settings = OPTIMIZERS[name]
    if foreach and name != "the user's":
        settings = {**settings, "foreach": True}
    plain = wrapped(shared=False)
    optimizer = optimizer_class(plain.parameters(), **settings)
    model = wrapped(shared=True)
    node = NodeOptimizer(model, optimizer_class, **settings)
    models = [(plain, optimizer), (model, node)]
    for step, unused in enumerate([(), (), (3, 4), (), (11,), (3,)]):
        step_all(models, step, unused)
        blocks = sum(gather(len(node._inner_groups[0]["params"])))
        with together():
            assert blocks < LAYERS if step < 2 else blocks > 2
    loaded = wrapped(shared=True)
    with loaded.writing():
        loaded.module.load_state_dict(plain.module.state_dict())
    other = NodeOptimizer(loaded, optimizer_class, **settings)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(2):
        step_all([*models, (loaded, other)], step, unused=(5,) if step else ())


def test_blocks_are_whole_again() -> None:
    """Where the loaded parameters have made the same steps."""
    model = wrapped(shared=True)
    optimizer = NodeOptimizer(model, torch.optim.AdamW)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    whole = [len(blocks) for blocks in optimizer._blocks]
    optimizer.zero_grad()
    model(torch.ones(2, 64), (4,)).sum().backward()
    optimizer.step()
    divided = [len(blocks) for blocks in optimizer._blocks]
    pairs = gather((divided, whole))
    optimizer.load_state_dict(saved)
    with together():
        assert any(now != before for now, before in pairs)
        assert [len(blocks) for blocks in optimizer._blocks] == whole


def test_cut() -> None:
    """No block has two owners, or others between its parameters, or is too long."""
    sizes = {3: 10, 0: 5, 4: 0, 1: 7, 2: 30}
    starts, start = {}, 0
    for index, size in sizes.items():
        starts[index], start = start, start + size
    layout = BucketLayout(torch.float32, starts, sizes, 80, (0, 1, 2), frozenset({1, 2}))
    found = [
        [(part.number, part.parameter, part.start, part.stop, part.owner) for part in block]
        for block in cut([layout], [0, 2, 3, 4], 12, first=7)
    ]
    assert found == [
        [(7, 3, 0, 8, 0)],
        [(8, 3, 8, 10, 0), (9, 0, 10, 15, 0)],
        [(10, 2, 22, 31, 1)],
        [(11, 2, 31, 40, 1)],
        [(12, 2, 40, 52, 2)],
    ]
