"""The records of real operations and buckets, as torch's own analyzer reads them."""

import argparse
import json
import linecache
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_data import rank, size
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.loader import read_dump

import mpiddp
from mpiddp import flight_recorder
from mpiddp.flight_recorder import files, ring, sources
from mpiddp.torch_internals.versions import release_of

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def _only_mine() -> None:
    """Forget what the tests before have left."""
    dist.barrier()
    ring.allocate(2000)


def entries(name: str) -> list[dict[str, Any]]:
    """Return the records of a kind, the oldest first."""
    wanted = f"gloo:{name}"
    return [
        entry
        for entry in flight_recorder.as_dict()["entries"]
        if entry["profiling_name"].split(" ")[0] == wanted
    ]


# That of torch 2.11 knows neither Gloo nor barriers.
has_analyzer = pytest.mark.skipif(
    release_of(torch.__version__) < (2, 12), reason="torch 2.12 brought an analyzer for CPUs"
)


def analyzed(folder: Path) -> Any:
    """Return what torch's analyzer makes of all ranks' dumps."""
    path = flight_recorder.dump(folder / f"rank_{rank()}")
    dist.barrier()
    dumps = {str(each): read_dump("rank_", str(folder / f"rank_{each}")) for each in range(size())}
    arguments = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10
    )
    assert path.exists()
    return build_db(dumps, arguments, flight_recorder.as_dict()["version"])


def broadcast(value: str) -> str:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@pytest.mark.essential
def test_an_operation() -> None:
    dist.all_reduce(torch.ones(3, 4, dtype=torch.float64))
    (one,) = entries("all_reduce")
    assert one["state"] == "completed"
    assert one["input_sizes"] == one["output_sizes"] == [[3, 4]]
    assert one["input_dtypes"] == ["float64"]
    assert one["time_created_ns"] <= one["time_discovered_started_ns"]
    assert one["time_discovered_started_ns"] <= one["time_discovered_completed_ns"]
    assert one["thread_name"] == "MainThread"
    assert one["process_group"][0] == dist.group.WORLD.group_name
    here = [frame for frame in one["frames"] if frame["filename"] == __file__]
    assert here[0]["name"] == "test_an_operation"
    assert "dist.all_reduce(" in linecache.getline(__file__, here[0]["line"])
    assert one["words"] == "all_reduce(SUM) of float64 (3, 4)"


@pytest.mark.essential
def test_states_of_an_asynchronous_one() -> None:
    late = size() - 1
    if rank() == late:
        dist.recv(torch.ones(1), src=0)
        dist.all_reduce(torch.ones(2))
        return
    work = dist.all_reduce(torch.ones(2), async_op=True)
    if rank() == 0:  # only now may the last one come
        assert not work.is_completed()
        assert [entry["state"] for entry in entries("all_reduce")] == ["started"]
        dist.send(torch.ones(1), dst=late)
    work.wait()
    assert [entry["state"] for entry in entries("all_reduce")] == ["completed"]


@pytest.mark.essential
def test_a_failure_is_not_complete() -> None:
    with pytest.raises(TypeError):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG)
    (one,) = entries("all_reduce")
    assert (one["state"], one["retired"]) == ("started", True)


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_buckets(transport: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 600))
    wrapped = mpiddp.DistributedDataParallel(model, bucket_cap_mb=1, transport=transport)
    ring.allocate(2000)
    for _ in range(3):
        wrapped(torch.ones(2, 600)).sum().backward()
    told = [entry for entry in entries("all_reduce") if "module" in entry["process_group"][0]]
    assert {entry["state"] for entry in told} == {"completed"}
    assert {entry["process_group"][1] for entry in told} == {"gradients of Sequential"}
    numbers = [entry["collective_seq_id"] for entry in told]
    assert numbers == sorted(set(numbers))
    assert len(numbers) > 3
    assert sum(entry["input_sizes"][0][0] for entry in told) == 3 * sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert told[-1]["words"].endswith(" of backward pass 3 of Sequential")
    assert told[0]["frames"] == []


def test_parameters_and_buffers() -> None:
    """They are copied in memory that the ranks share, which is recorded as one broadcast."""
    wrapped = mpiddp.DistributedDataParallel(torch.nn.BatchNorm1d(3))
    wrapped(torch.ones(4, 3))
    told = entries("broadcast")
    words = "broadcast of parameters or buffers of float32 (3,) and"
    assert [entry["words"] for entry in told] == [f"{words} 4 more", f"{words} 2 more"]
    for entry in told:
        assert entry["state"] == "completed"
        assert any(Path(frame["filename"]).name == Path(__file__).name for frame in entry["frames"])


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore::FutureWarning")
@has_analyzer
def test_torch_finds_all_operations_matched(tmp_path: Path) -> None:
    """Every collective, messages, a part of the ranks, and buckets."""
    count = size()
    one = torch.ones(4)
    many = [torch.ones(4) for _ in range(count)]
    folder = Path(broadcast(str(tmp_path)))
    # A group that counts its operations from 1 on all ranks, whatever ran before.
    group = dist.new_group()
    part = dist.new_group([0, count - 1])
    wrapped = mpiddp.DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    ring.allocate(2000)
    dist.all_reduce(one, group=group)
    dist.broadcast(one, src=1, group=group)
    dist.reduce(one, dst=0, group=group)
    dist.all_gather(many, one, group=group)
    dist.all_gather_into_tensor(torch.ones(4 * count), one, group=group)
    dist.reduce_scatter(one, many, group=group)
    dist.reduce_scatter_tensor(one, torch.ones(4 * count), group=group)
    dist.gather(one, many if rank() == 0 else None, dst=0, group=group)
    dist.scatter(one, many if rank() == 0 else None, src=0, group=group)
    dist.all_to_all(many, [torch.ones(4) for _ in range(count)], group=group)
    dist.all_to_all_single(torch.ones(count), torch.ones(count), group=group)
    dist.all_reduce_coalesced([one, one.clone()], group=group)
    dist.monitored_barrier(group=group)
    dist.barrier(group=group)
    if rank() in (0, count - 1):
        dist.all_reduce(one, group=part)
        for _ in range(2):
            dist.send(one, count - 1, group) if rank() == 0 else dist.recv(one, 0, group)
            dist.send(one, 0, group) if rank() else dist.recv(one, count - 1, group)
    wrapped(torch.ones(1, 3)).sum().backward()
    database = analyzed(folder)
    kinds = {collective.collective_name.split(" ")[0] for collective in database.collectives}
    # A message is named after the end that torch's analyzer looks at first.
    assert {kind.removeprefix("gloo:") for kind in kinds} - {"send", "recv"} == {
        "all_gather", "all_reduce", "all_to_all", "allreduce_coalesced", "barrier", "broadcast",
        "gather", "reduce", "reduce_scatter", "scatter",
    }  # fmt: skip
    assert [c for c in database.collectives if not c.pass_check] == []
    assert [c for c in database.collectives if c.missing_ranks] == []
    assert len(database.collectives) > 16


@pytest.mark.essential
def test_json_says_the_same() -> None:
    dist.all_reduce(torch.ones(1))
    told = json.loads(flight_recorder.as_json())
    expected = flight_recorder.as_dict()
    for each in (told, expected):
        del each["mpiddp"]["time_ns"]
        assert any(__file__ in line for line in each["mpiddp"].pop("stacks")["MainThread"])
        for entry in each["entries"]:
            entry.pop("time_created_ns")
            entry.pop("time_discovered_started_ns")
            entry.pop("time_discovered_completed_ns")
    assert told == json.loads(json.dumps(expected))
    assert told["version"] == "2.10"


def test_last_operations_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many groups as a long program has made take no longer than its operations do."""
    late = size() - 1
    known = {number: sources.Source(f"gone {number}", [0]) for number in range(-30_000, 0)}
    monkeypatch.setattr(sources, "_sources", {**known, **sources.known()})
    part = dist.new_group()
    for _ in range(2000):
        dist.barrier()
    dist.barrier(group=part)
    until_read = dist.new_group()
    if rank() != late:
        work = dist.barrier(group=part, async_op=True)
    began = time.process_time()
    statuses = flight_recorder.as_dict()["pg_status"]
    # 0.1 s; with all operations looked through for each group it was 4 s.
    assert time.process_time() - began < 1.5
    dist.barrier(group=until_read)
    if rank() == late:
        work = dist.barrier(group=part, async_op=True)
    work.wait()
    of_part = {
        "last_enqueued_collective": "1" if rank() == late else "2",
        "last_started_collective": "1" if rank() == late else "2",
        "last_completed_collective": "1",
    }
    assert statuses[part.group_name] == of_part
    assert set(statuses["gone -1"].values()) == {"-1"}


class TestFile:
    @pytest.mark.essential
    def test_is_whole_or_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = flight_recorder.dump(tmp_path / "mine_3")
        before = path.read_bytes()
        assert pickle.loads(before)["mpiddp"]["reason"] == "dump()"

        def broken(value: object, file: Any, protocol: int) -> None:
            file.write(b"half")
            raise OSError("the disk is full")

        monkeypatch.setattr(files.pickle, "dump", broken)
        with pytest.raises(OSError, match="full"):
            flight_recorder.dump(path)
        assert path.read_bytes() == before
        assert [each.name for each in tmp_path.iterdir()] == ["mine_3"]
        assert files.dump_for("a reason") == ""

    def test_no_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/proc/there/rank_")
        monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
        with pytest.raises(OSError, match="/proc/there"):
            flight_recorder.dump()
        assert f"What this rank did last is in {tmp_path}/" in files.dump_for("a reason")

    def test_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/there/trace_")
        assert flight_recorder.dump() == tmp_path / "there" / f"trace_{rank()}"
        monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        path = flight_recorder.dump()
        assert path.name == f"rank_{rank()}"
        assert path.parents[1] == tmp_path / "mpiddp" / "flight_recorder"
        # The same folder on all ranks.
        assert broadcast(path.parent.name) == path.parent.name
