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
        assert state._commits == 2


class Counting(torch.optim.SGD):
    """An optimizer that has Python's numbers in its state."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


def scheduled(seed, kind=Counting):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.register_buffer("seen", torch.zeros(2), persistent=False)
    optimizer = kind(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return elastic.State(
        model=model, optimizer=optimizer, scheduler=scheduler, epoch=0, rates=[], none=None
    )


def contents(state):
    """Return all that a state has, as bits and words."""
    return (
        all_bits(state.model.state_dict().items()),
        state.model.seen.tolist(),
        str(state.optimizer.state_dict()),
        str(state.scheduler.state_dict()),
        str((state.epoch, state.rates, state.none)),
        [parameter.grad for parameter in state.model.parameters()],
    )


def change_everything(state):
    """Do what a function may do after its last commit, until a loss interrupts it."""
    step(state)
    state.scheduler.step()
    state.epoch += 1
    state.rates.append(state.scheduler.get_last_lr())
    state.none = "not any more"
    state.model.seen += 1
    with torch.no_grad():
        state.model[0].weight.data *= 2  # no version counts it
    state.model(torch.randn(5, 3)).sum().backward()


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("steps", [2, 0])
@pytest.mark.parametrize("kind", [Counting, torch.optim.Adam, torch.optim.LBFGS])
def test_all_parts_go_back_together(kind, steps):
    state = scheduled(RANK, kind)
    state.sync()

    def closure():
        state.optimizer.zero_grad()
        loss = state.model(torch.ones(5, 3)).sum()
        loss.backward()
        return loss

    for _ in range(steps):
        state.optimizer.step(closure)
        state.scheduler.step()
    state.optimizer.zero_grad()
    state.commit()
    before = contents(state)
    if kind is torch.optim.LBFGS:
        state.optimizer.step(closure)
    else:
        change_everything(state)
    assert contents(state) != before
    state.restore()
    with together():
        assert contents(state) == before


@pytest.mark.parametrize("written", ["first", "last", "all"])
def test_ranks_that_had_begun_to_write(written):
    """All go on from the last commit, which each of them has."""
    state = scheduled(1)
    step(state)
    state.epoch += 1
    state.optimizer.zero_grad()
    state.commit()
    state.sync()  # each rank has drawn its own
    before = contents(state)
    if written == "all" or (0 if written == "first" else SIZE - 1) == RANK:
        change_everything(state)
    state.sync()
    with together():
        assert contents(state) == before
    change_everything(state)
    state.restore()
    with together():
        assert contents(state) == before


def test_what_state_dict_lacks_is_taken_from_the_farthest():
    state = scheduled(1)
    state.sync()
    state.model.seen += RANK + 1
    if RANK == SIZE - 1:
        state.commit()
    state.sync()
    with together():
        assert state.model.seen.tolist() == [SIZE] * 2


def test_parameters_added_since_the_commit():
    """They are gone from the optimizer, as the part of the function that adds them is repeated."""
    state = scheduled(1)
    before = contents(state)
    state.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    state.restore()
    with together():
        assert contents(state) == before


class Failing:
    """Something whose state cannot be had."""

    failing = False

    def state_dict(self):
        if self.failing:
            raise ValueError("not now")
        return {"a": 1}

    def load_state_dict(self, state):
        assert state == {"a": 1}


@pytest.mark.skipif(SIZE == 1, reason="nobody else has the state")
def test_a_commit_that_has_not_kept_all():
    state = elastic.State(step=0, part=Failing())
    state.sync()
    state.step = RANK
    state.part.failing = RANK > 0
    with together():
        if RANK:
            with pytest.raises(ValueError, match="not now"):
                state.commit()
            assert not state.is_clean
            with pytest.raises(RuntimeError, match="ended the last commit before it had kept all"):
                state.restore()
        else:
            state.commit()
    state.part.failing = False
    state.sync()
    with together():
        assert state.is_clean
        assert state.step == 0
    state.part.failing = True
    with together(), pytest.raises(ValueError, match="not now"):
        state.commit()
    state.part.failing = False
    with together(), pytest.raises(RuntimeError, match="each rank that is left"):
        state.sync()


def test_names_of_parts():
    """A part is the user's, whatever the class counts by itself."""
    state = elastic.State(commits=5, begin=1, look=2)
    state.sync()
    state.commits += 1
    state.commit()
    state.commits += 1
    state.restore()
    with together():
        assert (state.commits, state.begin, state.look) == (6, 1, 2)
        for name in ("commit", "sync", "restore", "resume", "is_clean", "_kept", "_random", "a b"):
            with pytest.raises(ValueError, match=f"cannot have a part called '{name}'"):
                elastic.State(**{name: 1})


def test_names_of_parts_of_horovod():
    from mpiddp.horovod.elastic import TorchState

    given = {
        "commits": 0, "is_clean": 1, "resume": 2, "name": 3, "every": 4, "checkpoints": 5,
    }  # fmt: skip
    state = TorchState(**given)
    state.sync()
    for _ in range(3):
        state.commits += 1
        state.commit()
    with together():
        assert {name: getattr(state, name) for name in given} == given | {"commits": 3}
        assert state.model is state.optimizer is None
        for name in ("commit", "sync", "restore", "save", "register_reset_callbacks", "_callbacks"):
            with pytest.raises(ValueError, match=f"TorchState cannot have a part called '{name}'"):
                TorchState(**{name: 1})


def test_a_class_of_the_users():
    class Mine(elastic.State):
        step = 3

    with together():
        assert Mine(step=4).step == 4


def test_keep_copies_has_no_effect():
    with together(), pytest.warns(DeprecationWarning, match="every commit keeps copies"):
        elastic.State(step=0, keep_copies=False)


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
        assert (again.step, again._commits) == (4, 4)
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

    monkeypatch.setattr("mpiddp.elastic.committed.name_in_slurm", lambda: training)

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
        assert again._resume()
        assert again.sampler.remaining_indices == list(range(3 * SIZE, 100))


@pytest.mark.thorough(keep=1)
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
