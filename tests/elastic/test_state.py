"""elastic.State: what a commit keeps, who may be a source, and what all have after a sync."""

import os
import random
import shutil
import signal
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from replicas import RANK, SIZE, all_bits, assert_same_bits, gather, together
from torch import nn

from mpiddp import checkpoint, elastic, preemption

pytestmark = pytest.mark.mpi


def parts(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(state):
    state.optimizer.zero_grad()
    state.model(torch.randn(5, 3)).sum().backward()
    state.optimizer.step()


@pytest.mark.smoke
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


@pytest.mark.essential
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


@pytest.mark.essential
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


def drawn():
    return torch.rand(2).tolist(), random.random(), np.random.random()  # noqa: NPY002


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


@pytest.fixture
def training():
    """A name that snapshots have in this test alone."""
    name = gather(f"elastic-test-{uuid.uuid4().hex}")[0]
    yield name
    dist.barrier()
    for folder in of_training(name):
        shutil.rmtree(folder, ignore_errors=True)


def written(state):
    """Wait until the snapshots are there."""
    if state._snapshots is not None and state._snapshots._writing is not None:
        state._snapshots._writing.result()
    dist.barrier()


def of_training(name):
    return list(Path("/dev/shm").glob(f"mpiddp-snapshots-*{name}*"))


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("place", ["checkpoint", "snapshot"])
def test_random_numbers_of_a_job_that_is_started_again(place, mpi_tmp_path, training):
    """Each rank draws what it would have drawn."""
    given = {"checkpoints": mpi_tmp_path, "every": 1} if place == "checkpoint" else {}
    given |= {"name": training} if place == "snapshot" else {}
    seed(RANK)
    state = elastic.State(step=0, **given)
    drawn()
    state.step += 1
    state.commit()
    expected = drawn()
    written(state)
    seed(100)
    again = elastic.State(step=0, **given)
    assert again.resume()
    with together():
        assert drawn() == expected
    assert len(set(gather(str(expected)))) == SIZE


def test_random_numbers_of_more_ranks(mpi_tmp_path):
    """Those that the earlier job did not have draw others, the same ones each time."""
    seed(RANK)
    state = elastic.State(step=0, checkpoints=mpi_tmp_path, every=1)
    state.step += 1
    state.commit()
    found = checkpoint.load(mpi_tmp_path, weights_only=True)
    found.state["random states"] = found.state["random states"][:1]
    checkpoint.save(found.state, mpi_tmp_path, step=2)
    expected = drawn()
    times = []
    for number in (50, 60):
        seed(number)
        assert elastic.State(step=0, checkpoints=mpi_tmp_path).resume()
        times.append(drawn())
    with together():
        assert times[0] == times[1]
        assert (times[0] == expected) == (RANK == 0)
    assert len(set(gather(str(times[0])))) == SIZE


@pytest.mark.parametrize("losses", [1, 2])
def test_random_numbers_of_one_that_is_behind(losses):
    """A loss has kept the last rank from the commit: it has drawn what the step needs.

    Another loss, before all have the state again, changes nothing.
    """
    seed(RANK)
    state = elastic.State(step=0)
    state.sync()
    drawn()
    if SIZE == 1 or RANK < SIZE - 1:
        state.commit()
    expected = drawn()
    seed(RANK)
    drawn()
    state._interrupt()
    if losses == 2:
        state.restore()
        state._interrupt()
    seed(100)
    state.sync()
    with together():
        assert drawn() == expected


def test_sharded_parts_are_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Sequential(nn.Linear(3, 7)), mesh=init_device_mesh("cpu", (SIZE,)))
    state = elastic.State(model=model)
    for call in (state.sync, state.resume):
        with together(), pytest.raises(ValueError, match="one of these is sharded"):
            call()


def test_what_all_ranks_have_processed_is_in_snapshots(monkeypatch, training):
    from mpiddp.horovod.elastic import ElasticSampler, TorchState

    monkeypatch.setattr("mpiddp.elastic.state._name_in_slurm", lambda: training)

    def job():
        return TorchState(sampler=ElasticSampler(range(100), shuffle=False), step=0)

    state = job()
    state.sync()
    list(state.sampler)
    state.sampler.record_batch(0, 3)
    state.step += 1
    state.commit()
    written(state)
    again = job()
    with together():
        assert again.resume()
        assert again.sampler.remaining_indices == list(range(3 * SIZE, 100))


@pytest.mark.parametrize(
    ("announced", "uninstalled"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_snapshots_of_a_function_that_has_returned(announced, uninstalled, training):
    """They are gone, unless the job is only interrupted; another function begins anew."""

    @elastic.run
    def train(state):
        began.append(state.step)
        for _ in range(3):
            state.step += 1
            state.commit()
        written(state)
        if len(began) < 3:
            assert of_training(training)
        while announced and not preemption.requested():
            time.sleep(0.01)
        if uninstalled:
            preemption.uninstall()

    began = []
    preemption.install()
    if announced and RANK == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
    state = elastic.State(step=0, name=training)
    train(state)
    dist.barrier()
    with together():
        assert bool(of_training(training)) == announced
    announced_before, announced, uninstalled = announced, False, False
    preemption.uninstall()
    preemption.install()  # what was announced was of the time before
    preemption.uninstall()
    dist.barrier()
    train(elastic.State(step=0, name=training))
    with together():
        assert began[0] == 0
        assert (began[1] > 0) == announced_before
    dist.barrier()
    with together():
        assert not of_training(training)
    train(state)  # the same state goes on
    with together():
        assert began[2] == 3


def test_names_of_snapshots_in_slurm(monkeypatch):
    """A job that is requeued finds its own; another program in it does not."""

    def name(script, *arguments, **env):
        monkeypatch.setattr("sys.argv", [script, *arguments])
        for key, value in env.items():
            monkeypatch.setenv(key, value)
        return elastic.State(step=0)._name

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert name("/a/train.py") is None
    first = name("/a/train.py", "--rate=1", SLURM_JOB_ID="17", SLURM_RESTART_COUNT="0")
    assert first.startswith("17-train-")
    assert name("/a/train.py", "--rate=1", SLURM_RESTART_COUNT="1", SLURM_STEP_ID="4") == first
    others = [name("/a/train.py", "--rate=2"), name("/b/train.py", "--rate=1"), name("/a/eval.py")]
    assert len({first, *others}) == 4


def test_says_from_where_a_job_goes_on(mpi_tmp_path, training, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    says = [
        elastic.State(step=0, **given)._after_a_restart()
        for given in ({}, {"name": training}, {"checkpoints": mpi_tmp_path})
    ]
    assert says == [
        "Started again, it begins anew, since its State has neither a name nor checkpoints",
        "Started again, it goes on from its last snapshot",
        "Started again, it goes on from its last checkpoint",
    ]
