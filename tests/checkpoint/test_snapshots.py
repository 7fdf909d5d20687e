"""Snapshots in node memory: the newest one of all nodes, at a share of the time."""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from replicas import RANK, SIZE, gather, together

from mpiddp import checkpoint

pytestmark = pytest.mark.mpi


@pytest.fixture
def node(monkeypatch):
    """The memory of this rank's node, which is its own."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def state(step):
    return {"a": torch.full((50_000,), float(step)), "step": step}


def made(snapshots, step):
    """Make a snapshot, whatever it costs, and wait for it."""
    assert snapshots.step(lambda: state(step), step)
    snapshots._writing.result()


@pytest.mark.essential
def test_a_node_is_lost(node):
    """The nodes have come different ways; the farthest one is lost with its memory."""
    snapshots = checkpoint.Snapshots("training", share=1, folder=node)
    made(snapshots, 10 + RANK)
    dist.barrier()
    if SIZE > 1 and RANK == SIZE - 1:
        shutil.rmtree(node)
    found = checkpoint.Snapshots("training", folder=node).load()
    last = 10 + SIZE - 1 - (SIZE > 1)
    with together():
        assert found is not None
        assert (found.step, found.state["step"]) == (last, last)
        assert found.state["a"].eq(last).all()


def test_damaged(node):
    snapshots = checkpoint.Snapshots("training", share=1, folder=node)
    made(snapshots, 5)
    if RANK == 0:
        (file,) = node.rglob("state.pt")
        file.write_bytes(file.read_bytes()[:-10])
    dist.barrier()
    found = snapshots.load()
    with together():
        assert (found is None) == (SIZE == 1)
        assert found is None or found.step == 5


def test_one_rank_of_a_node(mpi_tmp_path):
    snapshots = checkpoint.Snapshots("training", share=1, folder=mpi_tmp_path)
    assert gather(snapshots.step(lambda: state(1), 1)) == [True] + [False] * (SIZE - 1)
    snapshots.clear()
    dist.barrier()
    with together():
        assert list(mpi_tmp_path.iterdir()) == []


def test_nothing_there(node):
    assert checkpoint.Snapshots("training", folder=node).load() is None


def test_as_often_as_the_share_allows(node):
    share = 0.05
    snapshots = checkpoint.Snapshots("training", share=share, folder=node)
    big = {"a": torch.zeros(3_000_000)}
    copied = []  # when each copy was begun

    def state():
        copied.append(time.monotonic())
        return big

    called, used, copying, writing = [], [], [], []
    began = time.monotonic()
    while time.monotonic() - began < 2:
        called.append(time.monotonic())
        before = time.thread_time()
        if snapshots.step(state, 1):
            used.append(time.thread_time() - before)
            copying.append(snapshots._copying_seconds)
            writing.append(snapshots._writing)
        else:
            called.pop()
        time.sleep(0.002)
    snapshots.clear()
    with together():
        assert len(copying) >= 1
        copied = copied[-len(copying) :]  # the first call asks for the state once more
        # Whatever else the processor did, the next copy waits for the share of this one's time.
        for index in range(len(copying) - 1):
            assert copying[index] >= used[index] / 2 - 0.01  # the call does little else
            cost = copying[index] + writing[index].result()
            assert copied[index + 1] - called[index] >= cost / share


@pytest.mark.essential
def test_it_is_the_state_of_the_call(node):
    """And memory that is used again is not that of a copy that is still being written."""
    snapshots = checkpoint.Snapshots("training", share=1, folder=node)
    changing = torch.zeros(1_000_000)
    last = -1
    for step in range(50):
        changing.fill_(step)
        if snapshots.step(lambda: {"a": changing}, step):
            last = step
    snapshots._writing.result()
    dist.barrier()
    found = snapshots.load()
    with together():
        assert found is not None
        assert found.state["a"].eq(found.step).all()
        assert found.step >= last


def test_wrong_use(node, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ValueError, match="give the training a name"):
        checkpoint.Snapshots()
    with pytest.raises(ValueError, match="share must be more than 0"):
        checkpoint.Snapshots("training", share=0)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    made(checkpoint.Snapshots(share=1, folder=node), 3)
    with together():
        (path,) = node.iterdir()
        assert f"-17-{Path(sys.argv[0]).stem}-" in path.name


def no_space(*_, **__):
    raise OSError(28, "No space left on device")


def test_a_failure_is_told_once(node, monkeypatch):
    snapshots = checkpoint.Snapshots("training", share=1, folder=node)
    with monkeypatch.context() as patch:
        patch.setattr("mpiddp.checkpoint.snapshots.write", no_space)
        assert snapshots.step(lambda: state(1), 1)
        with together(), pytest.raises(OSError, match="No space left"):
            snapshots.wait()
    while not snapshots.step(lambda: state(2), 2):
        time.sleep(0.01)
    snapshots.wait()
    assert [entry.name[-6:] for entry in snapshots.root.glob("0*")] == ["step-2"]
    snapshots.close()


def test_all_goes_also_where_the_last_one_has_failed(node, monkeypatch):
    snapshots = checkpoint.Snapshots("training", share=1, folder=node)
    made(snapshots, 1)
    monkeypatch.setattr("mpiddp.checkpoint.snapshots.write", no_space)
    while not snapshots.step(lambda: state(2), 2):
        time.sleep(0.01)
    snapshots.clear()
    assert list(node.iterdir()) == []
    with pytest.raises(RuntimeError, match="after shutdown"):
        snapshots._thread.submit(no_space)


def test_those_of_somebody_else(node, monkeypatch):
    """They are not unpickled: anybody may write to /dev/shm."""
    snapshots = checkpoint.Snapshots("training", share=1, folder=node)
    made(snapshots, 1)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert snapshots.load(weights_only=False) is None
