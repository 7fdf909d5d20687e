"""Wrong arguments of a save or load: all ranks raise, and none waits for the others."""

import sys
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from replicas import RANK, SIZE, together
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mpiddp import checkpoint

pytestmark = pytest.mark.mpi

CALLS = [checkpoint.save, checkpoint.async_save]


@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("step", [100.0, np.float64(3), "epoch1", None, torch.tensor(2.0), 1 + 0j])
def test_a_step_that_is_no_int(mpi_tmp_path, call, step):
    """It would be part of a name that is never found again."""
    with together(), pytest.raises(TypeError, match="step must be an int"):
        call({"a": 1}, mpi_tmp_path / "all", step=step)
    with together():
        assert not (mpi_tmp_path / "all").exists()


@pytest.mark.parametrize("step", [7, np.int64(7), torch.tensor(7)])
def test_a_step_that_is_an_int(mpi_tmp_path, step):
    checkpoint.save({"a": 1}, mpi_tmp_path, step=step)
    found = checkpoint.load(mpi_tmp_path)
    with together():
        assert found is not None
        assert (found.step, type(found.step), found.path.name) == (7, int, "000001-step-7")


def test_a_step_of_a_snapshot(tmp_path):
    message = r"step must be an int, .* not 1.5 \(float\)"
    with (
        checkpoint.Snapshots("training", folder=tmp_path) as snapshots,
        pytest.raises(TypeError, match=message),
    ):
        snapshots.step(lambda: {"a": 1}, 1.5)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"step": 1.5}, TypeError),
        ({"keep": 0}, ValueError),
        ({"keep": 2.0}, TypeError),
        ({"root": None}, TypeError),
    ],
)
def test_on_one_rank(mpi_tmp_path, call, wrong, kind):
    arguments = {"state": {"a": 1}, "root": mpi_tmp_path, "step": 1}
    if RANK == SIZE - 1:
        arguments |= wrong
    expected = kind if RANK == SIZE - 1 else RuntimeError
    with together(), pytest.raises(expected) as raised:
        call(**arguments)
    with together():
        assert RANK == SIZE - 1 or f"rank {SIZE - 1}: {kind.__name__}" in str(raised.value)
        assert list(mpi_tmp_path.iterdir()) == []


@pytest.mark.parametrize("leaf", [threading.Lock, sys._getframe, lambda: (each for each in [])])
def test_a_leaf_that_cannot_be_copied(mpi_tmp_path, leaf):
    """The first rank copies; the others learn it before they go on."""
    state = {"a": torch.ones(3), "b": leaf()}
    with together(), pytest.raises((TypeError, RuntimeError), match="annot") as raised:
        checkpoint.async_save(state, mpi_tmp_path, step=1)
    with together():
        assert RANK == 0 or f"rank {RANK} cannot copy the state: rank 0: Type" in str(raised.value)
        assert list(mpi_tmp_path.iterdir()) == []
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == SIZE
    saving = checkpoint.async_save({"a": 1}, mpi_tmp_path, step=2)
    saving.result()


def sharded(value=1.0):
    mesh = init_device_mesh("cpu", (SIZE,))
    return {"a": distribute_tensor(torch.full((4 * SIZE,), value), mesh, [Shard(0)])}


@pytest.mark.mpi(min_size=2)
def test_one_rank_has_no_state_to_fill(mpi_tmp_path):
    checkpoint.save(sharded(), mpi_tmp_path, step=1)
    into = sharded()
    if RANK == SIZE - 1:
        into = None
    expected = TypeError if into is None else RuntimeError
    with together(), pytest.raises(expected, match="is sharded: give a state to fill"):
        checkpoint.load(mpi_tmp_path, into=into)
