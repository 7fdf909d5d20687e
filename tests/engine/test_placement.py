"""Where the engine's thread runs when OpenMP ties the main thread to a core."""

import json
import os
import threading
from pathlib import Path

import mpirun
import pytest

from mpiddp.engine.engine import Engine
from mpiddp.transports.messages import MessageTransport
from mpiddp.transports.wire import Wire

GIVEN = sorted(os.sched_getaffinity(0))

# One rank's answer a line.
PROGRAM = """
import json, os
from pathlib import Path

import torch
from mpi4py import MPI
from torch import nn

import mpiddp
from mpiddp.engine.engine import Engine
from mpiddp.transports import choice

mpiddp.init_process_group()
wrapped = mpiddp.DistributedDataParallel(nn.Linear(300, 300), transport="mpi")
for _ in range(2):
    wrapped(torch.ones(1, 300)).sum().backward()

def cores_of(name):
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text() == name + "\\n":
            return sorted(os.sched_getaffinity(int(task.name)))

# Shared memory of one rank has a thread only where a core is left over for it.
alone = Engine()
choice.open_channel(alone, MPI.COMM_SELF.Dup(), "shared")
topology = mpiddp.get_topology()
print(json.dumps({
    "main": sorted(os.sched_getaffinity(0)),
    "engine": cores_of("mpiddp engine"),
    "count": topology.local_core_count,
    "crowded": topology.crowded,
    "spare": alone.has_thread,
}), flush=True)
alone.stop()
MPI.COMM_WORLD.Barrier()
mpiddp.destroy_process_group()
"""


@pytest.mark.thorough(keep=1)
@pytest.mark.once
@pytest.mark.timeout(100)
@pytest.mark.skipif(len(GIVEN) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("environment", "tied"),
    [
        ({}, False),
        ({"OMP_PROC_BIND": "true"}, True),
        pytest.param({"OMP_PLACES": "threads"}, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_of_ranks(environment: dict[str, str], tied: bool, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    unset = dict.fromkeys(("OMP_PROC_BIND", "OMP_PLACES", "MPIDDP_PROGRESS_THREAD"))
    done = mpirun.run(2, [program], timeout=90, env={**unset, **environment})
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 2
    for answer in answers:
        assert answer == {
            "main": GIVEN[:1] if tied else GIVEN,
            "engine": GIVEN[1:] if tied else GIVEN,
            "count": len(GIVEN),
            # Both ranks wait on one core.
            "crowded": tied,
            "spare": True,
        }


@pytest.mark.essential(keep=1)
@pytest.mark.mpi
@pytest.mark.parametrize("cores", [{GIVEN[-1]}, set(GIVEN), set(), {1023}, {1 << 20}], ids=str)
def test_of_an_engine(cores: set[int]) -> None:
    """Cores that the machine has not are refused, and the thread starts all the same."""
    from mpi4py import MPI

    before = {thread.name for thread in Path("/proc/self/task").iterdir()}
    communicator = MPI.COMM_WORLD.Dup()
    engine = Engine(cores=cores)
    channel = engine.open_channel(MessageTransport(Wire(communicator)), communicator)
    (task,) = {thread.name for thread in Path("/proc/self/task").iterdir()} - before
    mine = os.sched_getaffinity(threading.get_native_id())
    assert os.sched_getaffinity(int(task)) == (cores & set(GIVEN) or mine)
    engine.close_channel(channel)
    engine.stop()
    communicator.Free()
