"""Two ranks over TCP, in a network of their own: how many bytes a step sends, and what wakes it."""

import json
import os
import shutil
from pathlib import Path

import mpirun
import pytest

pytestmark = [
    pytest.mark.once,
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("unshare"),
        reason="a network of its own is made by unshare, as root",
    ),
]

OVER_TCP = {
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_pml": "ob1",
    "MPIR_CVAR_NOLOCAL": "1",
    "MPIR_CVAR_CH4_NETMOD": "ofi",
}


def run_over_tcp(folder: Path, program: str, *arguments: str) -> str:
    """Run a program with 2 ranks; return what they printed."""
    file = folder / "program.py"
    file.write_text(program)
    starter = folder / "start.sh"
    starter.write_text('#!/bin/sh\nip link set lo up\nexec "$@"\n')
    starter.chmod(0o755)
    done = mpirun.run(
        2,
        [file, *arguments],
        timeout=60,
        env=OVER_TCP,
        before=["unshare", "--net", str(starter)],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


COUNT_BYTES = """
import sys, torch, torch.distributed as dist, mpiddp
from mpiddp import compression

def sent():
    dist.barrier()
    with open("/proc/net/dev") as lines:
        return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))

mpiddp.init_process_group()
hook = {"none": None, "fp16": compression.fp16, "bf16": compression.bf16}[sys.argv[1]]
dtype = getattr(torch, sys.argv[2])
model = torch.nn.Linear(1500, 1500, dtype=dtype)
model = mpiddp.DistributedDataParallel(model, transport="exchange")
if hook:
    model.register_comm_hook(None, hook)
def step():
    model(torch.ones(1, 1500, dtype=dtype)).sum().backward()
for _ in range(2):
    step()
before = sent()
for _ in range(4):
    step()
after = sent()
if dist.get_rank() == 0:
    print("bytes", (after - before) / 4 / (1500 * 1501))
mpiddp.destroy_process_group()
"""


@pytest.mark.thorough
@pytest.mark.essential
def test_bytes_on_the_wire(tmp_path: Path) -> None:
    """What a step sends for each element."""

    def bytes_of(hook: str, dtype: str) -> float:
        return float(run_over_tcp(tmp_path, COUNT_BYTES, hook, dtype).split("bytes ")[1])

    float32 = bytes_of("none", "float32")
    # Both directions: each rank sends half of its gradients, and half of the means.
    assert 8.0 < float32 < 8.4
    for hook, dtype in (("fp16", "float32"), ("bf16", "float32"), ("none", "bfloat16")):
        # Half, but for what the kernel needs besides, which is not always the same.
        assert 0.495 < bytes_of(hook, dtype) / float32 < 0.53


# Rank 1 comes late, so rank 0 sleeps: at the end of backward, or on the engine's thread before it.
WAIT_FOR_MESSAGES = """
import json, sys, time, torch, torch.distributed as dist, mpiddp

mpiddp.init_process_group()
rank = dist.get_rank()
model = torch.nn.Linear(500, 500)
model = mpiddp.DistributedDataParallel(model, transport="exchange")
engine = dist.group.WORLD.engine

class Pause(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 1
    @staticmethod
    def backward(context, gradient):
        # After the hooks of the parameters, before the wait at the end.
        time.sleep(0.03)
        return gradient

def steps(module_input):
    before = engine.counters
    for _ in range(30):
        if rank == 1:
            time.sleep(0.01)
        model(module_input).sum().backward()
    return {name: value - before[name] for name, value in engine.counters.items()}

first = torch.ones(1, 500)
at_end = steps(first)
on_thread = steps(Pause.apply(first.clone().requires_grad_()))
if rank == 0:
    print(json.dumps({"at_end": at_end, "on_thread": on_thread, "now": engine.counters}))
mpiddp.destroy_process_group()
"""


@pytest.mark.thorough
def test_messages_end_sleeps(tmp_path: Path) -> None:
    """A rank that waits, and its engine's thread, sleep until a socket has news."""
    output = run_over_tcp(tmp_path, WAIT_FOR_MESSAGES)
    counters = json.loads(output[output.index("{") :])
    for heard in (counters["at_end"], counters["now"]):
        assert heard["heard"] >= heard["missed"] + 4, counters
    assert counters["on_thread"]["thread_chunks"] > 0, counters


SMALL_MESSAGES = """
import pathlib, time
import mpiddp  # before MPI
from mpi4py import MPI
import numpy

world = MPI.COMM_WORLD
late = 0
for number, size in enumerate([1, 8, 200, 300] * 3):
    message = numpy.zeros(size, numpy.uint8)
    came = pathlib.Path(f"{__file__}.{number}")
    world.Barrier()
    world.Bcast(message)
    if world.rank == 1:
        came.touch()
    end = time.monotonic() + 4
    while world.rank == 0 and not came.exists():  # it computes, and does not call MPI
        if time.monotonic() > end:
            late += 1
            break
        time.sleep(0.005)
if world.rank == 0:
    print(late)
"""


@pytest.mark.thorough
def test_small_messages_leave_at_once(tmp_path: Path) -> None:
    """Also while their sender computes, see libfabric.py."""
    assert run_over_tcp(tmp_path, SMALL_MESSAGES).strip() == "0"
