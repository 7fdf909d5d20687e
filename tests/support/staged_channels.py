"""Channels of GPU buckets over host transports on the simulated GPU, for tests of staging."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import simulated_gpu
import torch
from replicas import RANK, SIZE, together
from simulated_gpu import SimulatedRuntime

from mpiddp.engine import single_all_reduce
from mpiddp.engine.engine import Channel, Engine
from mpiddp.engine.memory import GpuMemory
from mpiddp.engine.single_all_reduce import SingleAllReduce
from mpiddp.transports import choice, gpu_staged_memory
from mpiddp.transports.gpu_staging import StagingTransport

CPU = torch.device("cpu")
TIMEOUT = 20.0
# Every mean of `given` is a whole number, exact in any dtype for up to four ranks.
UNIT = 12
PIECE = 4096


@dataclass
class StagedChannel:
    """A channel of GPU buckets, with what it is made of."""

    gpu: SimulatedRuntime
    engine: Engine
    channel: Channel

    def allocate(self, sizes: list[int], tails: list[int] | None = None) -> list[GpuMemory]:
        memories = self.channel.allocate(sizes, tails)
        assert all(isinstance(memory, GpuMemory) for memory in memories)
        return memories  # type: ignore[return-value]

    def reduction(self, memory: GpuMemory, dtype: torch.dtype = torch.float32) -> SingleAllReduce:
        return SingleAllReduce(self.channel, memory, dtype, float(SIZE))


def wait_for_copies(runtime: SimulatedRuntime) -> None:
    """Wait until no stream of the simulated GPU has anything to do."""
    deadline = time.perf_counter() + TIMEOUT
    while runtime.busy and time.perf_counter() < deadline:
        time.sleep(0.001)


def forget_failures(runtime: SimulatedRuntime) -> None:
    """Free the memory that is otherwise kept for good after a failure.

    Copies that were issued before a call failed go on, so they are waited for: on a loaded machine
    they would run in memory that is no longer mapped.
    """
    wait_for_copies(runtime)
    single_all_reduce._abandoned.clear()  # type: ignore[attr-defined]
    gpu_staged_memory._kept.clear()  # type: ignore[attr-defined]


@contextlib.contextmanager
def gpu_left_as_found() -> Iterator[SimulatedRuntime]:
    """Put CPU tensors on the simulated GPU, and check that everything is given back."""
    with simulated_gpu.on_cpu_tensors() as runtime:
        # Of other tests, lest it be freed while this one counts. Collecting may keep it again.
        gc.collect()
        forget_failures(runtime)
        runtime.overlook()
        unpinned = runtime.counts.unpinned_copies
        yield runtime
        # Means that nobody has waited for may still be on their way.
        wait_for_copies(runtime)
        gpu_staged_memory._forget_kept()  # type: ignore[attr-defined]
        if runtime.counts.alive != (0, 0, 0, 0):
            gc.collect()
        alive = runtime.counts.alive
        assert alive == (0, 0, 0, 0), f"streams, events, registrations, allocations: {alive}"
        assert runtime.counts.unpinned_copies == unpinned


OpenChannel = Callable[..., StagedChannel]


@contextlib.contextmanager
def opening_channels(gpu: SimulatedRuntime) -> Iterator[OpenChannel]:
    """Return a function that opens channels over host transports, closed at the end."""
    from mpi4py import MPI

    opened: list[StagedChannel] = []

    def make(
        name: str = "auto", *, threaded: bool = True, piece_bytes: int = PIECE
    ) -> StagedChannel:
        engine = Engine(threaded=threaded)
        communicator = MPI.COMM_WORLD.Dup()
        inner = choice.open_channel(engine, communicator, name)
        outer = StagingTransport(inner, gpu, CPU, piece_bytes=piece_bytes)
        opened.append(StagedChannel(gpu, engine, engine.open_channel(outer, communicator)))
        return opened[-1]

    yield make
    MPI.COMM_WORLD.Barrier()
    for staged in opened:
        if staged.channel.idle:
            staged.engine.close_channel(staged.channel)
        staged.engine.stop()
        staged.channel.transport.free()
        if staged.channel.communicator != MPI.COMM_NULL:
            staged.channel.communicator.Free()


def given(elements: int, dtype: torch.dtype, rank: int = RANK, step: int = 0) -> torch.Tensor:
    """Return the values of a rank."""
    return ((torch.arange(elements) % 13 + rank + step) * UNIT).to(dtype)


def mean(elements: int, dtype: torch.dtype, step: int = 0) -> torch.Tensor:
    """Return the mean of what all ranks have, exactly."""
    total = sum(given(elements, torch.float64, rank, step) for rank in range(SIZE))
    assert isinstance(total, torch.Tensor)
    return (total / SIZE).to(dtype)


def fill(memory: GpuMemory, dtype: torch.dtype = torch.float32, step: int = 0) -> None:
    """Give a bucket and its tail this rank's values."""
    for part in (memory.buffer, memory.tail):
        values = part.view(dtype)
        values.copy_(given(values.numel(), dtype, step=step))


def check(memory: GpuMemory, dtype: torch.dtype = torch.float32, step: int = 0) -> None:
    """Wait on the default stream, and check the means."""
    memory.wait_on(0)
    with together():
        for part in (memory.buffer, memory.tail):
            values = part.view(dtype)
            assert torch.equal(values, mean(values.numel(), dtype, step))
