"""elastic.State: what a commit keeps, who may be a source, and what all have after a sync."""

import random

import pytest
import torch
import torch.distributed as dist
from replicas import RANK, SIZE, all_bits, assert_same_bits, gather, together
from torch import nn

from mpiddp import elastic

pytestmark = pytest.mark.mpi


def parts(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(state):
    state.optimizer.zero_grad()
    state.model(torch.randn(5, 3)).sum().backward()
    state.optimizer.step()


def test_all_have_what_the_first_has():
    model, optimizer = parts(RANK)
    state = elastic.State(model=model, optimizer=optimizer, step=RANK, words=["rank", RANK])
    state.sync()
    assert_same_bits(model.state_dict().items())
    with together():
        assert (state.step, state.words) == (0, ["rank", 0])
        assert state.is_clean


@pytest.mark.parametrize("farthest", ["first", "last"])
def test_the_one_that_has_come_farthest(farthest):
    """Some ranks have completed a step that others have not."""
    model, optimizer = parts(1)
    state = elastic.State(model=model, optimizer=optimizer, step=0)
    state.sync()
    ahead = 0 if farthest == "first" else SIZE - 1
    for _ in range(2 if ahead == RANK else 1):
        step(state)
        state.step += 1
        state.commit()
    mine = gather(all_bits(model.state_dict().items()))
    state.sync()
    with together():
        assert state.step == 2
        assert all_bits(model.state_dict().items()) == mine[ahead]
        assert state.commits == 2


@pytest.mark.skipif(SIZE == 1, reason="nobody else has the state")
def test_one_that_had_begun_to_write():
    """It may not be the source, though it has come as far as the others."""
    model, optimizer = parts(1)
    state = elastic.State(model=model, optimizer=optimizer)
    step(state)
    state.commit()
    if RANK == 0:
        with torch.no_grad():
            model[0].weight.add_(1)
    assert gather(state.is_clean) == [False] + [True] * (SIZE - 1)
    expected = gather(all_bits(model.state_dict().items()))[1]
    state.sync()
    with together():
        assert all_bits(model.state_dict().items()) == expected


def test_all_had_begun_to_write():
    model, optimizer = parts(1)
    state = elastic.State(model=model, optimizer=optimizer)
    step(state)
    with pytest.raises(RuntimeError, match="no rank has the state after a complete step"):
        state.sync()


def test_kept_copies():
    model, optimizer = parts(1)
    state = elastic.State(model=model, optimizer=optimizer, keep_copies=True)
    step(state)
    state.commit()
    before = all_bits(model.state_dict().items()), str(optimizer.state_dict())
    step(state)
    state.restore()
    with together():
        assert (all_bits(model.state_dict().items()), str(optimizer.state_dict())) == before


def test_what_forward_changes_is_taken_back():
    model, optimizer = parts(1)
    state = elastic.State(model=model, optimizer=optimizer, words=["a"])
    step(state)
    state.commit()
    before = all_bits(model.state_dict().items())
    drawn = torch.rand(3), random.random()
    state.commit()
    expected = torch.rand(3), random.random()
    model(torch.randn(5, 3)).sum().backward()
    state.words.append("b")
    state.restore()
    with together():
        assert all_bits(model.state_dict().items()) == before
        assert state.words == ["a"]
        again = torch.rand(3), random.random()
        assert torch.equal(again[0], expected[0])
        assert again[1] == expected[1]
        assert not torch.equal(again[0], drawn[0])


def test_a_job_that_is_started_again(mpi_tmp_path):
    def job():
        model, optimizer = parts(RANK)
        return elastic.State(
            model=model, optimizer=optimizer, step=0, checkpoints=mpi_tmp_path, every=2
        )

    state = job()
    assert not state.resume()
    state.sync()
    for _ in range(5):
        step(state)
        # As a wrapper would: alike on all ranks.
        for parameter in state.model.parameters():
            dist.broadcast(parameter.data, 0)
        state.step += 1
        state.commit()
    again = job()
    assert again.resume()
    with together():
        assert (again.step, again.commits) == (4, 4)
    assert_same_bits(again.model.state_dict().items())
