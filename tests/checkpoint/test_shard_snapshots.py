"""Snapshots of sharded states: a node's shards in its memory, and a copy on the next node."""

import contextlib
import functools
import shutil
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import patience
import pytest
import torch
import torch.distributed as dist
from pretended_nodes import NODES
from replicas import RANK, SIZE, bits, gather, together
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from two_users import as_nobody, two_users

from mpiddp import checkpoint

pytestmark = pytest.mark.mpi(min_size=2)


@contextlib.contextmanager
def memories(place):
    """The folder of this rank's node's memory, when the ranks are on these nodes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as own:
        folders = gather(own)
        yield Path(folders[place.index(place[RANK])])
        dist.barrier()


@pytest.fixture(params=["one rank a node", "two and two"])
def placed(request):
    place = NODES[request.param][:SIZE]
    if len(set(place)) == 1:
        place = list(range(SIZE))
    with memories(place) as folder:
        yield place, folder


@pytest.fixture
def node():
    with memories(list(range(SIZE))) as folder:
        yield folder


class Training:
    """A sharded model and what trains it. Collective."""

    def __init__(self, seed=0, group=None):
        torch.manual_seed(seed)
        group = group or dist.group.WORLD
        mesh = DeviceMesh.from_group(group, "cpu")
        self.model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
        self.model.register_buffer("replicated", torch.zeros(3))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 6)).square().mean().backward()
        self.optimizer.step()
        self.model.replicated += 1

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def take(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def bits(self):
        """What all ranks together hold, whatever their number."""
        found = {"replicated": bits(self.model.replicated)}
        for name, parameter in self.model.named_parameters():
            found[name] = bits(parameter.full_tensor())
            for key, value in self.optimizer.state[parameter].items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                found[f"{name} {key}"] = bits(whole)
        return found


def made(snapshots, training, steps):
    """Train, with a snapshot after the last step; return what it holds."""
    for step in steps:
        training.step()
        if step != steps[-1] or snapshots._shards is None:
            snapshots.step(training.state, step)
    if snapshots._shards is not None:
        snapshots.wait()
        snapshots._shards._next = 0  # now, whatever it costs
        assert snapshots.step(training.state, steps[-1])
        snapshots.wait()
    return training.bits()


@pytest.mark.essential(keep=1)
def test_a_node_is_lost(placed):
    place, folder = placed
    before = made(checkpoint.Snapshots("t", share=1, folder=folder), Training(), [1, 2, 3])
    dist.barrier()
    if place.index(place[-1]) == RANK:
        shutil.rmtree(folder / next(iter(folder.iterdir())))
    dist.barrier()
    other = Training(seed=1)
    other.step()  # it has states of the optimizer to fill
    found = checkpoint.Snapshots("t", folder=folder).load(into=other.state())
    with together():
        assert found is not None
        assert found.step == 3
    other.take(found.state)
    after = other.bits()
    with together():
        assert not list(folder.glob("*/.reading*"))
        assert after == before


@two_users
def test_another_user_has_the_place_of_a_lost_node(node):
    """The others' copies are read all the same, and nothing of it lies in that folder."""
    before = made(checkpoint.Snapshots("t", share=1, folder=node), Training(), [1, 2])
    dist.barrier()
    if RANK == SIZE - 1:
        (root,) = node.iterdir()
        shutil.rmtree(root)
        node.chmod(0o1777)
        as_nobody('mkdir "$1" && chmod 777 "$1"', root)
    dist.barrier()
    other = Training(seed=1)
    other.step()
    found = checkpoint.Snapshots("t", folder=node).load(into=other.state())
    other.take(found.state)
    after = other.bits()
    with together():
        assert after == before
        assert RANK < SIZE - 1 or [list(each.iterdir()) for each in node.iterdir()] == [[]]


def test_fewer_ranks(node):
    """The last rank is lost with its memory, and the others go on without it."""
    before = made(checkpoint.Snapshots("t", share=1, folder=node), Training(), [1, 2])
    group = dist.new_group(list(range(SIZE - 1)))
    after = before
    if RANK < SIZE - 1:
        other = Training(seed=1, group=group)
        other.step()
        found = checkpoint.Snapshots("t", folder=node).load(into=other.state(), group=group)
        other.take(found.state)
        after = other.bits()
    with together():
        assert after == before


def test_two_neighbours_are_lost(node):
    training = Training()
    made(checkpoint.Snapshots("t", share=1, folder=node), training, [1, 2])
    dist.barrier()
    if RANK in (0, SIZE - 1):
        shutil.rmtree(next(iter(node.iterdir())))
    found = checkpoint.Snapshots("t", folder=node).load(into=training.state())
    with together():
        assert found is None


def test_a_file_is_damaged(placed):
    _, folder = placed
    training = Training()
    before = made(checkpoint.Snapshots("t", share=1, folder=folder), training, [1, 2])
    dist.barrier()
    if RANK == 0:
        file = next(folder.rglob("__0_0.distcp"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    dist.barrier()
    training.step()
    found = checkpoint.Snapshots("t", folder=folder).load(into=training.state())
    training.take(found.state)
    after = training.bits()
    with together():
        assert after == before


def test_the_newer_one_is_not_whole(node):
    """The job was ended when some nodes had a newer snapshot, and others did not."""
    training = Training()
    snapshots = checkpoint.Snapshots("t", share=1, folder=node)
    before = made(snapshots, training, [1, 2])
    (older,) = node.glob("*/*-step-2")
    kept = node / "kept"
    shutil.copytree(older, kept)
    made(snapshots, training, [3])
    with together():
        assert not older.exists()
        (newer,) = node.glob("*/*-step-3")
    shutil.copytree(kept, older)
    shutil.rmtree(kept)
    dist.barrier()
    if RANK in (0, SIZE - 1):
        shutil.rmtree(newer)
    found = checkpoint.Snapshots("t", folder=node).load(into=training.state())
    training.take(found.state)
    after = training.bits()
    with together():
        assert found.step == 2
        assert after == before


def test_beside_training(node):
    """It is the state of the call, on all ranks the same one; and training is not disturbed."""
    training = Training()
    snapshots = checkpoint.Snapshots("t", share=1, folder=node)
    held = {}
    count = step = 0
    begun = torch.zeros(1)
    give_up = time.monotonic() + 60  # on a slow machine a snapshot's price is many of these steps
    while step < 30 or (begun.item() < 2 and time.monotonic() < give_up):
        training.step()
        total = torch.full((1000,), float(RANK + step))
        dist.all_reduce(total)
        assert total.eq(sum(range(SIZE)) + SIZE * step).all()
        held[step] = training.bits()
        count += snapshots.step(training.state, step)
        begun[0] = count if time.monotonic() < give_up else 2
        dist.all_reduce(begun, dist.ReduceOp.MIN)
        step += 1
    snapshots.wait()
    found = snapshots.load(into=training.state())
    training.take(found.state)
    after = training.bits()
    with together():
        assert count > 1
        assert after == held[found.step]


@pytest.mark.parametrize("calls", [1, 4])
def test_a_rank_hears_too_late_when_the_next_one_is(node, calls):
    """At the end of the training, or so that it begins later than the others."""
    training = Training()
    snapshots = checkpoint.Snapshots("t", share=1, folder=node)
    made(snapshots, training, [1, 2])
    shards = snapshots._shards
    shards._next = shards._count + 1
    if RANK == 0:
        shards._under_way = told = Future()
    begun = []
    for step in range(3, 3 + calls):
        if RANK == 0 and step == 6:
            told.set_result(shards._next)
        begun.append(snapshots.step(training.state, step))
    with together():
        assert begun[0] == (RANK != 0)
        assert sum(begun) == (RANK != 0 or calls == 4)
    if RANK == 0 and calls < 4:
        threading.Timer(0.1, told.set_result, [shards._next]).start()
    snapshots.wait()
    found = snapshots.load(into=training.state())
    nexts = gather(shards._next)
    with together():
        assert found.step == 2
        assert len(set(nexts)) == 1
    made(snapshots, training, [9])
    with together():
        assert [path.name[-6:] for path in node.glob("*/0*")] == ["step-9"]


def test_as_often_as_the_share_allows(node):
    training = Training()
    snapshots = checkpoint.Snapshots("t", share=0.02, folder=node)

    def state():
        time.sleep(0.1)  # what one costs at least
        return training.state()

    began = time.monotonic()
    count = 0
    for step in range(60):
        time.sleep(0.01)
        count += snapshots.step(state, step)
        dist.barrier()
    elapsed = time.monotonic() - began
    snapshots.wait()
    with together():
        assert count >= 1
        assert count * 0.1 < 0.02 * elapsed + 2 * 0.1


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("at", ["the shards", "the copy", "the end"])
def test_no_memory_on_one_node(node, monkeypatch, at):
    """All ranks are told, the snapshot before stays on all nodes, and the next one is made."""
    from mpiddp.checkpoint import folders, node_copies

    training = Training()
    snapshots = checkpoint.Snapshots("t", share=1, folder=node)
    held = {2: made(snapshots, training, [1, 2])}

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if RANK == SIZE - 1:
            broken = {
                "the shards": (FileSystemWriter, "write_data"),
                "the copy": (node_copies, "_reserve"),
                "the end": (folders, "finish"),
            }
            patch.setattr(*broken[at], full)
        with pytest.raises((OSError, RuntimeError), match="No space left"):
            made(snapshots, training, [3])
    held[3] = training.bits()
    found = snapshots.load(into=training.state())
    training.take(found.state)
    after = training.bits()
    with together():
        assert list(node.glob("*/*-step-2"))
        # The end came on the other nodes, which have copies.
        assert found.step == (3 if at == "the end" else 2)
        assert after == held[found.step]
    made(snapshots, training, [4])
    with together():
        assert [path.name[-6:] for path in node.glob("*/0*")] == ["step-4"]
    snapshots.clear()
    with together():
        assert list(node.iterdir()) == []


def test_no_state_to_fill(node):
    snapshots = checkpoint.Snapshots("t", share=1, folder=node)
    made(snapshots, Training(), [1, 2])
    with pytest.raises(TypeError, match="is sharded: give a state to fill"):
        snapshots.load()


@pytest.mark.thorough
@pytest.mark.essential
def test_beside_an_asynchronous_save(node, mpi_tmp_path):
    """Two threads call collectives, in another order on each rank, and so does training."""
    training = Training()
    snapshots = checkpoint.Snapshots("t", share=1, folder=node)
    made(snapshots, training, [1, 2])
    for step in range(3, 9):
        training.step()
        snapshots._shards._next = 0
        if (RANK + step) % 2:
            snapshots.step(training.state, step)
        checkpoint.async_save(training.state(), mpi_tmp_path, step=step)
        if (RANK + step) % 2 == 0:
            snapshots.step(training.state, step)
        held = training.bits()
        snapshots.wait()
    checkpoint.save({}, mpi_tmp_path / "last", step=9)  # when the asynchronous one has ended
    for load in (snapshots.load, functools.partial(checkpoint.load, mpi_tmp_path)):
        again = Training(seed=1)
        found = load(into=again.state())
        again.take(found.state)
        now = again.bits()
        with together():
            assert found.step == 8
            assert now == held
    snapshots.clear()


def test_what_killed_jobs_have_left(node):
    root = checkpoint.Snapshots("t", folder=node).root
    if RANK == SIZE - 1:
        for name in (".000001-step-7.writing", ".000012-step-40.writing", ".reading-abc"):
            (root / name).mkdir(parents=True)
            (root / name / "shard").write_bytes(bytes(1000))
    dist.barrier()
    training = Training()
    snapshots = checkpoint.Snapshots("t", share=1, folder=node)
    made(snapshots, training, [1, 2])
    writing = [path.name for path in root.iterdir() if path.suffix == ".writing"]
    snapshots.load(into=training.state())
    with together():
        assert writing == []
        assert [path.name[-6:] for path in root.glob("0*")] == ["step-2"]


def test_an_exception_is_not_held_up(node):
    """By ranks that do not come to the end of the snapshot."""
    training = Training()
    snapshots = checkpoint.Snapshots("t", share=1, folder=node)
    made(snapshots, training, [1, 2])
    shards = snapshots._shards
    shards._next = 0

    def fail():
        with snapshots:
            assert snapshots.step(training.state, 3)
            raise ValueError("on purpose")

    began = time.monotonic()
    if RANK == 0:
        with pytest.raises(ValueError, match="on purpose"):
            fail()
        seconds = time.monotonic() - began
    dist.barrier()
    if RANK == 0:
        shards._end()
    else:
        snapshots.wait()
    with together():
        assert RANK > 0 or seconds < patience.enough(5)
        assert [path.name[-6:] for path in snapshots.root.glob("0*")] == ["step-2"]
