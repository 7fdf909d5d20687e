"""elastic.Sampler: every element once an epoch, however many ranks there are."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from mpiddp import elastic
from mpiddp.elastic import sampler as module


@pytest.fixture
def world(monkeypatch):
    """Return a function that makes this process a rank of a world."""

    def become(rank: int, ranks: int) -> None:
        monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(module.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(module.dist, "get_world_size", lambda: ranks)

    return become


def consumed(world, samplers, batches, size):
    """Let each rank take some batches; return what they took."""
    taken = []
    for rank, sampler in enumerate(samplers):
        world(rank, len(samplers))
        loader = DataLoader(TensorDataset(torch.arange(20)), size, sampler=sampler)
        for number, (batch,) in enumerate(loader):
            if number == batches:
                break
            taken += batch.tolist()
            sampler.record_batch(number, size)
    return taken


@pytest.mark.essential
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_are_lost(world, shuffle):
    """Three ranks, then two, then one: together they see all elements once."""
    samplers = [elastic.Sampler(range(20), shuffle) for _ in range(3)]
    taken = consumed(world, samplers, 2, 2)
    assert len(set(taken)) == 12
    for sampler in samplers[1:]:
        sampler.load_state_dict(samplers[0].state_dict())
    taken += consumed(world, samplers[1:], 1, 2)
    assert len(set(taken)) == 16
    samplers[2].load_state_dict(samplers[1].state_dict())
    taken += consumed(world, samplers[2:], 10, 2)
    assert sorted(taken) == list(range(20))


def test_every_rank_has_equally_many(world):
    samplers = [elastic.Sampler(range(20)) for _ in range(3)]
    taken = consumed(world, samplers, 10, 4)
    assert len(taken) == 21
    assert set(taken) == set(range(20))
    assert all(sampler.consumed == 20 for sampler in samplers)


def test_an_epoch_that_goes_on(world):
    world(0, 2)
    sampler = elastic.Sampler(range(20), seed=3)
    first = list(sampler)
    sampler.record_batch(0, 4)
    sampler.set_epoch(0)
    assert list(sampler) == [*torch.randperm(20, generator=torch.Generator().manual_seed(3))[8::2]]
    sampler.set_epoch(1)
    assert len(sampler) == 10
    assert sorted(first) != sorted(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_fewer_elements_than_ranks(world):
    dealt = []
    for rank in range(5):
        world(rank, 5)
        dealt.append(list(elastic.Sampler(range(2), shuffle=False)))
    assert dealt == [[0], [1], [0], [1], [0]]
