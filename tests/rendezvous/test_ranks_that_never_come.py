"""Ranks that never come: to MPI_Init, init_process_group, new_group, a construction, MPI_Finalize.

MPI waits for them without a limit. Each test starts a job of its own.
"""

import re
import subprocess
import textwrap
from pathlib import Path

import mpirun
import pytest

pytestmark = pytest.mark.timeout(100)

SETTINGS = {"MPIDDP_STALL_SECONDS": "2"}

# Before MPI is initialised only the launcher says which rank this is.
PREAMBLE = """\
import os, sys, time
launched = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
if launched in {missing!r}:
    {first}
from datetime import timedelta
import torch
import torch.distributed as dist
import mpiddp
"""


def run(
    folder: Path, source: str, first: str = "pass", limit: str = "60", missing: str = "2"
) -> "subprocess.CompletedProcess[str]":
    script = folder / "script.py"
    script.write_text(PREAMBLE.format(first=first, missing=missing) + textwrap.dedent(source))
    settings = SETTINGS | {"MPIDDP_START_SECONDS": limit}
    done = mpirun.run(3, [script], timeout=60, env=settings)
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    return done


def test_a_process_that_ends_before_mpi_init(tmp_path: Path) -> None:
    """Neither MPI tells the others; they say so, and end when the time limit is over."""
    done = run(tmp_path, "mpiddp.init_process_group()", first="sys.exit(0)", limit="5")
    assert done.returncode != 0
    said = r"mpiddp: rank [01] \(process \d+ on .+\) has waited in MPI_Init for "
    assert re.search(said + r"2 s\. It returns when all processes of the job are in", done.stderr)
    assert re.search(said + r"\d+ s, and its time limit is over\. It ends", done.stderr)


@pytest.mark.thorough
def test_the_processes_that_would_speak_never_come(tmp_path: Path) -> None:
    """Whoever is there ends at the time limit, and says so once."""
    source = "mpiddp.init_process_group()"
    done = run(tmp_path, source, first="time.sleep(50)", limit="5", missing="01")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("mpiddp: ")]
    assert len(said) == 1
    ends = r"mpiddp: rank 2 \(process \d+ on .+\) has waited in MPI_Init for \d+ s, and its time "
    assert re.match(f"{ends}limit is over", said[0])


@pytest.mark.slow
def test_a_process_that_comes_late_to_mpi_init(tmp_path: Path) -> None:
    source = "mpiddp.init_process_group(); print('all well')"
    done = run(tmp_path, source, first="time.sleep(9)")
    assert done.returncode == 0
    assert done.stdout.count("all well") == 3
    assert "in MPI_Init for 2 s" in done.stderr
    assert "time limit" not in done.stderr.replace("is the time limit", "")


@pytest.mark.thorough
def test_mpi_finalize(tmp_path: Path) -> None:
    """Another rank may have work to do, so the job goes on; but somebody says what it does."""
    source = """
    mpiddp.init_process_group()
    late = dist.get_rank() == 2
    mpiddp.destroy_process_group()
    if late:
        time.sleep(6)
    """
    done = run(tmp_path, source)
    assert done.returncode == 0
    assert re.search(r"mpiddp: rank [01] .* has waited in MPI_Finalize for 2 s\.", done.stderr)
    assert "rank 2" not in done.stderr


@pytest.mark.thorough
def test_init_process_group(tmp_path: Path) -> None:
    source = """
    from mpi4py import MPI
    if MPI.COMM_WORLD.Get_rank() == 2:
        time.sleep(40)
    mpiddp.init_process_group(timeout=timedelta(seconds=5))
    """
    done = run(tmp_path, source)
    assert done.returncode != 0
    said = r"rank [01] of 3 has waited {} s in init_process_group for other ranks: not all have"
    assert re.search("mpiddp: " + said.format(2), done.stderr)
    assert re.search("RuntimeError: " + said.format(r"\d+"), done.stderr)


@pytest.mark.parametrize(
    ("source", "what", "why"),
    [
        pytest.param(
            """
            if dist.get_rank() != 2:
                dist.new_group([1, 2], timeout=timedelta(seconds=5))
            """,
            "rank 1: new_group on process group '1'",
            "World rank 2 has not come (not in a group of this name and these ranks; now at ",
            id="new_group",
        ),
        pytest.param(
            """
            group = dist.group.WORLD._get_backend(torch.device("cpu"))
            if dist.get_rank() != 2:
                # As the wrapper does; what it compares first has a limit of its own.
                with group.recorded("construction of a module"):
                    group.communicator.Dup()
            """,
            "rank 0: construction of a module on process group '0'",
            "Rank 2 has not come (no collective of this group so far; now at ",
            id="channels",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            """
            from mpiddp.rendezvous import world
            world._world.timeout = timedelta(seconds=5)
            wait = world.named_wait("a test of waits")
            if dist.get_rank() != 2:
                with world.recorded("a test of waits"):
                    world.communicator().barrier()
            """,
            "rank 0: a test of waits",
            "Rank 2 has not come (no collective of this group so far; now at ",
            id="named",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_communicators(tmp_path: Path, source: str, what: str, why: str) -> None:
    """One rank speaks after a while, and ends the job when the group's time limit is over."""
    first = "mpiddp.init_process_group()\ndist.group.WORLD.set_timeout(timedelta(seconds=5))\n"
    done = run(tmp_path, first + textwrap.dedent(source) + "time.sleep(40)")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("mpiddp: ")]
    said = [line for line in said if " in MPI_Init" not in line]  # of a busy machine
    assert len(said) in (2, 3)
    assert all(f"mpiddp: {what} has waited " in line and why in line for line in said)
    assert "has waited 2 s" in said[0]
    assert "It goes on waiting, until 5 s are over" in said[0]
    assert "The time limit of 5 s is over, and the job ends. What this rank did" in said[-1]


@pytest.mark.thorough
def test_construction_is_named(tmp_path: Path) -> None:
    source = """
    mpiddp.init_process_group()
    dist.group.WORLD.set_timeout(timedelta(seconds=5))
    if dist.get_rank() == 2:
        time.sleep(40)
    mpiddp.DistributedDataParallel(torch.nn.Linear(2, 2))
    """
    done = run(tmp_path, source)
    assert done.returncode != 0
    assert (
        "mpiddp: rank 0: all_gather of uint8 (32,) in the construction of "
        "DistributedDataParallel(Linear) on process group '0' has waited 2 s for other ranks. "
        "Rank 2 has not come (no collective of this group so far; now at "
    ) in done.stderr
    # Ranks 0 and 1 give up at about the same time. Whoever is the second has heard of the first.
    error = re.search(
        r"RuntimeError: rank [01] of 3: all_gather on process group '0' (.*)", done.stderr
    )
    assert error
    own = "has waited 5 s for other ranks, and its timeout is over. "
    told = (
        r"cannot end, because the group is broken: all_gather on rank [01] has waited 5 s for "
        r"other ranks\. "
    )
    assert re.match(rf"({re.escape(own)}|{told})Rank 2 has not called it \(", error[1])


@pytest.mark.essential
@pytest.mark.thorough
def test_buffers_in_forward(tmp_path: Path) -> None:
    """The ranks that wait for the first one's buffers say so, and at the time limit they end."""
    source = """
    mpiddp.init_process_group()
    ddp = mpiddp.DistributedDataParallel(torch.nn.BatchNorm1d(2))
    for _ in range(2):  # the second forward rebuilds buckets
        ddp(torch.ones(3, 2)).sum().backward()
    dist.barrier()
    dist.group.WORLD.set_timeout(timedelta(seconds=5))
    if dist.get_rank() == 0:
        time.sleep(40)
    ddp(torch.ones(3, 2))
    """
    done = run(tmp_path, source)
    assert done.returncode != 0
    what = "mpiddp: rank 1: broadcast of parameters or buffers of "
    assert re.search(what + r".* on process group '0' has waited 2 s", done.stderr)
    assert "Rank 0 has not come (last called: " in done.stderr
