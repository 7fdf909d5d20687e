"""The table of a GPU runtime's functions, its events, streams and errors, without a GPU."""

import gc
import os
import re
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import simulated_gpu
import torch
from simulated_gpu import SimulatedRuntime

from mpiddp.gpu.runtime import (
    COPY_TO_GPU,
    COPY_TO_HOST,
    Event,
    GpuError,
    Runtime,
    Stream,
    register,
    runtime_of,
)

pytestmark = pytest.mark.once

CPU = torch.device("cpu")
# CUDA's library, and the one of a torch for CUDA, which leads to it.
REAL = [
    path
    for path in (
        Path("/usr/local/cuda/lib64/libcudart.so"),
        Path(torch.__file__).parent / "lib" / "libc10_cuda.so",
    )
    if path.exists()
]


@pytest.fixture
def gpu() -> Iterator[SimulatedRuntime]:
    """Let CPU tensors be on a device, and find everything given back afterwards."""
    with simulated_gpu.on_cpu_tensors() as runtime:
        yield runtime
    gc.collect()
    assert runtime.counts.alive == (0, 0, 0, 0)


class TestChoice:
    def test_the_cpu_has_none(self) -> None:
        assert runtime_of(CPU) is None
        assert runtime_of(torch.device("meta")) is None

    def test_registered(self, gpu: SimulatedRuntime) -> None:
        assert runtime_of(CPU) is gpu
        assert register("cpu", None) is gpu
        assert runtime_of(CPU) is None
        assert register("cpu", gpu) is None

    def test_no_such_library(self) -> None:
        with pytest.raises(OSError, match=r"cannot load /nowhere\.so: .*No such file"):
            Runtime("/nowhere.so")

    def test_library_without_the_functions(self) -> None:
        with pytest.raises(OSError, match=r"libc\.so\.6 has no hipMemcpyAsync"):
            Runtime("libc.so.6", "hip")


class TestStreams:
    @pytest.mark.smoke
    def test_an_event_passes_when_its_stream_comes_to_it(self, gpu: SimulatedRuntime) -> None:
        stream, event = Stream(gpu, 0), Event(gpu, 0)
        assert event.query()
        source, to = torch.ones(10), torch.zeros(10)
        gpu.copy(stream.address, to, source, seconds=0.05)
        event.record(stream.address)
        assert not event.query()
        assert to.sum() == 0
        event.synchronize()
        assert event.query()
        assert to.sum() == 10

    def test_a_stream_waits_for_an_event(self, gpu: SimulatedRuntime) -> None:
        first, second, event = Stream(gpu, 0), Stream(gpu, 0), Event(gpu, 0)
        source, between, to = torch.ones(10), torch.zeros(10), torch.zeros(10)
        gpu.copy(first.address, between, source, seconds=0.05)
        event.record(first.address)
        gpu.stream_wait_event(second.address, event)
        gpu.copy(second.address, to, between)
        second.synchronize()
        assert to.sum() == 10

    def test_a_stream_waits_for_the_record_that_was_the_last_one(
        self, gpu: SimulatedRuntime
    ) -> None:
        """An event that is recorded anew, on a stream that is sooner there, lets nobody go on."""
        slow, quick, waiting = (Stream(gpu, 0) for _ in range(3))
        source, to, seen = torch.ones(10), torch.zeros(10), torch.zeros(10)
        mark = Event(gpu, 0)
        gpu.copy(slow.address, to, source, seconds=0.05)
        mark.record(slow.address)
        gpu.stream_wait_event(waiting.address, mark)
        mark.record(quick.address)
        gpu.copy(waiting.address, seen, to)
        mark.synchronize()
        waiting.synchronize()
        assert seen.sum() == 10

    def test_the_default_stream_is_the_caller(self, gpu: SimulatedRuntime) -> None:
        stream, event = Stream(gpu, 0), Event(gpu, 0)
        source, to = torch.ones(10), torch.zeros(10)
        gpu.copy(stream.address, to, source, seconds=0.05)
        event.record(stream.address)
        gpu.stream_wait_event(gpu.current_stream(CPU), event)
        assert to.sum() == 10

    def test_the_current_stream_is_the_threads_own(self, gpu: SimulatedRuntime) -> None:
        stream = Stream(gpu, 0)
        seen = []
        with gpu.use_stream(stream):
            assert gpu.current_stream(CPU) == stream.address
            other = threading.Thread(target=lambda: seen.append(gpu.current_stream(CPU)))
            other.start()
            other.join()
        assert seen == [0]
        assert gpu.current_stream(CPU) == 0

    @pytest.mark.essential
    def test_copies_of_pinned_memory(self, gpu: SimulatedRuntime) -> None:
        host, device = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
        before = gpu.counts.unpinned_copies
        gpu.host_register(host.data_ptr(), host.nbytes)
        gpu.copy_async(device.data_ptr(), host.data_ptr(), host.nbytes, COPY_TO_GPU, 0)
        assert torch.equal(host, device)
        assert gpu.counts.unpinned_copies == before
        gpu.host_unregister(host.data_ptr())
        gpu.copy_async(host.data_ptr(), device.data_ptr(), host.nbytes, COPY_TO_HOST, 0)
        assert gpu.counts.unpinned_copies == before + 1

    def test_streams_and_events_are_made_on_their_device(self, gpu: SimulatedRuntime) -> None:
        gpu.set_devices(2)
        stream, event, other = Stream(gpu, 1), Event(gpu, 1), Event(gpu, 0)
        assert gpu.current_device == 0
        event.record(stream.address)
        with pytest.raises(GpuError, match="cudaErrorInvalidResourceHandle"):
            other.record(stream.address)

    def test_what_is_held_up_goes_on_when_it_is_released(self, gpu: SimulatedRuntime) -> None:
        stream = Stream(gpu, 0)
        host, device = torch.ones(10), torch.zeros(20)
        gpu.hold_copies(to_device=True)
        for half in device[:10], device[10:]:
            gpu.copy_async(half.data_ptr(), host.data_ptr(), 40, COPY_TO_GPU, stream.address)
        gpu.release(1)
        event = Event(gpu, 0)
        while not device[9]:
            time.sleep(0.001)
        assert not device[10:].any()
        gpu.hold_copies()
        gpu.release()
        event.record(stream.address)
        event.synchronize()
        assert device.sum() == 20

    def test_idle_streams_sleep(self, gpu: SimulatedRuntime) -> None:
        streams = [Stream(gpu, 0) for _ in range(3)]
        source, to = torch.ones(10), torch.zeros(10)
        for stream in streams:
            gpu.copy(stream.address, to, source)
            stream.synchronize()
        before = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - before < 0.05

    def test_work_outlives_its_stream_and_event(self, gpu: SimulatedRuntime) -> None:
        source, to = torch.ones(10), torch.zeros(10)
        stream, event = Stream(gpu, 0), Event(gpu, 0)
        gpu.copy(stream.address, to, source, seconds=0.02)
        event.record(stream.address)
        waiting = Stream(gpu, 0)
        gpu.stream_wait_event(waiting.address, event)
        del stream, event
        waiting.synchronize()
        assert to.sum() == 10


class TestErrors:
    @pytest.mark.essential
    def test_text(self, gpu: SimulatedRuntime) -> None:
        with pytest.raises(RuntimeError) as caught:
            gpu.host_unregister(4096)
        error = caught.value
        assert isinstance(error, GpuError)
        assert (error.code, error.call, error.device) == (713, "cudaHostUnregister", 0)
        assert "cudaHostUnregister failed on world rank" in str(error)
        assert "device 0: cudaErrorHostMemoryNotRegistered (713): as the simu" in str(error)

    def test_they_are_not_left_for_torch_to_find(self, gpu: SimulatedRuntime) -> None:
        stream, event = Stream(gpu, 0), Event(gpu, 0)
        gpu.sleep(stream.address, 0.02)
        event.record(stream.address)
        assert not event.query()
        assert gpu.last_error == 0
        with pytest.raises(GpuError):
            gpu.host_register(0, 0)
        assert gpu.last_error == 0

    @pytest.mark.parametrize(
        "call", ["EventRecord", "EventQuery", "EventSynchronize", "StreamSynchronize"]
    )
    def test_each_call_is_checked(self, gpu: SimulatedRuntime, call: str) -> None:
        stream, event = Stream(gpu, 0), Event(gpu, 0)

        def call_all() -> None:
            event.record(stream.address)
            event.query()
            event.synchronize()
            stream.synchronize()

        with gpu.failing(call), pytest.raises(GpuError, match=f"cuda{call} failed"):
            call_all()
        call_all()

    @pytest.mark.parametrize("kind", [Stream, Event])
    def test_what_cannot_be_made(
        self, gpu: SimulatedRuntime, kind: type[Stream] | type[Event]
    ) -> None:
        with gpu.failing(f"{kind.__name__}CreateWithFlags", 2), pytest.raises(GpuError):
            kind(gpu, 0)
        with pytest.raises(GpuError, match="cudaErrorInvalidDevice"):
            kind(gpu, 5)


def test_a_forked_child_leaves_the_device_alone(gpu: SimulatedRuntime) -> None:
    stream, event = Stream(gpu, 0), Event(gpu, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        del stream, event
        gc.collect()
        os._exit(gpu.counts.alive != (1, 1, 0, 0))
    assert os.waitpid(child, 0)[1] == 0
    del stream, event


@pytest.mark.skipif(not REAL, reason="neither CUDA nor a torch for it is installed")
@pytest.mark.parametrize("library", REAL, ids=lambda path: path.name)
def test_cudas_own_library(library: Path) -> None:
    """It has all of the functions; without a driver, it says so."""
    runtime = Runtime(str(library))
    problem = None
    try:
        Event(runtime, 0).synchronize()
    except GpuError as error:
        problem = error
    if problem is not None:
        assert problem.code in (3, 35, 100), problem
        assert re.match(r"cuda\w+ failed on .*device 0: cudaError", str(problem))
        assert "driver" in str(problem) or "no CUDA-capable device" in str(problem)
