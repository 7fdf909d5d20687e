"""Who waits in init_process_group says which ranks are absent, on which host, and at what line.

Each test starts a job of its own.
"""

import re
import socket
from pathlib import Path

import mpirun
import pytest
from script_runs import launch

pytestmark = pytest.mark.timeout(100)

SETTINGS = {"MPIDDP_STALL_SECONDS": "2"}
HOST = re.escape(socket.gethostname())

# As programs do that gather the hosts' names on rank 0 only, to print them.
ONE_CALLS_MPI = """\
import ctypes
import os
import sys
import threading
from datetime import timedelta

import torch.distributed as dist
from mpi4py import MPI


def print_hosts():
    MPI.COMM_WORLD.allgather("a host")


if os.environ["RANK"] == sys.argv[1]:
    if sys.argv[2] == "answers":
        print_hosts()
    else:  # with the lock of Python
        ctypes.PyDLL(None).sleep(60)
dist.init_process_group("gloo", timeout=timedelta(seconds=7))
"""


def waits(text: str) -> list[str]:
    lines = (line for line in text.splitlines() if line.startswith("mpiddp: rank "))
    return [line for line in lines if " in init_process_group for other ranks" in line]


def line_of(text: str) -> int:
    return ONE_CALLS_MPI[: ONE_CALLS_MPI.index(text)].count("\n") + 1


@pytest.mark.essential
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_waits_elsewhere_in_mpi(tmp_path: Path, rank: int) -> None:
    """Another rank asks it by MPI, and says its line; so does the error at the time limit."""
    script = tmp_path / "script.py"
    script.write_text(ONE_CALLS_MPI)
    done = launch(script, str(rank), "answers", ranks=3, env=SETTINGS)
    assert done.returncode == 1
    speaker = 1 if rank == 0 else 0
    where = rf"{re.escape(str(script))}:{line_of('MPI.COMM_WORLD')} in print_hosts"
    who = rf"Absent: rank {rank} \(process \d+ on {HOST}, now at {where}\)\n"
    waited = rf"rank {{}} of 3 has waited {{}} s in init_process_group for other ranks: .*{who}"
    assert re.search(f"mpiddp: {waited.format(speaker, 2)}", done.stderr)
    assert re.search(f"RuntimeError: {waited.format('[012]', '[0-9]+')}", done.stderr)
    assert {line.partition(" of ")[0] for line in waits(done.stderr)} == {f"mpiddp: rank {speaker}"}


@pytest.mark.essential
def test_a_limit_that_ends_before_anybody_speaks(tmp_path: Path) -> None:
    """The error knows the line too: the absent rank answers long before half of 30 s."""
    script = tmp_path / "script.py"
    script.write_text(ONE_CALLS_MPI)
    done = launch(script, "0", "answers", env={"MPIDDP_STALL_SECONDS": None})
    assert done.returncode == 1
    where = rf"{re.escape(str(script))}:{line_of('MPI.COMM_WORLD')} in print_hosts"
    who = rf"Absent: rank 0 \(process \d+ on {HOST}, now at {where}\)\n"
    assert re.search(f"RuntimeError: rank 1 of 2 has waited .*{who}", done.stderr)


@pytest.mark.thorough
def test_a_rank_that_does_not_answer(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ONE_CALLS_MPI)
    done = launch(script, "0", "is silent", env=SETTINGS)
    assert done.returncode == 1
    who = rf"Absent: rank 0 \(process \d+ on {HOST}, which sleeps: .+; it does "
    assert re.search(f"mpiddp: rank 1 of 2 .*{who}not answer", done.stderr)


LATE = """\
import os
import sys
import threading
import time

from mpi4py import MPI


class Words:
    # Passes stderr on, and lets the others come when this rank has said who is absent.

    def write(self, text):
        if "Absent" in text:
            open(sys.argv[1], "w").close()
        return sys.__stderr__.write(text)

    def flush(self):
        sys.__stderr__.flush()


late = MPI.COMM_WORLD.Get_rank() in (0, 1, 3)
while late and not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
import mpiddp

sys.stderr = sys.stderr if late else Words()
mpiddp.init_process_group()
names = [thread.name for thread in threading.enumerate()]
assert "mpiddp start" not in names, names
mpiddp.destroy_process_group()
print("all well")
"""


@pytest.mark.essential
@pytest.mark.parametrize("runner", [[], ["-m", "mpiddp"]], ids=["alone", "runner"])
def test_ranks_that_come_late(tmp_path: Path, runner: list[str]) -> None:
    """Without the runner Linux tells which processes are absent; they need not know of mpiddp."""
    script = tmp_path / "script.py"
    script.write_text(LATE)
    done = mpirun.run(4, [*runner, script, tmp_path / "go"], timeout=60, env=SETTINGS)
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    assert done.returncode == 0
    assert done.stdout.count("all well") == 4
    said = waits(done.stderr)
    assert said[0].startswith("mpiddp: rank 2 of 4 has waited 2 s in init_process_group")
    is_there = r"now at .*script\.py:\d+ in <module>" if runner else r"which \w+: .*script\.py.*"
    absent = [rf"rank {rank} \(process \d+ on {HOST}, {is_there}\)" for rank in (0, 1, 3)]
    assert re.search(f"Absent: {', '.join(absent)}$", said[0])
