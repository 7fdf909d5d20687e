"""mpiddp.checkpoint: what was saved is loaded on all ranks, whole, and what is damaged is not."""

import collections
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import loss_of, mlp
from replicas import RANK, SIZE, all_bits, gather, together, trained_with_adam
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mpiddp import checkpoint

pytestmark = pytest.mark.mpi

Pair = collections.namedtuple("Pair", "left right")


def names(root: Path) -> list[str]:
    return sorted(each.name for each in root.iterdir())


@pytest.mark.smoke
def test_save_and_load(mpi_tmp_path):
    wrapped, optimizer = trained_with_adam()
    state = {"model": wrapped.module.state_dict(), "optimizer": optimizer.state_dict()}
    path = checkpoint.save(state, mpi_tmp_path / "all", step=7)
    found = checkpoint.load(mpi_tmp_path / "all")
    with together():
        assert found is not None
        assert (found.step, found.path) == (7, path)
        assert all_bits(found.state["model"].items()) == all_bits(state["model"].items())
        again = mlp(3, 4, 2)
        again.load_state_dict(found.state["model"])
        torch.optim.Adam(again.parameters()).load_state_dict(found.state["optimizer"])
        assert gather(str(path)) == [str(path)] * SIZE


@pytest.mark.parametrize("group", [None, "gloo"])
def test_any_state(mpi_tmp_path, group, gloo):
    """Nested, large and small, of several dtypes, on the first rank only; with metadata."""
    tied = torch.arange(40_000.0)
    state = None
    if RANK == 0:
        state = {
            "nested": [(tied, Pair(tied[::2], "text")), {}],
            "bfloat16": torch.randn(50_000).bfloat16().view(100, 500),
            "empty": torch.zeros(0, 3),
            "number": torch.tensor(3),
            "boolean": torch.ones(70_000, dtype=torch.bool),
            "complex": torch.randn(20_000, dtype=torch.complex64),
            "sparse": torch.eye(3).to_sparse(),
            "model": nn.BatchNorm1d(2).state_dict(),
        }
    chosen = gloo if group == "gloo" else None
    checkpoint.save(state, mpi_tmp_path, step=1, group=chosen)
    found = checkpoint.load(mpi_tmp_path, weights_only=False, group=chosen)
    with together():
        assert found is not None
        loaded = found.state
        assert torch.equal(loaded["nested"][0][0], tied)
        assert type(loaded["nested"][0]) is tuple
        assert type(loaded["nested"][0][1]) is Pair
        assert torch.equal(loaded["nested"][0][1].left, tied[::2])
        assert (loaded["nested"][0][1].right, loaded["nested"][1]) == ("text", {})
        assert loaded["bfloat16"].dtype == torch.bfloat16
        assert loaded["bfloat16"].shape == (100, 500)
        assert loaded["empty"].shape == (0, 3)
        assert loaded["number"].item() == 3
        assert loaded["boolean"].all()
        assert loaded["sparse"].is_sparse
        assert loaded["model"]._metadata == nn.BatchNorm1d(2).state_dict()._metadata
    everyones = gather([loaded["bfloat16"].view(torch.int16).tolist(), loaded["complex"].tolist()])
    with together():
        assert all(each == everyones[0] for each in everyones)


def test_nothing_there(mpi_tmp_path):
    assert checkpoint.load(mpi_tmp_path / "missing") is None
    assert checkpoint.load(mpi_tmp_path) is None


def test_the_last_ones_stay(mpi_tmp_path):
    """The newest is what was saved last, whatever its step."""
    for step in (10, 20, 30, 5):
        checkpoint.save({"step": step}, mpi_tmp_path, step=step, keep=2)
    with together():
        assert names(mpi_tmp_path) == ["000003-step-30", "000004-step-5"]
    found = checkpoint.load(mpi_tmp_path)
    with together():
        assert found is not None
        assert (found.step, found.state) == (5, {"step": 5})


def damage_nothing_written(folder: Path) -> None:
    file = folder / "state.pt"
    file.write_bytes(file.read_bytes()[:-100])


def damage_a_bit(folder: Path) -> None:
    file = folder / "state.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def damage_file_missing(folder: Path) -> None:
    (folder / "state.pt").unlink()


def damage_sums_missing(folder: Path) -> None:
    (folder / "SHA256SUMS").unlink()


def damage_sums_empty(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text("")


DAMAGES = [
    (damage_nothing_written, "the sha256 of state.pt is not the one in SHA256SUMS"),
    (damage_a_bit, "the sha256 of state.pt is not the one in SHA256SUMS"),
    (damage_file_missing, "state.pt is missing"),
    (damage_sums_missing, "SHA256SUMS is missing"),
    (damage_sums_empty, "SHA256SUMS is empty"),
]


@pytest.mark.parametrize(("damage", "word"), DAMAGES)
def test_damaged(mpi_tmp_path, damage, word):
    """The last good one is taken, with a word about it; without a good one, an error."""
    good = checkpoint.save({"a": torch.ones(1000)}, mpi_tmp_path, step=1)
    bad = checkpoint.save({"a": torch.zeros(1000)}, mpi_tmp_path, step=2)
    if RANK == 0:
        damage(bad)
        with pytest.warns(RuntimeWarning, match=re.escape(word)) as warned:
            found = checkpoint.load(mpi_tmp_path)
        assert str(good) in str(warned[0].message)
    else:
        found = checkpoint.load(mpi_tmp_path)
    with together():
        assert found is not None
        assert (found.step, found.path) == (1, good)
    if RANK == 0:
        damage_a_bit(good)
    with pytest.raises(RuntimeError, match=r"all checkpoints in .* are damaged: 000002-step-2"):
        checkpoint.load(mpi_tmp_path)


def test_half_written(mpi_tmp_path):
    """What a killed job left is no checkpoint, and goes with the next save."""
    checkpoint.save({"a": 1}, mpi_tmp_path, step=1)
    if RANK == 0:
        left = mpi_tmp_path / ".000002-step-2.writing"
        left.mkdir()
        (left / "state.pt").write_bytes(b"half")
        (mpi_tmp_path / ".000001-step-0.removing").mkdir()
    dist.barrier()
    found = checkpoint.load(mpi_tmp_path)
    with together():
        assert found is not None
        assert found.step == 1
    dist.barrier()
    checkpoint.save({"a": 3}, mpi_tmp_path, step=3)
    with together():
        assert names(mpi_tmp_path) == ["000001-step-1", "000002-step-3"]


@pytest.mark.thorough
def test_sums_of_coreutils(mpi_tmp_path):
    path = checkpoint.save({"a": 1}, mpi_tmp_path, step=1)
    subprocess.run(["sha256sum", "-c", "--status", "SHA256SUMS"], cwd=path, check=True)


def test_one_rank_cannot_write(mpi_tmp_path):
    """All ranks get an error, and what was there stays."""
    good = checkpoint.save({"a": 1}, mpi_tmp_path, step=1)
    unwritable = {"a": (lambda: 0) if RANK == 0 else 1}  # pickle refuses it
    expected = AttributeError if RANK == 0 else RuntimeError
    with pytest.raises(expected, match="pickle local object") as raised:
        checkpoint.save(unwritable, mpi_tmp_path, step=2)
    with together():
        assert RANK == 0 or str(raised.value).startswith(f"rank {RANK} cannot save a checkpoint: ")
        assert names(mpi_tmp_path) == [good.name]


@pytest.mark.thorough
def test_folder_that_cannot_be_made(mpi_tmp_path):
    (mpi_tmp_path / "file").touch()
    with pytest.raises((FileExistsError, RuntimeError), match="File exists"):
        checkpoint.save({"a": 1}, mpi_tmp_path / "file", step=2)


@pytest.mark.skipif(SIZE == 1, reason="one rank agrees with itself")
def test_other_step_on_one_rank(mpi_tmp_path):
    with pytest.raises(RuntimeError, match=f"rank 0 saves step 1, rank {SIZE - 1} step 2"):
        checkpoint.save({}, mpi_tmp_path, step=2 if RANK == SIZE - 1 else 1)


def test_nothing_is_kept(mpi_tmp_path):
    with pytest.raises(ValueError, match="keep must be 1 or more, not 0"):
        checkpoint.save({}, mpi_tmp_path, step=1, keep=0)


class TestAsync:
    """The step goes on, and what is written is the state of the call."""

    @pytest.mark.essential
    def test_state_changes_meanwhile(self, mpi_tmp_path):
        wrapped, optimizer = trained_with_adam()
        state = {"model": wrapped.module.state_dict(), "optimizer": optimizer.state_dict()}
        before = all_bits(wrapped.module.state_dict().items())
        saving = checkpoint.async_save(state, mpi_tmp_path, step=3)
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(wrapped, torch.randn(2, 3, dtype=torch.float64) + RANK).backward()
            optimizer.step()
        path = saving.result()
        dist.barrier()
        found = checkpoint.load(mpi_tmp_path)
        with together():
            assert found is not None
            assert (path is None) == (RANK > 0)
            assert all_bits(found.state["model"].items()) == before
            assert before != all_bits(wrapped.module.state_dict().items())

    @pytest.mark.essential
    def test_two_at_once(self, mpi_tmp_path):
        big = torch.zeros(2_000_000)
        for step in (1, 2):
            checkpoint.async_save({"big": big, "step": step}, mpi_tmp_path, step=step)
            big += 1
        checkpoint.save({}, mpi_tmp_path, step=3)
        with together():
            assert names(mpi_tmp_path) == ["000001-step-1", "000002-step-2", "000003-step-3"]

    def test_a_shared_weight_is_copied_once(self, mpi_tmp_path):
        weight = torch.randn(1000)
        path = checkpoint.async_save({"a": weight, "b": weight}, mpi_tmp_path, step=1).result()
        if RANK == 0:
            assert path is not None
            loaded = torch.load(path / "state.pt", weights_only=True)
            assert loaded["a"].data_ptr() == loaded["b"].data_ptr()

    def test_it_cannot_be_cancelled(self, mpi_tmp_path):
        """Other ranks may be at it."""
        saving = checkpoint.async_save({"big": torch.zeros(2_000_000)}, mpi_tmp_path, step=1)
        assert not saving.cancel()
        saving.result()
        checkpoint.save({}, mpi_tmp_path, step=2)
        with together():
            assert names(mpi_tmp_path) == ["000001-step-1", "000002-step-2"]

    def test_failure_is_told(self, mpi_tmp_path):
        (mpi_tmp_path / "file").touch()
        dist.barrier()
        saving = checkpoint.async_save({"a": 1}, mpi_tmp_path / "file", step=1)
        if RANK == 0:
            with pytest.raises(FileExistsError):
                saving.result()
        with pytest.raises(RuntimeError, match="the last asynchronous save has failed: rank 0: "):
            checkpoint.save({"a": 1}, mpi_tmp_path / "file", step=2)
        checkpoint.save({"a": 1}, mpi_tmp_path / "folder", step=2)


class TestSharded:
    """Each rank writes its shards, by torch.distributed.checkpoint."""

    @staticmethod
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (SIZE,))
        model: nn.Module = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5))
        return fully_shard(model, mesh=mesh)

    @pytest.mark.essential(keep=1)
    @pytest.mark.smoke(keep=1)
    @pytest.mark.parametrize("how", ["save", "async_save"])
    def test_save_and_load(self, mpi_tmp_path, how):
        model = self.model(1)
        expected = {name: part.full_tensor() for name, part in model.state_dict().items()}
        if how == "save":
            checkpoint.save({"model": model.state_dict()}, mpi_tmp_path, step=4)
        else:
            saving = checkpoint.async_save({"model": model.state_dict()}, mpi_tmp_path, step=4)
            # Collectives of the same group go on meanwhile, in this thread.
            for number in range(200):
                ones = torch.full((100,), float(number))
                dist.all_reduce(ones)
                assert ones[0] == number * SIZE
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            saving.result()
        again = self.model(2)
        into = {"model": again.state_dict()}
        found = checkpoint.load(mpi_tmp_path, into=into)
        loaded = {name: part.full_tensor() for name, part in into["model"].items()}
        with together():
            assert found is not None
            assert found.step == 4
            assert found.state is into
            for name, tensor in expected.items():
                assert torch.equal(loaded[name], tensor), name

    @pytest.mark.essential
    def test_damaged(self, mpi_tmp_path):
        model = self.model(1)
        good = checkpoint.save({"model": model.state_dict()}, mpi_tmp_path, step=1)
        bad = checkpoint.save({"model": model.state_dict()}, mpi_tmp_path, step=2)
        into = {"model": model.state_dict()}
        if RANK == 0:
            file = bad / f"__{SIZE - 1}_0.distcp"
            with open(file, "r+b") as opened:
                opened.seek(-1, os.SEEK_END)
                opened.write(b"?")
            with pytest.warns(RuntimeWarning, match=f"the sha256 of {file.name}"):
                found = checkpoint.load(mpi_tmp_path, into=into)
        else:
            found = checkpoint.load(mpi_tmp_path, into=into)
        with together():
            assert found is not None
            assert found.path == good

    @pytest.mark.parametrize("how", ["save", "async_save", "load"])
    def test_a_failure_of_one_rank(self, mpi_tmp_path, monkeypatch, how):
        """torch.distributed.checkpoint tells it by a BaseException, which nobody would catch."""
        state = {"model": self.model(1).state_dict()}
        checkpoint.save(state, mpi_tmp_path, step=1)

        def full(*_):
            raise OSError(28, "No space left on device")

        if RANK == SIZE - 1:
            monkeypatch.setattr(FileSystemWriter, "write_data", full)
            monkeypatch.setattr(FileSystemReader, "read_data", full)
        calls = {
            "load": lambda: checkpoint.load(mpi_tmp_path, into=state),
            "save": lambda: checkpoint.save(state, mpi_tmp_path, step=2),
            "async_save": lambda: checkpoint.async_save(state, mpi_tmp_path, step=2).result(),
        }
        with together(), pytest.raises((OSError, RuntimeError), match="No space left") as caught:
            calls[how]()
        with together():
            assert isinstance(caught.value, OSError) == (RANK == SIZE - 1)
            assert RANK == SIZE - 1 or f"rank {SIZE - 1}: OSError" in str(caught.value)
        if how == "async_save":
            with together(), pytest.raises(RuntimeError, match="the last asynchronous save has"):
                checkpoint.save(state, mpi_tmp_path, step=3)
        dist.barrier()  # rank 0 has cleaned
        with together():
            assert names(mpi_tmp_path) == ["000001-step-1"]

    def test_needs_a_state_to_fill(self, mpi_tmp_path):
        checkpoint.save({"model": self.model(1).state_dict()}, mpi_tmp_path, step=1)
        with pytest.raises(TypeError, match="is sharded: give a state to fill"):
            checkpoint.load(mpi_tmp_path)
