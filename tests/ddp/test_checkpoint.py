"""torch.distributed.checkpoint saves and loads wrapped and sharded models, each rank its share."""

import pickle
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import loss_of, mlp
from replicas import RANK, SIZE, all_bits, assert_same_bits, gather, together, trained_with_adam
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import mpiddp
from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi


@pytest.mark.smoke
def test_save_and_load(mpi_tmp_path, gloo):
    wrapped, _ = trained_with_adam()
    path = str(mpi_tmp_path / "checkpoint")
    dcp.save({"model": wrapped.state_dict(), "step": 7}, checkpoint_id=path)
    for again in (DDP(mlp(3, 4, 2)), TorchDDP(mlp(3, 4, 2), process_group=gloo)):
        state = {"model": again.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=path)
        again.load_state_dict(state["model"])
        with together():
            assert state["step"] == 7
            assert all_bits(again.state_dict().items()) == all_bits(wrapped.state_dict().items())


def test_model_and_optimizer(mpi_tmp_path):
    """With the helpers that take the wrapper's prefix off, into a plain model too."""
    wrapped, optimizer = trained_with_adam()
    model_state, optimizer_state = get_state_dict(wrapped, optimizer)
    path = str(mpi_tmp_path / "checkpoint")
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    with together():
        assert list(model_state) == list(wrapped.module.state_dict())
    again = DDP(mlp(3, 4, 2))
    other = torch.optim.Adam(again.parameters(), lr=0.5)
    model_state, optimizer_state = get_state_dict(again, other)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        again, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    for _ in range(2):
        x = torch.randn(2, 3, dtype=torch.float64) + RANK
        for model, stepper in ((wrapped, optimizer), (again, other)):
            stepper.zero_grad()
            loss_of(model, x).backward()
            stepper.step()
    with together():
        assert other.param_groups[0]["lr"] == 0.1
        assert all_bits(again.state_dict().items()) == all_bits(wrapped.state_dict().items())
    assert_same_bits(again.state_dict().items())


@pytest.mark.mpi(min_size=2)
def test_every_rank_writes_its_own(mpi_tmp_path):
    """What only one rank has is saved, and comes back to that rank."""
    path = str(mpi_tmp_path / "checkpoint")
    dcp.save({f"of rank {RANK}": torch.full((3,), float(RANK))}, checkpoint_id=path)
    state = {f"of rank {(RANK + 1) % SIZE}": torch.zeros(3)}
    dcp.load(state, checkpoint_id=path)
    with together():
        assert state[f"of rank {(RANK + 1) % SIZE}"].tolist() == [float((RANK + 1) % SIZE)] * 3


@pytest.mark.mpi(min_size=2)
def test_error_of_one_rank_reaches_all(mpi_tmp_path):
    path = str(mpi_tmp_path / "nothing")
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"x": torch.zeros(3)}, checkpoint_id=path)
    assert gather(dist.get_rank()) == list(range(SIZE))


def sharded(mesh: DeviceMesh, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5))
    return fully_shard(model, mesh=mesh)


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("how", ["waiting", "in the background", "with the group of training"])
def test_sharded_model(how, mpi_tmp_path, gloo):
    """Each rank writes its shard, and what was written with us is read with Gloo.

    A save in the background calls collectives in a second thread, in another order on each rank
    than training's: they must neither wait for each other nor meet.
    """
    ours = init_device_mesh("cpu", (SIZE,))
    theirs = init_device_mesh("cpu", (SIZE,), backend_override={0: "gloo"})
    model = sharded(ours, 1)
    expected = {name: part.full_tensor() for name, part in model.state_dict().items()}
    path = str(mpi_tmp_path / "checkpoint")
    if how == "waiting":
        dcp.save(model.state_dict(), checkpoint_id=path)
    else:
        own = dist.new_group() if how == "in the background" else None
        saving = dcp.async_save(model.state_dict(), checkpoint_id=path, process_group=own)
        # Collectives go on meanwhile; the parameters that were saved are those of before.
        for number in range(100):
            ones = torch.full((100,), float(number))
            dist.all_reduce(ones)
            assert ones.eq(number * SIZE).all()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        saving.result()
        if own is not None:
            dist.destroy_process_group(own)
    dist.barrier()
    for mesh in (ours, theirs):
        again = sharded(mesh, 2)
        state = again.state_dict()
        dcp.load(state, checkpoint_id=path)
        loaded = {name: part.full_tensor() for name, part in state.items()}
        with together():
            assert loaded.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(loaded[name], tensor), name


def test_full_state_of_one_rank():
    """Rank 0 alone has the state; the others get their shards from it."""
    mesh = init_device_mesh("cpu", (SIZE,))
    model = sharded(mesh, 1)
    expected = {name: part.full_tensor() for name, part in model.state_dict().items()}
    again = sharded(mesh, 2)
    set_model_state_dict(
        again,
        dict(expected) if RANK == 0 else {},  # torch changes it
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    loaded = {name: part.full_tensor() for name, part in again.state_dict().items()}
    with together():
        assert all_bits(loaded.items()) == all_bits(expected.items())


@pytest.mark.mpi(min_size=2)
def test_sharded_model_on_fewer_ranks(mpi_tmp_path):
    model = sharded(init_device_mesh("cpu", (SIZE,)), 1)
    expected = {name: part.full_tensor() for name, part in model.state_dict().items()}
    path = str(mpi_tmp_path / "checkpoint")
    dcp.save(model.state_dict(), checkpoint_id=path)
    fewer = dist.new_group(list(range(SIZE - 1)))
    if RANK < SIZE - 1:
        again = sharded(DeviceMesh.from_group(fewer, "cpu"), 2)
        state = again.state_dict()
        dcp.load(state, checkpoint_id=path, process_group=fewer)
        for name, part in state.items():
            assert torch.equal(part.full_tensor(), expected[name]), name
        dist.destroy_process_group(fewer)
    dist.barrier()


@pytest.mark.essential
def test_pickles_name_what_users_import():
    """So they survive when a file of mpiddp moves."""
    wrapped = DDP(nn.Sequential(nn.Linear(2, 2), mpiddp.SyncBatchNorm(2)))
    pickled = pickle.dumps(wrapped)
    with together():
        assert DDP.__module__ == mpiddp.SyncBatchNorm.__module__ == "mpiddp"
        assert set(re.findall(rb"mpiddp(?:\.\w+)+", pickled)) == set()
        assert isinstance(pickle.loads(pickled), DDP)
