"""The GPU that a test runs on: the simulated one, or the real one of this rank.

A test that takes `gpu` of `PLACES` runs on both: on the simulated one always, on a real one when
`-m gpu` asks for it. Both have slow kernels, so a missing wait shows as a wrong sum.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import simulated_gpu
import torch
from replicas import RANK, gather

from mpiddp.gpu.blas import Adder
from mpiddp.gpu.runtime import Runtime, Stream, runtime_of
from mpiddp.mpi.library import linked_version
from mpiddp.transports import gpu_choice, gpu_support

if TYPE_CHECKING:
    from simulated_gpu import SimulatedRuntime

CYCLES_PER_SECOND = 1.7e9  # of torch.cuda._sleep, about


class SimulatedGpu:
    """CPU tensors on the simulated GPU.

    Attributes:
        device: of all tensors.
        real: whether it is a real GPU.
        runtime: its runtime.
        many: a number of elements that takes several chunks.
        chunk_bytes: the size of a chunk.
    """

    device = torch.device("cpu")
    real = False
    many = 2001
    chunk_bytes = 4096

    def __init__(self, runtime: SimulatedRuntime) -> None:
        self.runtime = runtime
        self._streams: dict[int, Stream] = {}

    def new_stream(self) -> int:
        """Return the handle of a stream that nobody else uses."""
        stream = Stream(self.runtime, 0)
        self._streams[stream.address] = stream
        return stream.address

    def sleep(self, stream: int, seconds: float) -> None:
        """Let a stream do nothing for a while."""
        self.runtime.sleep(stream, seconds)

    def copy_late(
        self, stream: int, to: torch.Tensor, source: torch.Tensor, seconds: float
    ) -> None:
        """Copy on a stream, after a while. Both tensors must stay alive till then."""
        self.runtime.copy(stream, to, source, seconds)

    def add_late(self, to: torch.Tensor, source: torch.Tensor, seconds: float) -> None:
        """Add on the current stream, after a while, as `copy_late` copies."""
        self.runtime.add(self.runtime.current_stream(self.device), to, source, seconds)

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Make a new stream the current one; torch's operations wait for what is on it."""
        stream = Stream(self.runtime, 0)
        with self.runtime.use_stream(stream), simulated_gpu.InOrderOfStream(stream):
            yield
        stream.synchronize()

    @contextlib.contextmanager
    def late_sums(self) -> Iterator[None]:
        """Delay the sums of the BLAS library, by different times on even and odd ranks."""
        self.runtime.set_sum_delay(0.01 * (1 + RANK % 2))
        yield
        self.runtime.set_sum_delay()


class RealGpu:
    """The GPU of this rank, which others may share; otherwise as `SimulatedGpu`."""

    real = True
    many = 5_000_001
    chunk_bytes = 4 << 20

    def __init__(self) -> None:
        self.device = torch.device("cuda", RANK % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        runtime = runtime_of(self.device)
        assert runtime is not None
        self.runtime: Runtime = runtime
        self._streams: dict[int, torch.cuda.Stream] = {}

    def new_stream(self) -> int:
        """Return the handle of a stream that nobody else uses."""
        stream = torch.cuda.Stream(self.device)
        self._streams[stream.cuda_stream] = stream
        return stream.cuda_stream

    def sleep(self, stream: int, seconds: float) -> None:
        """Let a stream do nothing for a while."""
        with torch.cuda.stream(self._streams[stream]):
            torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))

    def copy_late(
        self, stream: int, to: torch.Tensor, source: torch.Tensor, seconds: float
    ) -> None:
        """Copy on a stream, after a while. Both tensors must stay alive till then."""
        side = self._streams[stream]
        side.wait_stream(torch.cuda.current_stream(self.device))  # which has made the tensors
        self.sleep(stream, seconds)
        with torch.cuda.stream(side):
            to.copy_(source)

    def add_late(self, to: torch.Tensor, source: torch.Tensor, seconds: float) -> None:
        """Add on the current stream, after a while, as `copy_late` copies."""
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))
        to.add_(source)

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Make a new stream the current one."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(stream)

    @contextlib.contextmanager
    def late_sums(self) -> Iterator[None]:
        """Keep the whole GPU busy with other kernels, so that the sums have to wait."""
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            matrix = torch.rand(4096, 4096, device=self.device)
            for _ in range(100):
                torch.mm(matrix, matrix)
        yield
        torch.cuda.synchronize(self.device)


Gpu = SimulatedGpu | RealGpu

PLACES = ["simulated", pytest.param("real", marks=pytest.mark.gpu)]


@contextlib.contextmanager
def on(place: str) -> Iterator[Gpu]:
    """Let a test run on a GPU of `PLACES`."""
    if place == "simulated":
        with simulated_gpu.on_cpu_tensors() as runtime:
            yield SimulatedGpu(runtime)
    else:
        yield RealGpu()
        torch.cuda.synchronize()


def require(way: str, device: torch.device) -> None:
    """Skip the test if this MPI cannot take memory of the GPU, and say how that is known.

    Collective. A skip must not hide a defect. The table of MPIs and a trial in another job are
    believed. But if an MPI says itself that it was built for this GPU, its trial has to work, or
    the test fails, as it does without a BLAS library.

    Args:
        way: "device" or "ring".
        device: a GPU.
    """
    runtime = runtime_of(device)
    assert runtime is not None
    Adder(runtime, runtime.index_of(device))
    library = gpu_support.identify(linked_version())
    answers = gpu_support.ask_library(runtime.prefix)
    for ways, why in gather(gpu_support.worth_trying(library, runtime.prefix, answers)):
        if way not in ways:
            pytest.skip(f"{way!r} is not tried: {why}")  # what the table says
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* was asked for, but gradients on the GPU travel by")
        from mpi4py import MPI

        choice = gpu_choice.choose(MPI.COMM_WORLD, device, way)
    if choice.name == way:
        return
    if any(any(said.values()) for said in gather(answers)):
        pytest.fail(f"{library} says that it supports this GPU ({answers}), but {choice.reason}")
    pytest.skip(choice.reason)  # what the trial said
