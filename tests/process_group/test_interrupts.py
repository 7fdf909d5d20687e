"""Ctrl-C during a wait: MPI may write to the memory of the operation later, so nobody else gets it.

Whether it is kept is seen by what is in the memory that is allocated afterwards.
"""

import textwrap
from pathlib import Path

import mpirun
import pytest

pytestmark = pytest.mark.timeout(100)

SCRIPT = """\
import gc, os, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from mpi4py import MPI
import mpiddp

COUNT = 600
torch.set_num_threads(1)
mpiddp.init_process_group(timeout=timedelta(seconds=LIMIT))
rank = dist.get_rank()
part = dist.new_group(timeout=timedelta(seconds=LIMIT))
arrived = __file__ + ".interrupted"


def meet():
    CALL


def receive_as_a_part():
    tensor = torch.ones(COUNT)
    request = part.communicator.Irecv(tensor.numpy(), 1)
    part.wait_for(request, "MPI_Irecv", "recv", tensor)


class Interrupted(MPI.Intracomm):
    def Iallreduce(self, *args, **kwargs):
        request = super().Iallreduce(*args, **kwargs)
        if AT_ONCE:
            os.kill(os.getpid(), signal.SIGINT)
        return request


if rank == 0:
    part._communicator = Interrupted(part._communicator)
    if LIMIT > 30 and not AT_ONCE:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        meet()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    except RuntimeError as error:
        assert "has waited" in str(error), error
        print("timed out", flush=True)
    part.under_way.works.clear()     # as if it were swept
    gc.collect()
    # Of the sizes that the operation had, and others.
    others = [
        torch.full((count,), 7.0, dtype=dtype)
        for count in (2, COUNT)
        for dtype in (torch.float32, torch.float64)
        for _ in range(5000)
    ]
    open(arrived, "w").close()
    end = time.monotonic() + 3
    while time.monotonic() < end:
        MPI.COMM_WORLD.Iprobe()
        part.engine.progress()
        time.sleep(0.001)
    changed = sum(not bool((tensor == 7).all()) for tensor in others)
    print("changed:", changed, flush=True)
else:
    # As where it has not heard in time that the group is broken.
    part.state.page = None
    part.hear = lambda reason: None
    while not os.path.exists(arrived):
        time.sleep(0.01)
    try:
        meet()
    except RuntimeError:
        pass    # rank 0 does not call the next step of it
checked = __file__ + ".checked"
if rank == 0:
    open(checked, "w").close()
while not os.path.exists(checked):
    time.sleep(0.01)
time.sleep(0.5)     # for the launcher to read what was printed
MPI.COMM_WORLD.Abort(7)
"""

CALLS = {
    "sum": "dist.all_reduce(torch.ones(COUNT), group=part)",
    "async sum": "dist.all_reduce(torch.ones(COUNT), group=part, async_op=True).wait()",
    "halves": "dist.all_reduce(torch.ones(COUNT, dtype=torch.bfloat16), group=part)",
    "message": "dist.recv(torch.ones(COUNT), 1, part) if rank == 0 else "
    "dist.send(torch.zeros(COUNT), 0, part)",
    "part of an operation": "receive_as_a_part() if rank == 0 else "
    "part.communicator.Send(torch.zeros(COUNT).numpy(), 0)",
    "gather": "dist.all_gather([torch.ones(COUNT), torch.ones(COUNT)], torch.zeros(COUNT), part)",
}


def run(folder: Path, call: str, limit: int, at_once: bool = False, detail: bool = False) -> str:
    source = SCRIPT.replace("CALL", call).replace("LIMIT", str(limit))
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source.replace("AT_ONCE", str(at_once))))
    env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL" if detail else None}
    if at_once:  # what is interrupted is a call of MPI
        env["MPIDDP_COLLECTIVES"] = "messages"
    done = mpirun.run(2, [script], timeout=60, env=env)
    print(done.stdout, done.stderr)
    assert "changed:" in done.stdout, done.stderr
    return done.stdout


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("sum", "message") else [pytest.mark.slow])
        for name in CALLS
    ],
)
def test_memory_of_an_interrupted_operation_is_kept(tmp_path: Path, name: str) -> None:
    said = run(tmp_path, CALLS[name], limit=60)
    assert "interrupted" in said
    assert "changed: 0" in said


@pytest.mark.slow
def test_memory_of_an_interrupted_comparison_is_kept(tmp_path: Path) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL the ranks' calls are compared before."""
    said = run(tmp_path, "dist.barrier(part)", limit=60, detail=True)
    assert "interrupted" in said
    assert "changed: 0" in said


@pytest.mark.thorough
def test_ctrl_c_right_after_mpi_was_called(tmp_path: Path) -> None:
    said = run(tmp_path, CALLS["sum"], limit=60, at_once=True)
    assert "interrupted" in said
    assert "changed: 0" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sum", "async sum"])
def test_memory_of_an_operation_that_timed_out_is_kept(tmp_path: Path, name: str) -> None:
    said = run(tmp_path, CALLS[name], limit=2)
    assert "timed out" in said
    assert "changed: 0" in said
