"""Train a few steps; one rank meets a fault at some moment. For tests/faults.

    mpirun -n 3 python fault.py FAULT MOMENT FOLDER [gloo]

The last rank is the one. It writes the time on the monotonic clock to FOLDER/began. With "gloo" it
is a program of torch alone, for torchrun. What it cannot do itself, it asks of who started it, by
files in FOLDER: that the launcher is killed, that its host meets a fault.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

FAULT, MOMENT, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
GLOO = "gloo" in sys.argv
TIMEOUT = timedelta(seconds=6)
OURS = False


def fails_now() -> None:
    raise ValueError("broken on purpose")


def fail() -> None:
    """Meet the fault."""
    time.sleep(0.3)  # the others are where they wait by now
    (FOLDER / "began").write_text(str(time.monotonic()))
    if FAULT == "exception":
        fails_now()
    elif FAULT == "exception-in-thread":
        thread = threading.Thread(target=fails_now)
        thread.start()
        thread.join()
        time.sleep(1000)  # for what that thread would have brought
    elif FAULT == "sys-exit":
        sys.exit(3)
    elif FAULT == "os-exit":
        os._exit(3)
    elif FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "segfault":
        ctypes.string_at(0)
    elif FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "memory":
        import torch

        resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
        torch.ones(1 << 33)
    elif FAULT == "full-disk":
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 1)
        os.dup2(full, 2)
        print("x" * 100_000, flush=True)
    elif FAULT == "launcher-killed":
        (FOLDER / "kill-launcher").touch()
        time.sleep(1000)
    elif FAULT in ("link-cut", "node-frozen", "node-off"):
        (FOLDER / "host-fault").touch()
        while not (FOLDER / "host-fault-met").exists():
            time.sleep(0.05)
    else:
        sys.exit(f"no such fault: {FAULT}")


def at(moment: str) -> None:
    if OURS and moment == MOMENT:
        fail()


# Of Open MPI's mpirun, MPICH's, SLURM, torchrun.
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "WORLD_SIZE")
for rank, size in zip(RANKS, SIZES, strict=True):
    if rank in os.environ and size in os.environ:
        OURS = int(os.environ[rank]) == int(os.environ[size]) - 1
        break
at("import")

import torch  # noqa: E402
import torch._dynamo  # noqa: E402  torch's class would at its construction, a second of a core
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)
torch.manual_seed(1)
if GLOO:
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist.init_process_group("gloo", timeout=TIMEOUT)

    def save(state: dict[str, torch.Tensor]) -> None:
        if dist.get_rank() == 0:
            torch.save(state, FOLDER / "state.pt")
        dist.barrier()

else:
    import mpiddp
    from mpiddp import DistributedDataParallel as DDP  # type: ignore[assignment]
    from mpiddp import checkpoint

    mpiddp.init_process_group(timeout=TIMEOUT)

    def save(state: dict[str, torch.Tensor]) -> None:
        checkpoint.save(state, FOLDER / "checkpoints", step=1)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        if step == 2:
            at("backward")  # the buckets of the layers after this one are under way
        return gradient


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.before = torch.nn.Linear(256, 256)
        self.after = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))

    def forward(self, inputs):
        if step == 2:
            at("forward")
        return self.after(FailingBackward.apply(self.before(inputs)))


step = 0
at("construction")
model = DDP(Model(), bucket_cap_mb=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):  # noqa: B007, FailingBackward reads it
    optimizer.zero_grad()
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
at("collective")
dist.all_reduce(torch.ones(10))
at("checkpoint")
save(model.module.state_dict())
dist.destroy_process_group()
at("finalisation")
print("ended well", flush=True)
