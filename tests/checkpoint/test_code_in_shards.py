"""What weights_only=True refuses in a sharded checkpoint: whatever would run code when read."""

import hashlib
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from replicas import RANK, SIZE, together
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from mpiddp import checkpoint

pytestmark = pytest.mark.mpi


class Code:
    """Makes a folder where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path, 0o777, True, True)


class Plain:
    """An object of the user's, with a value."""

    def __init__(self, value):
        self.value = value


def sharded(**others):
    mesh = init_device_mesh("cpu", (SIZE,))
    return {"a": distribute_tensor(torch.ones(4 * SIZE), mesh, [Shard(0)]), **others}


def put_code_into_the_list(folder: Path, ran: Path) -> None:
    """Change a checkpoint's list of shards, and its sum, so that reading it makes `ran`."""
    file, sums = folder / ".metadata", folder / "SHA256SUMS"
    before = file.read_bytes()
    metadata = pickle.loads(before)
    metadata.planner_data = Code(ran)
    file.write_bytes(pickle.dumps(metadata))
    old, new = (hashlib.sha256(each).hexdigest() for each in (before, file.read_bytes()))
    sums.write_text(sums.read_text().replace(old, new))


@pytest.mark.essential
def test_in_the_list_of_shards(mpi_tmp_path):
    ran = mpi_tmp_path / "ran"
    path = checkpoint.save(sharded(), mpi_tmp_path / "all", step=1)
    if RANK == 0:
        put_code_into_the_list(path, ran)
    dist.barrier()
    with together(), pytest.raises(pickle.UnpicklingError, match=r"mkdir, which weights_only="):
        checkpoint.load(mpi_tmp_path / "all", into=sharded())
    with together():
        assert not ran.exists()
    dist.barrier()
    checkpoint.load(mpi_tmp_path / "all", into=sharded(), weights_only=False)
    with together():
        assert ran.exists()  # it was code


@pytest.mark.essential
def test_in_a_leaf(mpi_tmp_path):
    ran = mpi_tmp_path / "ran"
    checkpoint.save(sharded(b=Code(ran)), mpi_tmp_path / "all", step=1)
    with together(), pytest.raises((pickle.UnpicklingError, RuntimeError), match="Weights only"):
        checkpoint.load(mpi_tmp_path / "all", into=sharded(b=None))
    with together():
        assert not ran.exists()
    dist.barrier()
    checkpoint.load(mpi_tmp_path / "all", into=sharded(b=None), weights_only=False)
    with together():
        assert ran.exists()


def test_in_a_snapshot(monkeypatch, mpi_tmp_path):
    ran = mpi_tmp_path / "ran"
    monkeypatch.setenv("LOCAL_RANK", "0")
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        snapshots = checkpoint.Snapshots("training", share=1, folder=folder)
        assert not snapshots.step(lambda: sharded(), 1)
        snapshots.wait()
        snapshots._shards._next = 0
        assert snapshots.step(lambda: sharded(), 2)
        snapshots.wait()
        (path,) = snapshots.root.glob("0*")
        put_code_into_the_list(path, ran)
        dist.barrier()
        with together(), pytest.raises(pickle.UnpicklingError, match="mkdir, which weights_only="):
            snapshots.load(into=sharded())
        with together():
            assert not ran.exists()
        dist.barrier()
        found = snapshots.load(into=sharded(), weights_only=False)
        with together():
            assert found is not None
            assert ran.exists()
        snapshots.clear()


def test_what_training_has_is_allowed(mpi_tmp_path):
    """All that a model and an optimizer of torch have, of any layout, dtype and device."""
    mesh = init_device_mesh("cpu", (SIZE,))
    model = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Linear(7, 5).bfloat16())
    fully_shard(model[0], mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    parts = get_state_dict(model, optimizer)
    state = {
        "training": parts,
        "channels": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "settings": {"rate": 0.1, "names": ["a", "b"], "shape": torch.Size([2]), "none": None},
        "device": torch.device("cpu"),
        "dtype": torch.float16,
    }
    checkpoint.save(state, mpi_tmp_path, step=1)
    into = {**state, "settings": {"rate": 0, "names": [], "shape": None, "none": 1}}
    found = checkpoint.load(mpi_tmp_path, into=into)
    with together():
        assert found is not None
        assert into["settings"] == state["settings"]


def test_what_the_user_allows(mpi_tmp_path):
    checkpoint.save(sharded(b=Plain(3)), mpi_tmp_path, step=1)
    into = sharded(b=None)
    with torch.serialization.safe_globals([Plain]):
        checkpoint.load(mpi_tmp_path, into=into)
    with together():
        assert into["b"].value == 3


def test_a_name_with_dots(mpi_tmp_path):
    """A pickle can ask for an attribute of what is allowed, and a module of a module."""
    path = checkpoint.save(sharded(), mpi_tmp_path, step=1)
    from mpiddp.checkpoint.shard_files import Refused, read_metadata

    assert type(read_metadata(path, True)) is Metadata
    dist.barrier()
    for module, name in [
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch", "load"),
        ("torch", "Size.__class__"),
        ("pathlib", "Path.write_text"),
        ("builtins", "eval"),
    ]:
        if RANK == 0:
            text = f"\x80\x04\x8c{chr(len(module))}{module}\x8c{chr(len(name))}{name}\x93."
            (path / ".metadata").write_bytes(text.encode("latin-1"))
        dist.barrier()
        with together(), pytest.raises(Refused, match=f"{name}, which"):
            read_metadata(path, True)
        dist.barrier()
