"""What a trace of a training has in it, and that the merged file is all of it."""

import gzip
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.utils.data import DataLoader, TensorDataset

import mpiddp
from mpiddp.tracing import merging

pytestmark = pytest.mark.mpi

COMM = MPI.COMM_WORLD
STEPS = 4


def train(steps=STEPS, transport=None):
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    ddp = mpiddp.DistributedDataParallel(model, bucket_cap_mb=0.03, transport=transport)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for (batch,) in DataLoader(TensorDataset(torch.randn(4 * steps, 64)), batch_size=4):
        optimizer.zero_grad()
        ddp(batch).sum().backward()
        optimizer.step()
    return model


def traced(folder, steps=None, transport=None):
    """Trace a training and more; return the facts and events of this rank."""
    with mpiddp.trace(folder, steps=steps):
        train(transport=transport)
        dist.all_reduce(torch.ones(10))
        mpiddp.checkpoint.save({"one": 1}, folder / "checkpoints", step=1)
    COMM.Barrier()
    path = merging.path_of(folder, COMM.rank)
    return merging.header(path), list(merging.events(path))


def named(events, pattern):
    return [
        event for event in events if event["ph"] == "X" and re.fullmatch(pattern, event["name"])
    ]


def lies_within(event, others):
    end = event["ts"] + event["dur"]
    return any(
        o["tid"] == event["tid"] and o["ts"] <= event["ts"] and end <= o["ts"] + o["dur"] + 0.002
        for o in others
    )


@pytest.mark.essential
def test_events_of_all_kinds_are_there(mpi_tmp_path):
    facts, events = traced(mpi_tmp_path)
    world = facts["distributedInfo"]
    groups = {each["pg_name"]: each["ranks"] for each in world["pg_config"]}
    assert (world["backend"], world["rank"], world["world_size"]) == (
        "mpiddp", COMM.rank, COMM.size,
    )  # fmt: skip
    assert world["pg_count"] == len(groups) == len(world["pg_config"])
    assert facts["mpiddp"]["reductions"] == STEPS
    assert facts["mpiddp"]["lost"] == facts["mpiddp"]["unfinished"] == 0
    assert facts["mpiddp"]["clock"]["aligned_at_end"]
    backward = named(events, "backward")
    waits = named(events, "wait at the end of backward")
    assert len(named(events, "forward")) == len(backward) == len(waits) == STEPS
    assert len(named(events, "optimizer: SGD.step")) == STEPS
    assert len(named(events, r"DataLoader.__next__")) == STEPS + 1  # the last raises
    assert len(named(events, r"between steps")) == STEPS - 1
    assert len(named(events, r"ProfilerStep#\d+")) == STEPS - 1
    assert len(named(events, "checkpoint")) == 1
    assert len(named(events, "checkpoint: write")) == (COMM.rank == 0)
    (call,) = [e for e in named(events, r"all_reduce\(SUM\)") if e["args"]["bytes"] == 40]
    assert groups[call["args"]["group"]] == list(range(COMM.size))
    named_groups = {e["args"]["group"] for e in events if e.get("cat") in ("bucket", "collective")}
    assert named_groups == set(groups)
    assert all(lies_within(wait, backward) for wait in waits)
    assert {event["pid"] for event in events} == {COMM.rank}


@pytest.mark.essential
def test_buckets_are_filled_then_launched_then_reduced(mpi_tmp_path):
    _, events = traced(mpi_tmp_path, transport="mpi")
    backward = named(events, "backward")
    buckets = named(events, r"bucket \d+")
    assert len(buckets) >= 2 * STEPS
    filled = {
        (e["args"]["backward"], e["args"]["bucket"]): e
        for e in named(events, r"bucket \d+: filled")
    }
    chunks = named(events, r"bucket \d+: chunks sent")
    assert len(filled) == len(buckets)
    for bucket in buckets:
        before = filled[bucket["args"]["backward"], bucket["args"]["bucket"]]
        assert before["ts"] + before["dur"] <= bucket["ts"] + 0.01
        (around,) = [b for b in backward if b["ts"] <= bucket["ts"] <= b["ts"] + b["dur"]]
        assert bucket["ts"] + bucket["dur"] <= around["ts"] + around["dur"]
        assert bucket["args"]["bytes"] == 4 * bucket["args"]["elements"] > 0
    if COMM.size > 1:
        assert len(chunks) == len(buckets)
        assert all(lies_within(each, buckets) for each in chunks)
    waits = named(events, "backward")
    assert all(lies_within(e, waits) for e in named(events, r"bucket \d+: waited for"))
    for step in range(1, STEPS + 1):
        names = [
            n for b in buckets if b["args"]["backward"] == step for n in b["args"]["parameters"]
        ]
        assert sorted(names) == sorted(
            f"{i}.{kind}" for i in range(4) for kind in ("weight", "bias")
        )


class TwoWays(torch.nn.Module):
    """Two layers that take turns in coming first."""

    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, batch, swapped):
        first, second = (self.other, self.one) if swapped else (self.one, self.other)
        return second(first(batch))


def test_full_bucket_is_held_for_an_earlier_one(mpi_tmp_path):
    """Buckets are launched in order of index, also where a later one is full before."""
    ddp = mpiddp.DistributedDataParallel(TwoWays(), bucket_cap_mb=0.001, transport="mpi")
    with mpiddp.trace(mpi_tmp_path):
        for swapped in (False, False, True):
            ddp(torch.randn(4, 64), swapped).sum().backward()
    events = list(merging.events(merging.path_of(mpi_tmp_path, COMM.rank)))

    def ends(name):
        (event,) = [e for e in named(events, name) if e["args"]["backward"] == 3]
        return event["ts"], event["ts"] + event["dur"]

    held = named(events, r"bucket \d+: held for an earlier one")
    assert {event["args"]["backward"] for event in held} == {3}
    last = max(event["args"]["bucket"] for event in named(events, r"bucket \d+"))
    began, ended = ends(f"bucket {last}: held for an earlier one")
    assert began == pytest.approx(ends(f"bucket {last}: filled")[1], abs=0.01)
    assert ended == pytest.approx(ends(f"bucket {last}")[0], abs=0.01)
    assert began < ends("bucket 0: filled")[1] <= ends("bucket 0")[0] < ended


def test_rows_hold_what_lies_within_or_apart(mpi_tmp_path):
    _, events = traced(mpi_tmp_path)
    rows = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault(event["tid"], []).append((event["ts"], -event["dur"]))
    names = {e["tid"] for e in events if e["name"] == "thread_name"}
    assert set(rows) <= names
    for spans in rows.values():
        open_ends = []
        for began, length in sorted(spans):
            while open_ends and open_ends[-1] <= began + 0.002:
                open_ends.pop()
            assert not open_ends or began - length <= open_ends[-1] + 0.002
            open_ends.append(began - length)


@pytest.mark.essential
def test_merged_file_is_the_union(mpi_tmp_path):
    traced(mpi_tmp_path)
    with gzip.open(mpi_tmp_path / "trace.json.gz", "rt") as file:
        merged = json.load(file)
    ranks = [merging.path_of(mpi_tmp_path, rank) for rank in range(COMM.size)]
    union = [event for path in ranks for event in merging.events(path)]
    assert merged["traceEvents"] == union
    of_rank = [merging.header(path)["distributedInfo"]["pg_config"] for path in ranks]
    known = {group["pg_name"]: group for each in of_rank for group in each}
    assert {g["pg_name"]: g for g in merged["distributedInfo"]["pg_config"]} == known
    assert [facts["rank"] for facts in merged["mpiddp"]["ranks"]] == list(range(COMM.size))
    assert not list(mpi_tmp_path.rglob("*.part"))


@pytest.mark.mpi(min_size=2)
def test_ranks_reduce_a_bucket_at_one_time(mpi_tmp_path):
    """Nobody has the mean of a bucket before all have launched it, on the clock of all."""
    traced(mpi_tmp_path)
    with gzip.open(mpi_tmp_path / "trace.json.gz", "rt") as file:
        merged = json.load(file)
    error = max(facts["clock"]["error_us"] for facts in merged["mpiddp"]["ranks"])
    by_bucket = {}
    for event in named(merged["traceEvents"], r"bucket \d+"):
        key = event["args"]["backward"], event["args"]["bucket"]
        by_bucket.setdefault(key, []).append(event)
    for events in by_bucket.values():
        assert len(events) == COMM.size
        last = max(event["ts"] for event in events)
        assert all(event["ts"] + event["dur"] >= last - 2 * error for event in events)


def test_steps_end_it(mpi_tmp_path):
    facts, events = traced(mpi_tmp_path, steps=2)
    assert facts["mpiddp"]["reductions"] == 2
    assert not named(events, "checkpoint")
    # Nothing of it is left.
    assert "tracing" not in torch.autograd.backward.__code__.co_filename
    assert traced(mpi_tmp_path / "again")[0]["mpiddp"]["reductions"] == STEPS


def test_more_records_than_the_recorder_keeps(mpi_tmp_path):
    tensor = torch.ones(1)
    with mpiddp.trace(mpi_tmp_path):
        for _ in range(5000):
            dist.all_reduce(tensor)
    path = merging.path_of(mpi_tmp_path, COMM.rank)
    numbers = [e["args"]["number"] for e in merging.events(path) if e["name"] == "all_reduce(SUM)"]
    assert len(numbers) == 5000
    assert numbers == list(range(numbers[0], numbers[0] + 5000))
    assert merging.header(path)["mpiddp"]["lost"] == 0


def test_uneven_inputs(mpi_tmp_path):
    model = mpiddp.DistributedDataParallel(torch.nn.Linear(4, 4))
    with mpiddp.trace(mpi_tmp_path, steps=3), model.join():
        for _ in range(3 + COMM.rank):
            model(torch.ones(1, 4)).sum().backward()
    facts = merging.header(merging.path_of(mpi_tmp_path, COMM.rank))["mpiddp"]
    assert facts["clock"]["aligned_at_end"]
    assert facts["reductions"] >= 3 + COMM.rank


def test_an_exception_leaves_this_ranks_file(mpi_tmp_path, capfd):
    def fail():
        train()
        raise KeyError

    with pytest.raises(KeyError), mpiddp.trace(mpi_tmp_path):
        fail()
    facts = merging.header(merging.path_of(mpi_tmp_path, COMM.rank))["mpiddp"]
    assert not facts["clock"]["aligned_at_end"]
    assert "python -m mpiddp.tracing" in capfd.readouterr().err
    assert not Path(mpi_tmp_path, "trace.json.gz").exists()


def test_one_at_a_time_and_no_step_is_none(mpi_tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        mpiddp.trace(mpi_tmp_path, steps=0)
    with mpiddp.trace(mpi_tmp_path), pytest.raises(RuntimeError, match="on already"):
        mpiddp.trace(mpi_tmp_path).__enter__()


def test_torchs_profiler_shows_the_same(mpi_tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train()
        mpiddp.checkpoint.save({"one": 1}, mpi_tmp_path, step=1)
    names = [event.name for event in profiler.events()]
    assert names.count("mpiddp:wait at the end of backward") == STEPS
    assert names.count("mpiddp:checkpoint") == 1
    assert "Optimizer.step#SGD.step" in names


def test_steps_are_those_of_one_of_several_modules(mpi_tmp_path):
    large, small = (mpiddp.DistributedDataParallel(torch.nn.Linear(n, 1)) for n in (64, 8))
    with mpiddp.trace(mpi_tmp_path, steps=3):
        for _ in range(5):
            for _ in range(2):
                small(torch.randn(4, 8)).sum().backward()
            large(torch.randn(4, 64)).sum().backward()
    COMM.Barrier()
    # Two of the small one, one of the large one, and the small one's third.
    assert merging.header(merging.path_of(mpi_tmp_path, COMM.rank))["mpiddp"]["reductions"] == 4
