"""A save that cannot write all: the system's error, no file held open, and the next one works."""

import gc
import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from replicas import RANK, SIZE, together
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mpiddp import checkpoint

pytestmark = pytest.mark.mpi

LIMIT = 40_000  # bytes in a file


@pytest.fixture(params=["plain", "sharded"])
def state(request):
    """A function of the number of elements."""

    def plain(count):
        return {"a": torch.ones(count)}

    def sharded(count):
        mesh = init_device_mesh("cpu", (SIZE,))
        return {"a": distribute_tensor(torch.ones(count * SIZE), mesh, [Shard(0)])}

    return {"plain": plain, "sharded": sharded}[request.param]


@pytest.fixture(params=["save", "async_save"])
def save(request):
    if request.param == "save":
        return checkpoint.save
    return lambda *args, **kwargs: checkpoint.async_save(*args, **kwargs).result()


def held_below(folder: Path) -> list[str]:
    """Return which files below a folder this process has open, also those that were removed."""
    held = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(each)
        except FileNotFoundError:  # that of the listing itself
            continue
        if target.startswith(str(folder)):
            held.append(target)
    return held


@pytest.mark.essential(keep=1)
def test_full(mpi_tmp_path, state, save):
    save(state(10), mpi_tmp_path, step=1)
    large = state(100_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    dist.barrier()
    gc.disable()
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    raised, held = None, []
    try:
        save(large, mpi_tmp_path, step=2)
    except Exception as error:
        raised = error
        # As long as the error is held, as by `except` of the program.
        held = held_below(mpi_tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        gc.enable()
    with together():
        if RANK == 0:
            assert type(raised) is OSError
            assert "File too large" in str(raised)
        assert held == []
    dist.barrier()
    if save is not checkpoint.save:
        with pytest.raises(RuntimeError, match="the last asynchronous save has failed: rank 0"):
            save(state(10), mpi_tmp_path, step=3)
    save(state(10), mpi_tmp_path, step=3)
    dist.barrier()
    with together():
        names = sorted(each.name for each in mpi_tmp_path.iterdir())
        assert names == ["000001-step-1", "000002-step-3"]
