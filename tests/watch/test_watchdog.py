"""A wait that takes long: one rank says what is waited for, who is missing and where they are.

Each test starts a job of its own.
"""

import os
import pickle
import re
import signal
import textwrap
import threading
import time
from pathlib import Path

import mpirun
import patience
import pytest

pytestmark = pytest.mark.timeout(100)

PREAMBLE = """\
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import mpiddp

mpiddp.init_process_group(timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
model = mpiddp.DistributedDataParallel(torch.nn.Linear(10, 1))
dist.barrier()

def prepare():
    time.sleep(SLEEP)
"""


def run(
    folder: Path, source: str, seconds: float, ranks: int = 3, sleep: float = 7.0, **env: str
) -> list[str]:
    """Run a script, and return what the watchdogs have said."""
    script = folder / "script.py"
    script.write_text(PREAMBLE.replace("SLEEP", str(sleep)) + textwrap.dedent(source))
    env["MPIDDP_STALL_SECONDS"] = str(seconds)
    done = mpirun.run(ranks, [script], timeout=80, env=env)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert done.stdout.count("all well") == ranks
    # On a busy machine ranks wait for each other in MPI_Init and MPI_Finalize, too.
    return [line for line in done.stderr.splitlines() if line and " in MPI_" not in line]


@pytest.mark.essential
@pytest.mark.thorough
def test_a_collective(tmp_path: Path) -> None:
    """At 2 s, 4 s and perhaps 8 s, on the first rank that waits."""
    source = """
    if rank == 0:
        prepare()
    dist.all_reduce(torch.ones(4))
    print("all well")
    """
    said = run(tmp_path, source, 2, sleep=10.0)
    line = PREAMBLE.count("\n")
    assert len(said) in (2, 3)
    for text, seconds in zip(said[:2], ("2", "4"), strict=True):
        waited = re.match(
            r"mpiddp: rank 1: all_reduce\(SUM\) of float32 \(4,\) on process group '0' has waited "
            r"(\d+) s for other ranks\. Rank 0 has not come \(last called: barrier, #\d+; "
            rf"0 backward passes of Linear reduced; now at {re.escape(str(tmp_path))}/script\.py:"
            rf"{line} in prepare\)\. It goes on",
            text,
        )
        assert waited is not None
        assert int(seconds) <= int(waited[1]) <= int(seconds) + patience.enough(2)


@pytest.mark.thorough
def test_a_bucket(tmp_path: Path) -> None:
    source = """
    loss = model(torch.ones(1, 10)).sum()
    if rank == 2:
        prepare()
    loss.backward()
    print("all well")
    """
    said = run(tmp_path, source, 3)
    assert len(said) in (1, 2)  # at 3 s, and perhaps at 6 s
    assert "mpiddp: rank 0: bucket 0 of backward pass 1 of Linear" in said[0]
    assert "Rank 2 has not come (0 of its backward passes are reduced" in said[0]
    assert "in prepare)" in said[0]


@pytest.mark.thorough
def test_without_a_flight_recorder(tmp_path: Path) -> None:
    """Nothing is written to files, but the watchdog sees what it needs."""
    source = """
    if rank == 1:
        prepare()
    mpiddp.flight_recorder.dump(FILE)
    dist.barrier()
    print("all well")
    """
    dumped = tmp_path / "dumped"
    source = source.replace("FILE", f'f"{dumped}{{rank}}"')
    said = run(tmp_path, source, 1, ranks=2, sleep=3.5, TORCH_FR_BUFFER_SIZE="0")
    assert said
    assert "rank 0: barrier on process group '0' has waited" in said[0]
    assert pickle.loads(Path(f"{dumped}0").read_bytes())["entries"] == []


@pytest.mark.thorough
def test_a_monitored_barrier_without_a_thread(tmp_path: Path) -> None:
    """It waits in a loop of its own, which has to look."""
    source = """
    if rank == 0:
        prepare()
    dist.monitored_barrier()
    print("all well")
    """
    said = run(tmp_path, source, 1, ranks=2, sleep=6.0, MPIDDP_PROGRESS_THREAD="0")
    assert said
    assert "rank 1: monitored_barrier on process group '0' has waited" in said[0]


@pytest.mark.slow  # its siblings stay
def test_waits_that_end_are_not_spoken_of(tmp_path: Path) -> None:
    """Short ones; and an operation that nobody waits for, once its messages have come."""
    source = """
    work = dist.all_reduce(torch.ones(4), async_op=True)
    if rank == 0:
        receive = dist.irecv(torch.ones(1), src=1)
    for _ in range(3):
        if rank == 0:
            time.sleep(1.5)
        dist.barrier()
    if rank == 1:
        dist.send(torch.ones(1), dst=0)
    elif rank == 0:
        receive.wait()
    work.wait()
    print("all well")
    """
    assert run(tmp_path, source, 2.5) == []


@pytest.mark.slow
def test_time_in_which_the_job_was_stopped_does_not_count(tmp_path: Path) -> None:
    def stop_and_continue() -> None:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("pid-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        processes = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
        time.sleep(2)  # until the other rank has begun to wait
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in processes:
                os.kill(process, number)
            time.sleep(8)

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    source = f"""
    open(f"{tmp_path}/pid-{{os.getpid()}}", "w").close()
    if rank == 0:
        until = time.monotonic() + 14
        while time.monotonic() < until:
            time.sleep(0.1)
    dist.barrier()
    print("all well")
    """
    said = run(tmp_path, source, 9, ranks=2)
    thread.join()
    assert said == []
