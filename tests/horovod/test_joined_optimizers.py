"""A rank that has joined stands in for its part of the steps of DistributedOptimizers."""

import copy
import gc

import pytest
import torch
from replicas import RANK, SIZE, share, together
from torch import nn

import mpiddp.horovod as hvd

pytestmark = [pytest.mark.mpi, pytest.mark.sizes, pytest.mark.timeout(60)]


def model_and_optimizer(seed, **settings):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), **settings
    )


def batch_of(rank, step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(97 * step + rank)).double()


def expected_after(model, steps_of):
    """Return a copy of `model` after the steps of all ranks, where those that are done give zeros.

    Args:
        model: as it is before.
        steps_of: how many steps each rank takes.
    """
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(steps_of)):
        optimizer.zero_grad()
        for rank, steps in enumerate(steps_of):
            if step < steps:
                (alone(batch_of(rank, step)).square().mean() / SIZE).backward()
        optimizer.step()
    return alone


def train(model, optimizer, steps, total=None):
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch_of(RANK, step)).square().mean()
        loss.backward()
        optimizer.step()
        if total is not None:
            # Named operations go on beside the steps.
            total.append(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="ranks").item())


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("first", [0, 1, 3], ids=["before-any-step", "one", "three"])
@pytest.mark.parametrize("last_joins_first", [False, True])
def test_ranks_with_different_numbers_of_steps(first, last_joins_first):
    """Twice, so that the ranks go on together in between."""
    steps_of = [first + 2 * rank for rank in range(SIZE)]
    if last_joins_first:
        steps_of.reverse()
    model, optimizer = model_and_optimizer(3)
    for _ in range(2):
        reference = expected_after(model, steps_of)
        optimizer.state.clear()
        ranks = []
        train(model, optimizer, steps_of[RANK], ranks)
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        with together():
            assert last == (0 if last_joins_first else SIZE - 1) or SIZE == 1
            assert ranks == [sum(step < steps for steps in steps_of) for step in range(len(ranks))]
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs)


def test_two_optimizers_in_any_order():
    """Those who go on step one of them more often than the other."""
    one, first = model_and_optimizer(5)
    two, second = model_and_optimizer(6, compression=hvd.Compression.fp16)
    third = model_and_optimizer(7)  # never stepped on any rank
    start = copy.deepcopy(two)
    train(one, first, 2)
    train(two, second, 1)
    if RANK == 0:
        train(one, first, 5)
        train(two, second, 2)
        train(one, first, 1)
    assert hvd.join() == 0
    hvd.broadcast_parameters(one.state_dict(), root_rank=0)
    hvd.broadcast_parameters(two.state_dict(), root_rank=0)
    with together():
        for before, after in zip(start.parameters(), two.parameters(), strict=True):
            assert not torch.equal(before, after)
    # All go on: the same gradients everywhere.
    batch = torch.ones(2, 3).double()
    for model, optimizer in ((two, second), (one, first), third):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer.zero_grad()
        (model(batch) * (RANK + 1)).sum().backward()
        optimizer.synchronize()
        alone = copy.deepcopy(model)
        alone.zero_grad()
        (alone(batch) * (SIZE + 1) / 2).sum().backward()
        with together():
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)


def test_gradients_of_several_passes():
    model, optimizer = model_and_optimizer(8, backward_passes_per_step=2)
    reference = copy.deepcopy(model)
    for step in range(1 + RANK):
        optimizer.zero_grad()
        for _ in range(2):
            (share(model(batch_of(0, step).repeat(SIZE, 1))).square().mean() / 2).backward()
        optimizer.step()
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(SIZE):
        alone.zero_grad()
        (reference(batch_of(0, step)).square().mean() * (SIZE - step) / SIZE).backward()
        alone.step()
    with together():
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.mpi(min_size=2)
def test_join_between_backward_and_step_is_refused():
    model, optimizer = model_and_optimizer(9)
    train(model, optimizer, 1)
    model(batch_of(RANK, 0)).sum().backward()
    with pytest.raises(RuntimeError, match="between backward and step"):
        hvd.join()
    optimizer.step()
    assert hvd.join() in range(SIZE)


def test_a_join_collects_garbage_only_where_it_must():
    """With torch's objects a collection takes 0.1 s; optimizers in use cannot be garbage."""
    model, optimizer = model_and_optimizer(10)
    rounds = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            train(model, optimizer, 1 + RANK)
            before = gc.get_stats()[2]["collections"]
            hvd.join()
            rounds.append(gc.get_stats()[2]["collections"] - before)
    finally:
        gc.enable()
    with together():
        assert rounds == [0, 0, 0]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_that_is_garbage_on_some_ranks_only(steps):
    """It is in a circle of references, and the collector has run on the last rank."""
    kept, optimizer = model_and_optimizer(11)
    dropped, other = model_and_optimizer(12)
    train(kept, optimizer, 1)
    train(dropped, other, steps)
    hvd.join()
    other.circle = [other]
    gc.disable()
    try:
        del dropped, other
        if RANK == SIZE - 1:
            gc.collect()
        train(kept, optimizer, 1 + RANK)
        last = hvd.join()
    finally:
        gc.enable()
    with together():
        assert last == SIZE - 1
