"""Begin and end: init again, part of the ranks, what the thread and the settings do."""

import json
import logging
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mpirun import run
from replicas import RANK, SIZE, gather, together

import mpiddp.horovod as hvd

pytestmark = pytest.mark.timeout(100)


@pytest.fixture
def again(monkeypatch):
    """Return a function that begins Horovod anew with variables; undone at the end."""

    def begin(**variables: str) -> None:
        hvd.shutdown()
        for name, value in variables.items():
            monkeypatch.setenv(f"HOROVOD_{name}", value)
        hvd.init()

    yield begin
    hvd.shutdown()
    monkeypatch.undo()
    hvd.init()


@pytest.mark.smoke
@pytest.mark.mpi
def test_place():
    with together():
        assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
        assert hvd.local_rank() + hvd.cross_rank() * hvd.local_size() == RANK
        assert hvd.local_size() * hvd.cross_size() == SIZE
        assert hvd.is_homogeneous()
        assert hvd.mpi_built()
        assert hvd.mpi_enabled()
        assert hvd.mpi_threads_supported()
        assert not (hvd.gloo_built())
        assert not (hvd.gloo_enabled())
        assert not (hvd.nccl_built())
        assert not (hvd.ddl_built())
        assert not (hvd.ccl_built())
        assert hvd.cuda_built() == (torch.version.cuda is not None)
        assert hvd.rocm_built() == (torch.version.hip is not None)


@pytest.mark.mpi
def test_init_twice_and_after_shutdown():
    before = dist.group.WORLD
    hvd.init()  # nothing happens
    hvd.shutdown()
    hvd.shutdown()
    with together():
        assert not hvd.is_initialized()
        assert dist.group.WORLD is before  # it was not made by init
        assert all(thread.name != "mpiddp.horovod" for thread in threading.enumerate())
        for question in (hvd.rank, hvd.size, hvd.mpi_threads_supported):
            with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
                question()
        with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
            hvd.allreduce(torch.ones(1))
    hvd.init()
    with together():
        assert hvd.allreduce(torch.ones(1)).item() == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["ranks", "communicator"])
def test_part_of_the_ranks(way):
    from mpi4py import MPI

    hvd.shutdown()
    if RANK > 0:
        part = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Excl([0]))
        hvd.init(comm=part if way == "communicator" else list(range(1, SIZE)))
        total = hvd.allreduce(torch.tensor([RANK]), op=hvd.Sum)
        layer = hvd.SyncBatchNorm(2)
        layer(torch.rand(4, 2))
        places = hvd.rank(), hvd.size()
        hvd.shutdown()
        part.Free()
    with together():
        if RANK > 0:
            assert places == (RANK - 1, SIZE - 1)
            assert total.item() == sum(range(SIZE))
        else:
            with pytest.raises(ValueError, match="is not in it"):
                hvd.init(comm=[1])
            with pytest.raises(ValueError, match="must hold ranks"):
                hvd.init(comm=[0, SIZE])
            with pytest.raises(ValueError, match='or "dynamic"'):
                hvd.init(process_sets="all")
    hvd.init()


@pytest.mark.mpi(min_size=2)
def test_a_stall_is_reported_and_ends(again, caplog):
    """Rank 0, which decides, does not come, and asks Horovod for nothing."""
    again(STALL_CHECK_TIME_SECONDS="0.3", STALL_SHUTDOWN_TIME_SECONDS="2")
    failure = ""
    with caplog.at_level(logging.WARNING, "mpiddp.horovod"):
        if RANK != 0:
            try:
                hvd.allreduce(torch.ones(1), name="stalled")
            except hvd.HorovodInternalError as error:
                failure = str(error)
        gather(None)
    who = "rank 1" if SIZE == 2 else f"ranks {', '.join(map(str, range(1, SIZE)))}"
    with together():
        if RANK == 0:
            assert f"allreduce.stalled: {who} waited" in caplog.text
            assert "rank 0 did not come" in caplog.text
            assert caplog.text.count("do all ranks submit") == 1
        else:
            assert "rank 0 did not come" in failure
            assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=2" in failure


@pytest.mark.mpi(min_size=2)
def test_a_stall_check_that_is_off(again, caplog):
    again(STALL_CHECK_TIME_SECONDS="0.01", STALL_CHECK_DISABLE="1")
    with caplog.at_level(logging.WARNING, "mpiddp.horovod"):
        if RANK == SIZE - 1:
            time.sleep(0.5)
        hvd.allreduce(torch.ones(1), name="late")
    with together():
        assert not caplog.records


@pytest.mark.mpi
def test_timeline(again, mpi_tmp_path):
    path = Path(mpi_tmp_path) / "timeline.json"
    again(TIMELINE=str(path))
    for _ in range(2):
        hvd.allreduce(torch.ones(2), name="x")
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(2), name="unseen")
    second = Path(mpi_tmp_path) / "second.json"
    hvd.start_timeline(str(second), mark_cycles=True)
    hvd.broadcast(torch.ones(2), 0, name="y")
    hvd.shutdown()  # ends it as well
    gather(None)
    with together():
        events = json.loads(path.read_text())
        (start, *rows) = [event["args"] for event in events if event["ph"] == "M"]
        assert 0 < start["start_time_since_epoch_in_micros"] < 1e6 * time.time()
        assert rows == [{"name": "allreduce.x"}]
        assert "CYCLE_START" not in path.read_text()
        begun = [event["name"] for event in events if event["ph"] == "B"]
        assert begun == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"] * 2
        times = [event["ts"] for event in events if event["ph"] in "BE"]
        assert times == sorted(times)
        assert len(times) == 8
        assert "broadcast.y" in second.read_text()
        marks = [event for event in json.loads(second.read_text()) if event["ph"] == "i"]
        assert {event["name"] for event in marks} == {"CYCLE_START"}


@pytest.mark.mpi
def test_a_timeline_is_whole_while_it_is_written(again, mpi_tmp_path):
    """A job that hangs or is killed leaves it as it is then."""
    path = Path(mpi_tmp_path) / "live.json"
    again(TIMELINE=str(path), TIMELINE_MARK_CYCLES="1")
    seen = []
    for place in range(3):
        hvd.allreduce(torch.ones(2), name=f"op{place}")
        hvd.barrier()  # rank 0 has written the end of the one before
        seen.append(json.loads(path.read_text()) if RANK == 0 else [])
    gather(None)
    with together():
        if RANK == 0:
            for place, events in enumerate(seen):
                named = [event for event in events if event["ph"] == "M"]
                rows = {event["args"].get("name"): event["pid"] for event in named}
                row = rows[f"allreduce.op{place}"]
                kinds = [event["ph"] for event in events if event["pid"] == row]
                assert kinds == ["M", "B", "E", "B", "E"]
            assert any(event.get("name") == "CYCLE_START" for event in seen[0])


@pytest.mark.mpi
def test_variables(again, caplog, monkeypatch):
    from mpiddp.horovod import environment

    monkeypatch.setattr(environment, "_named", False)
    with caplog.at_level(logging.DEBUG, "mpiddp.horovod"):
        again(CYCLE_TIME="5", AUTOTUNE="1")
        again(CYCLE_TIME="6")
    with together():
        told = [record for record in caplog.records if "no effect" in record.message]
        assert [record.levelname for record in told] == ["DEBUG"]
        assert "HOROVOD_AUTOTUNE, HOROVOD_CYCLE_TIME" in told[0].message
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "much")
    hvd.shutdown()
    with together(), pytest.raises(ValueError, match="HOROVOD_FUSION_THRESHOLD must be a number"):
        hvd.init()


ALONE = """
import threading, torch, torch.distributed as dist
import mpiddp.horovod as hvd
assert not dist.is_initialized()
for _ in range(2):
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    hvd.shutdown()
    assert not dist.is_initialized()
hvd.init()
if hvd.rank() != LATE:
    hvd.allreduce(torch.ones(1), name="alone")
"""


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_ends_early_is_an_error_for_those_that_wait(tmp_path, late):
    """Init makes the world here, and shutdown ends it; the last time there is no shutdown."""
    script = tmp_path / "alone.py"
    script.write_text(ALONE.replace("LATE", str(late)))
    result = run(2, [script], timeout=60)
    assert result.returncode != 0
    assert f"allreduce.alone cannot be done: Horovod has been shut down on rank {late}" in (
        result.stderr
    )


FORK = """
import os, torch
import mpiddp.horovod as hvd
hvd.init()
handle = hvd.allreduce_async(torch.ones(1), name="before")
child = os.fork()
if child == 0:
    try:
        hvd.allreduce(torch.ones(1))
    except RuntimeError as error:
        print("child:", type(error).__name__, flush=True)
    hvd.shutdown()
    raise SystemExit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
assert hvd.synchronize(handle).item() == 1
print("parent", flush=True)
"""


@pytest.mark.slow
def test_a_forked_child_ends_in_peace(tmp_path):
    script = tmp_path / "fork.py"
    script.write_text(FORK)
    result = run(2, ["-W", "ignore", script], timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("child: RuntimeError") == result.stdout.count("parent") == 2
