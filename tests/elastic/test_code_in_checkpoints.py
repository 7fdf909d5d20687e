"""A checkpoint that somebody else has written runs no code, unless the user has said so."""

import os
import pickle
import random
import shutil
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from replicas import RANK, SIZE, gather, together

from mpiddp import checkpoint, elastic
from mpiddp.elastic import random_states
from mpiddp.horovod.elastic import TorchState

pytestmark = pytest.mark.mpi


@pytest.fixture
def training() -> Iterator[str]:
    """A name that snapshots have in this test alone."""
    name: str = gather(f"elastic-test-{uuid.uuid4().hex}")[0]
    yield name
    dist.barrier()
    for folder in Path("/dev/shm").glob(f"mpiddp-snapshots-*{name}*"):
        shutil.rmtree(folder, ignore_errors=True)


def written(state: elastic.State) -> None:
    """Wait until the snapshot is there."""
    if state._snapshots is not None and state._snapshots._writing is not None:
        state._snapshots._writing.result()
    dist.barrier()


class Touches:
    """Makes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __deepcopy__(self, memo: object) -> "Touches":
        return self

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (self.path, os.O_CREAT)


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("where", ["state", "random states"])
def test_no_code_of_a_checkpoint(where: str, mpi_tmp_path: Path) -> None:
    state = elastic.State(step=0, checkpoints=mpi_tmp_path / "saved", every=1)
    state.commit()
    mark = mpi_tmp_path / "mark"
    found = checkpoint.load(mpi_tmp_path / "saved")
    assert found is not None
    if where == "state":
        found.state["step"] = Touches(mark)
    else:
        code = torch.frombuffer(bytearray(pickle.dumps(Touches(mark))), dtype=torch.uint8)
        found.state[where] = [code] * SIZE
    checkpoint.save(found.state, mpi_tmp_path / "saved", step=2)
    dist.barrier()
    again = elastic.State(step=0, checkpoints=mpi_tmp_path / "saved")
    with pytest.raises((RuntimeError, ValueError)) as refused:
        again.resume()
    dist.barrier()
    with together():
        assert not mark.exists()
        if where == "state":
            told = str(refused.value)
            saved = mpi_tmp_path / "saved"
            assert f"rank {RANK}: the newest checkpoint in {saved} has objects of " in told
            assert ".open. To read such ones runs code" in told
            assert "weights_only=False" in told
        else:
            assert "posix.open is not in a generator's state" in str(refused.value)


def test_who_asks_for_it_gets_all_objects(mpi_tmp_path: Path) -> None:
    given = {"checkpoints": mpi_tmp_path, "every": 1}
    state = elastic.State(limit=timedelta(seconds=3), **given)
    message = r"rank 0: the state has objects of datetime\.timedelta\. .*weights_only=False"
    if RANK == 0:
        with pytest.warns(RuntimeWarning, match=message):
            state.commit()
    else:
        state.commit()
    state.commit()  # it is said once
    with pytest.raises(RuntimeError, match=r"objects of datetime\.timedelta\."):
        elastic.State(limit=timedelta(0), checkpoints=mpi_tmp_path).resume()
    asks = elastic.State(limit=timedelta(0), weights_only=False, **given)
    with together():
        assert asks.resume()
        assert asks.limit == timedelta(seconds=3)
    asks.commit()
    with torch.serialization.safe_globals([timedelta]):
        names = elastic.State(limit=timedelta(0), checkpoints=mpi_tmp_path)
        with together():
            assert names.resume()
            assert names.limit == timedelta(seconds=3)


def test_no_code_of_a_snapshot(training: str, mpi_tmp_path: Path) -> None:
    mark = mpi_tmp_path / "mark"
    with checkpoint.Snapshots(training, share=1) as snapshots:
        snapshots.step(lambda: {"step": Touches(mark)}, 2)
        snapshots.wait()
        dist.barrier()
        with pytest.raises(RuntimeError) as refused:
            elastic.State(step=0, name=training).resume()
        dist.barrier()
        with together():
            assert not mark.exists()
            told = str(refused.value)
            assert f"rank {RANK}: the newest snapshot in {snapshots.root} has objects of " in told
            assert "weights_only=False" in told


def test_who_asks_for_it_gets_all_objects_of_a_snapshot(training: str) -> None:
    state = elastic.State(limit=timedelta(seconds=3), name=training)
    state.commit()
    written(state)
    message = r"rank 0: the state has objects of datetime\.timedelta\. .*weights_only=False"
    state._look_at = 0  # the second one is due
    if RANK == 0:
        with pytest.warns(RuntimeWarning, match=message):
            state.commit()
    else:
        state.commit()
    written(state)
    state._look_at = 0
    state.commit()  # it is said once
    written(state)
    with pytest.raises(RuntimeError, match=r"objects of datetime\.timedelta\."):
        elastic.State(limit=timedelta(0), name=training).resume()
    asks = elastic.State(limit=timedelta(0), weights_only=False, name=training)
    with together():
        assert asks.resume()
        assert asks.limit == timedelta(seconds=3)
    horovods = TorchState(limit=timedelta(0))  # it has no such argument
    horovods._snapshots = asks._snapshots
    with together(), pytest.raises(RuntimeError, match="only if you name the types: "):
        horovods._resume()
    with torch.serialization.safe_globals([timedelta]), together():
        assert horovods._resume()
        assert horovods.limit == timedelta(seconds=3)


GENERATORS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]


@pytest.mark.parametrize("name", GENERATORS)
def test_states_of_every_generator(name: str) -> None:
    """Those of numpy differ in what they hold: arrays, and numbers of 128 bits."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(getattr(np.random, name)(5))
    try:
        random.gauss(0, 1)  # which keeps a number for the next time
        np.random.standard_normal()  # noqa: NPY002
        packed = random_states.packed(random_states.current())

        def draw() -> list[float]:
            numbers = [np.random.random(), np.random.standard_normal(), random.gauss(0, 1)]  # noqa: NPY002
            return [*numbers, random.random(), torch.rand(1).item()]

        expected = draw()
        assert torch.equal(packed, packed)
        random_states.put_back(random_states.unpacked(packed))
        assert torch.equal(random_states.packed(random_states.current()), packed)
        assert draw() == expected
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("protocol", [4, 5])
def test_states_of_older_checkpoints(protocol: int, mpi_tmp_path: Path) -> None:
    """They were pickles; they are read without running what else may be in one."""
    states = random_states.current()
    assert "numpy" in states
    plain = {
        name: bytes(state.tolist()) if isinstance(state, torch.Tensor) else state
        for name, state in states.items()
    }
    old = torch.frombuffer(bytearray(pickle.dumps(plain, protocol)), dtype=torch.uint8)
    checkpoint.save({"step": 7, "random states": gather(old)}, mpi_tmp_path, step=7)
    expected = torch.rand(1).item(), random.random(), np.random.random()  # noqa: NPY002
    state = elastic.State(step=0, checkpoints=mpi_tmp_path)
    with together():
        assert state.resume()
        assert (state.step, torch.rand(1).item()) == (7, expected[0])
        assert (random.random(), np.random.random()) == expected[1:]  # noqa: NPY002
