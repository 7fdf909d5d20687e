"""One rank of the job that tries GPU memory in MPI, for `gpu_trial`.

    python -m mpiddp.transports.gpu_trial_rank device|ring TYPE:INDEX [LIBRARY PREFIX]

The last two name a runtime that stands in for the GPU's.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpiddp import settings
from mpiddp.transports.gpu_trial import FAILED, PASSED, SECONDS, STARTED

if TYPE_CHECKING:
    from mpi4py import MPI


def main(arguments: Sequence[str]) -> int:
    """Run one rank of the job. Collective over its ranks."""
    # It ends even if the process that waits for it is killed.
    signal.alarm(int(settings.TRIAL_SECONDS.read()) + 1)
    way, name, *runtime = arguments
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    print(STARTED, world.Get_size(), flush=True)
    device = torch.device(name)
    if runtime:
        from mpiddp.gpu import runtime as device_runtime

        device_runtime.register(device.type, device_runtime.Runtime(*runtime))
    try:
        average_and_check(way, world.Dup(), device)
    except Exception as error:
        print(f"{FAILED}{type(error).__name__}: {error}", flush=True)
        world.Abort(3)
    print(PASSED, world.Get_size(), flush=True)
    return 0


def average_and_check(way: str, communicator: MPI.Comm, device: torch.device) -> None:
    """Sum known values on the GPU, and check the sums. Collective.

    Raises:
        RuntimeError: a sum is wrong, or takes too long.
    """
    from mpi4py import MPI

    from mpiddp.engine.engine import Engine
    from mpiddp.engine.memory import GpuMemory
    from mpiddp.engine.single_all_reduce import SingleAllReduce
    from mpiddp.gpu.runtime import runtime_of
    from mpiddp.transports.gpu_choice import make_transport

    communicator.Set_errhandler(MPI.ERRORS_RETURN)
    if communicator.Get_size() == 1:
        _check_alone(way, communicator, device)
        return
    engine = Engine(threaded=False)
    channel = engine.open_channel(make_transport(way, communicator, device), communicator)
    runtime = runtime_of(device)
    assert runtime is not None
    # torch has no streams of its own for what stands in for a GPU.
    stream = runtime.current_stream(device) if device.type == "cuda" else 0
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        # Several chunks, of which the last is odd; and less than a chunk.
        sizes = [elements * dtype.itemsize for elements in (1_200_001, 1001)]
        memories = channel.allocate(sizes, [dtype.itemsize] * len(sizes))
        reductions = []
        for memory in memories:
            assert isinstance(memory, GpuMemory)
            gradients = memory.buffer.view(dtype)
            gradients.copy_(_given(gradients.numel(), communicator.Get_rank(), device))
            memory.tail.view(dtype).fill_(1)
            reductions.append(SingleAllReduce(channel, memory, dtype, 1.0))
            reductions[-1].submit(stream)
        for reduction in reductions:
            memory = reduction.memory
            assert isinstance(memory, GpuMemory)
            if not reduction.wait(SECONDS / 2):
                raise RuntimeError(f"a sum of {dtype} takes too long")
            gradients = memory.buffer.view(dtype)
            parts = [
                _given(gradients.numel(), rank, device) for rank in range(communicator.Get_size())
            ]
            if not torch.equal(gradients.double(), torch.stack(parts).sum(0).double()):
                raise RuntimeError(f"a sum of {dtype} is wrong")
            if memory.tail.view(dtype).item() != communicator.Get_size():
                raise RuntimeError(f"the flags beside {dtype} are wrong")
    engine.close_channel(channel)
    engine.stop()


def _given(elements: int, rank: int, device: torch.device) -> torch.Tensor:
    # Whole numbers, whose sums are exact in 16 bits.
    return (torch.arange(elements, device=device) + rank) % 13


def _check_alone(way: str, communicator: MPI.Comm, device: torch.device) -> None:
    """Let MPI copy GPU memory from one place to another: all that one rank can try."""
    from mpi4py import MPI

    given = _given(100_001, 0, device).float()
    result = torch.zeros_like(given)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    source, target = (
        MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes) for tensor in (given, result)
    )
    if way == "device":
        requests = [communicator.Iallreduce([source, MPI.FLOAT], [target, MPI.FLOAT])]
    else:
        requests = [communicator.Irecv(target, 0), communicator.Isend(source, 0)]
    MPI.Request.Waitall(requests)
    if not torch.equal(given, result):
        raise RuntimeError("what MPI copied is not what was there")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
