"""What a job listens at besides MPI."""

import re
from pathlib import Path

import mpirun
import pytest

# What this process listens at: addresses of /proc/net/tcp and tcp6, where 0A is the state.
LISTENING = """
import os, json, sys
from mpi4py import MPI

def listening():
    own = {os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")
           if os.path.islink(f"/proc/self/fd/{each}")}
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
    return {each[1] for each in lines if each[3] == "0A" and f"socket:[{each[9]}]" in own}

# What MPI listens at is MPI's.
MPI.COMM_WORLD.Dup().alltoall([bytes(1 << 20)] * MPI.COMM_WORLD.size)
before = listening()
import torch
import torch.distributed as dist
import mpiddp

mpiddp.init_process_group()
model = mpiddp.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
dist.new_group([0, 1])
dist.barrier()
dist.all_gather_object([None] * 2, "an object")
at = sorted(each.partition(":")[0] for each in listening() - before)
print("listens:", dist.get_rank(), *at, flush=True)
mpiddp.destroy_process_group()
left = listening() - before
assert not left, left
"""


@pytest.mark.essential
def test_nothing_else_listens(tmp_path: Path) -> None:
    """Of a job on one node rank 0 does, at 127.0.0.1, as long as there is the process group."""
    (tmp_path / "script.py").write_text(LISTENING)
    done = mpirun.run(2, [tmp_path / "script.py"], timeout=60)
    assert done.returncode == 0, done.stderr
    said = sorted(re.findall(r"listens: (.*)", done.stdout))
    assert said == ["0 0100007F", "1"], done.stdout
