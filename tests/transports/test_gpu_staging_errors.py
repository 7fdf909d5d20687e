"""Errors of the transport of buckets on a device, on a simulated GPU: where they come out."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from replicas import RANK, together
from simulated_gpu import SimulatedRuntime
from staged_channels import (
    CPU,
    PIECE,
    TIMEOUT,
    OpenChannel,
    forget_failures,
    gpu_left_as_found,
    opening_channels,
)

from mpiddp.engine.engine import Engine
from mpiddp.gpu.runtime import GpuError
from mpiddp.transports import choice

# Not once: the last one runs on MPICH alone.
pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.simulated_gpu]


@pytest.fixture
def gpu() -> Iterator[SimulatedRuntime]:
    with gpu_left_as_found() as runtime:
        yield runtime


@pytest.fixture
def open_channel(gpu: SimulatedRuntime) -> Iterator[OpenChannel]:
    with opening_channels(gpu) as make:
        yield make


def error_of(call: Callable[..., Any], *arguments: Any) -> Exception:
    """Return what a call raises, without the frames, which would keep all that was used."""
    try:
        call(*arguments)
    except Exception as error:
        return error.with_traceback(None)
    pytest.fail("nothing was raised")


class TestErrors:
    """Calls that fail fail on all ranks: what other ranks do then is not of this transport."""

    @pytest.fixture(autouse=True)
    def _leave_nothing_behind(self, gpu: SimulatedRuntime) -> Iterator[None]:
        yield
        forget_failures(gpu)

    @pytest.mark.parametrize(
        ("call", "after"),
        [
            ("EventRecord", 0),  # filled
            ("StreamWaitEvent", 0),
            ("MemcpyAsync", 0),  # to the host
            ("EventRecord", 1),  # copied
            ("EventQuery", 0),
            ("MemcpyAsync", 1),  # to the device
            ("EventRecord", 2),  # returned
        ],
    )
    def test_of_a_copy_come_out_where_it_is_waited_for(
        self, gpu: SimulatedRuntime, open_channel: OpenChannel, call: str, after: int
    ) -> None:
        staged = open_channel()
        [memory] = staged.allocate([PIECE])
        failing = staged.reduction(memory)
        # So that copies outlast the failure, and what frees the memory too early crashes.
        gpu.set_delays(0.05, 0.05)
        with gpu.failing(call, 700, after):
            failing.submit()
            error = error_of(failing.wait, TIMEOUT)
        with together():
            assert isinstance(error, GpuError)
            assert (error.code, error.call, error.device) == (700, f"cuda{call}", 0)
            assert error.rank == RANK
            assert f"cuda{call} failed on world rank {RANK}, device 0" in str(error)
        # And whoever comes next.
        [other] = staged.allocate([PIECE])
        assert f"cuda{call} failed" in str(error_of(staged.reduction(other).submit))
        assert not staged.channel.idle

    def test_thread_sleeps_afterwards(
        self, gpu: SimulatedRuntime, open_channel: OpenChannel
    ) -> None:
        staged = open_channel()
        [memory] = staged.allocate([PIECE])
        failing = staged.reduction(memory)
        with gpu.failing("MemcpyAsync", 700):
            failing.submit()
            error_of(failing.wait, TIMEOUT)
        for _ in range(100):  # it may take a busy machine some time to come to it
            before = staged.engine.counters["naps"]
            time.sleep(0.1)
            if staged.engine.counters["naps"] == before:
                break
        else:
            raise AssertionError(before)

    def test_of_the_device_that_is_gone(
        self, gpu: SimulatedRuntime, open_channel: OpenChannel
    ) -> None:
        gpu.set_devices(2)
        gpu.device_index = 1
        staged = open_channel()
        [memory] = staged.allocate([PIECE])
        failing = staged.reduction(memory)
        gpu.set_devices(1)
        failing.submit()
        error = error_of(failing.wait, TIMEOUT)
        assert "cudaSetDevice failed" in str(error)
        assert "device 1: cudaErrorInvalidDevice" in str(error)

    @pytest.mark.parametrize("call", ["HostRegister", "EventCreateWithFlags"])
    def test_of_memory(self, gpu: SimulatedRuntime, open_channel: OpenChannel, call: str) -> None:
        staged = open_channel("mpi")
        with gpu.failing(call, 2, 0):
            error = error_of(staged.allocate, [PIECE, 3 * PIECE])
        assert isinstance(error, GpuError)
        assert error.call == f"cuda{call}"
        assert f"world rank {RANK}, device 0: cudaErrorMemoryAllocation (2)" in str(error)
        assert gpu.counts.events == gpu.counts.registrations == 0

    def test_of_streams(self, gpu: SimulatedRuntime) -> None:
        from mpi4py import MPI

        engine, communicator = Engine(), MPI.COMM_WORLD.Dup()
        with gpu.failing("StreamCreateWithFlags", 2, 1):
            error = error_of(choice.open_channel, engine, communicator, "mpi", CPU)
        assert isinstance(error, GpuError)
        engine.stop()
        communicator.Free()

    def test_of_the_transport_below(self, open_channel: OpenChannel) -> None:
        """MPI's own error, with its text, comes out of the outer channel."""
        from mpi4py import MPI

        from mpiddp.mpi.errors import MPIError

        if MPI.get_vendor()[0] != "MPICH":
            pytest.skip("Open MPI crashes when a freed communicator is used")
        staged = open_channel("mpi")
        staged.channel.communicator.Set_errhandler(MPI.ERRORS_RETURN)
        [memory] = staged.allocate([PIECE])
        failing = staged.reduction(memory)
        staged.channel.communicator.Free()
        failing.submit()
        error = error_of(failing.wait, TIMEOUT)
        assert isinstance(error, MPIError)
        assert "MPI_Iallreduce failed" in str(error)
