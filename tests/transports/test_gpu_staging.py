"""The transport of buckets on a device, on a simulated GPU: its waits, its order, its memory."""

import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from replicas import RANK, SIZE, together
from simulated_gpu import SimulatedRuntime
from staged_channels import (
    CPU,
    PIECE,
    TIMEOUT,
    OpenChannel,
    StagedChannel,
    check,
    fill,
    forget_failures,
    given,
    gpu_left_as_found,
    mean,
    opening_channels,
)

from mpiddp.engine.engine import Engine
from mpiddp.engine.memory import GpuMemory
from mpiddp.engine.single_all_reduce import SingleAllReduce
from mpiddp.gpu.runtime import Stream
from mpiddp.mpi import nodes as mpi_nodes
from mpiddp.transports import choice
from mpiddp.transports.gpu_staging import StagingTransport

pytestmark = [pytest.mark.once, pytest.mark.simulated_gpu]
several = pytest.mark.mpi(min_size=2)


@pytest.fixture
def gpu() -> Iterator[SimulatedRuntime]:
    with gpu_left_as_found() as runtime:
        yield runtime


@pytest.fixture
def open_channel(gpu: SimulatedRuntime) -> Iterator[OpenChannel]:
    with opening_channels(gpu) as make:
        yield make


# Elements of gradients and of tails: none at all, tails only, gradients only, a whole piece and
# one more, several pieces that are not equal.
SHAPES = [(0, 0), (0, 3), (1, 3), (5, 0), (PIECE // 4, 2), (PIECE // 4 + 1, 2), (9999, 7)]


def reduce_some(staged: StagedChannel, dtype: torch.dtype) -> None:
    """Reduce several buckets at once, several times."""
    sizes = [(gradients + tail) * dtype.itemsize for gradients, tail in SHAPES]
    tails = [tail * dtype.itemsize for _, tail in SHAPES]
    memories = staged.allocate(sizes, tails)
    for memory, size, tail in zip(memories, sizes, tails, strict=True):
        assert memory.buffer.nbytes == size - tail
        assert memory.tail.nbytes == tail
        assert not memory.buffer.any()
        assert not memory.tail.any()
        assert not memory.divides_before
    reductions = [staged.reduction(memory, dtype) for memory in memories]
    for step in range(3):
        for memory, reduction in zip(memories, reductions, strict=True):
            fill(memory, dtype, step)
            reduction.submit()
        for memory, reduction in zip(memories, reductions, strict=True):
            assert reduction.wait(TIMEOUT)
            check(memory, dtype, step)


@several
class TestMeans:
    @pytest.mark.essential(keep=2)
    @pytest.mark.parametrize("name", ["shared", "mpi"])
    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
    )
    def test_exact(self, open_channel: OpenChannel, name: str, dtype: torch.dtype) -> None:
        reduce_some(open_channel(name), dtype)

    @pytest.mark.parametrize("nodes", [[0, 1, 2, 3], [0, 0, 1, 1]], ids=["apart", "pairs"])
    def test_between_nodes(
        self, open_channel: OpenChannel, nodes: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mpi_nodes, "ranks_of_node", lambda comm: comm.Split(nodes[RANK], RANK))
        staged = open_channel("shared")
        inner = type(staged.channel.transport.inner.transport).__name__
        assert inner == ("LaneTransport" if len(set(nodes[:SIZE])) > 1 else "SharedTransport")
        reduce_some(staged, torch.float32)

    @pytest.mark.parametrize("name", ["shared", "mpi"])
    def test_without_an_engine_thread(self, open_channel: OpenChannel, name: str) -> None:
        staged = open_channel(name, threaded=False)
        assert not staged.engine.has_thread
        reduce_some(staged, torch.float32)

    @pytest.mark.parametrize("name", ["shared", "mpi"])
    def test_copies_of_any_speed(
        self, gpu: SimulatedRuntime, open_channel: OpenChannel, name: str
    ) -> None:
        staged = open_channel(name)
        gpu.set_delays(to_host=0.002 * RANK, to_device=0.002 * (SIZE - 1 - RANK))
        reduce_some(staged, torch.float32)

    def test_pieces_divide_a_bucket_evenly(
        self, gpu: SimulatedRuntime, open_channel: OpenChannel
    ) -> None:
        staged = open_channel(piece_bytes=PIECE)
        [memory] = staged.allocate([2 * PIECE + 128 + 8], [8])
        reduction = staged.reduction(memory)
        before = gpu.counts
        fill(memory)
        reduction.submit()
        assert reduction.wait(TIMEOUT)
        check(memory)
        assert gpu.counts.copies_to_host - before.copies_to_host == 3
        assert gpu.counts.copies_to_device - before.copies_to_device == 3

    def test_the_channel_of_a_device(self, gpu: SimulatedRuntime) -> None:
        from mpi4py import MPI

        engine, communicator = Engine(), MPI.COMM_WORLD.Dup()
        channel = choice.open_channel(engine, communicator, "auto", CPU)
        assert channel.device == CPU
        assert isinstance(channel.transport, StagingTransport)
        assert not choice.sends_messages(channel)
        reduce_some(StagedChannel(gpu, engine, channel), torch.float32)
        inner = channel.transport.inner
        engine.close_channel(channel)
        assert inner.closed
        channel.transport.free()
        communicator.Free()
        engine.stop()


@several
class TestWaits:
    def test_for_the_stream_that_fills_the_bucket(
        self, gpu: SimulatedRuntime, open_channel: OpenChannel
    ) -> None:
        """A slow kernel writes the gradients, and nobody waits for it on the host."""
        staged = open_channel()
        [memory] = staged.allocate([3 * PIECE])
        producer = Stream(gpu, 0)
        values = given(3 * PIECE // 4, torch.float32)
        reduction = staged.reduction(memory)
        gpu.hold(producer.address)
        gpu.copy(producer.address, memory.buffer.view(torch.float32), values)
        reduction.submit(producer.address)
        time.sleep(0.02)
        assert not reduction.done
        gpu.release()
        assert reduction.wait(TIMEOUT)
        check(memory)

    def test_of_the_stream_that_reads_the_means(
        self, gpu: SimulatedRuntime, open_channel: OpenChannel
    ) -> None:
        """The copy back is slow, and nobody waits for it on the host."""
        staged = open_channel()
        [memory] = staged.allocate([3 * PIECE])
        consumer = Stream(gpu, 0)
        seen = torch.zeros(3 * PIECE // 4)
        reduction = staged.reduction(memory)
        gpu.hold_copies(to_device=True)
        fill(memory)
        reduction.submit()
        assert reduction.wait(TIMEOUT)
        memory.wait_on(consumer.address)
        gpu.copy(consumer.address, seen, memory.buffer.view(torch.float32))
        time.sleep(0.02)
        assert not seen.any()
        gpu.release()
        consumer.synchronize()
        with together():
            assert torch.equal(seen, mean(seen.numel(), torch.float32))

    def test_one_stream_for_both(self, gpu: SimulatedRuntime, open_channel: OpenChannel) -> None:
        """Step after step is queued on a stream without the host waiting for it."""
        staged = open_channel()
        [memory] = staged.allocate([3 * PIECE])
        compute = Stream(gpu, 0)
        reduction = staged.reduction(memory)
        buffer = memory.buffer.view(torch.float32)
        values = [given(3 * PIECE // 4, torch.float32, step=step) for step in range(3)]
        results = [torch.zeros_like(each) for each in values]
        gpu.set_delays(to_host=0.003, to_device=0.01)
        for source, result in zip(values, results, strict=True):
            gpu.copy(compute.address, buffer, source, seconds=0.01 * RANK)
            reduction.submit(compute.address)
            assert reduction.wait(TIMEOUT)
            memory.wait_on(compute.address)
            gpu.copy(compute.address, result, buffer, seconds=0.01)
        compute.synchronize()
        with together():
            for step, result in enumerate(results):
                assert torch.equal(result, mean(result.numel(), torch.float32, step))

    def test_before_the_first_means(self, gpu: SimulatedRuntime, open_channel: OpenChannel) -> None:
        [memory, empty] = open_channel().allocate([64, 0])
        assert memory.wait_on(0) == empty.wait_on(0) == 0

    def test_polling_leaves_no_error_behind(
        self, gpu: SimulatedRuntime, open_channel: OpenChannel
    ) -> None:
        """What is left as the last error looks to torch as if its own kernels had failed."""
        staged = open_channel(threaded=False)
        [memory] = staged.allocate([64])
        reduction = staged.reduction(memory)
        gpu.hold_copies(to_host=True)
        before = gpu.counts.queries
        reduction.submit()
        staged.engine.progress()
        staged.engine.progress()
        assert gpu.last_error == 0
        gpu.release()
        assert reduction.wait(TIMEOUT)
        assert gpu.counts.queries > before + 1
        assert gpu.last_error == 0

    def test_engine_sleeps_between_looks(
        self, gpu: SimulatedRuntime, open_channel: OpenChannel
    ) -> None:
        staged = open_channel()
        [memory] = staged.allocate([64])
        reduction = staged.reduction(memory)
        gpu.hold_copies(to_host=True)
        reduction.submit()
        before, began = gpu.counts.queries, time.perf_counter()
        while gpu.counts.queries - before < 100:
            assert time.perf_counter() < began + TIMEOUT
            time.sleep(0.02)
        # One look in 50 to 1000 us.
        assert gpu.counts.queries - before < 20_000 * (time.perf_counter() - began)
        gpu.release()
        assert reduction.wait(TIMEOUT)


@several
class TestOverlap:
    def test_first_pieces_are_back_before_the_last_have_landed(
        self, gpu: SimulatedRuntime, open_channel: OpenChannel
    ) -> None:
        staged = open_channel()
        pieces = 5
        [memory] = staged.allocate([pieces * PIECE])
        reduction = staged.reduction(memory)
        fill(memory)
        gpu.hold_copies(to_host=True)
        before = gpu.counts
        reduction.submit()
        # All copies to the host were issued at once; the first one lands.
        assert gpu.counts.copies_to_host - before.copies_to_host == pieces
        gpu.release(1)
        deadline = time.perf_counter() + TIMEOUT
        while gpu.counts.copies_to_device == before.copies_to_device:
            assert time.perf_counter() < deadline
            time.sleep(0.001)
        assert gpu.counts.landed_on_host - before.landed_on_host == 1
        assert not reduction.done
        gpu.release()
        assert reduction.wait(TIMEOUT)
        check(memory)

    def test_small_bucket_behind_a_large_one_waits_for_its_turn(
        self, gpu: SimulatedRuntime, open_channel: OpenChannel
    ) -> None:
        """Ranks whose copies land in other orders reduce the same pieces with each other."""
        staged = open_channel("mpi")
        sizes = [5 * PIECE, 64, 3 * PIECE, 8]
        memories = staged.allocate(sizes, [0, 0, 0, 8])
        reductions = [staged.reduction(memory) for memory in memories]
        for step in range(4):
            gpu.set_delays(to_host=0.002 * ((RANK + step) % SIZE))
            for memory, reduction in zip(memories, reductions, strict=True):
                fill(memory, step=step)
                reduction.submit()
            for memory, reduction in zip(memories, reductions, strict=True):
                assert reduction.wait(TIMEOUT)
                check(memory, step=step)


@several
def test_engine_thread_makes_no_context_on_another_device(
    gpu: SimulatedRuntime, open_channel: OpenChannel
) -> None:
    gpu.set_devices(3)
    gpu.use_device(2)
    gpu.device_index = 2
    staged = open_channel()
    [memory] = staged.allocate([3 * PIECE])
    reduction = staged.reduction(memory)
    gpu.set_delays(to_host=0.02, to_device=0.001)
    fill(memory)
    reduction.submit()
    deadline = time.perf_counter() + TIMEOUT
    while not reduction.done:  # the engine thread moves it
        assert time.perf_counter() < deadline
        time.sleep(0.001)
    check(memory)
    assert gpu.counts.contexts == 1 << 2
    assert gpu.current_device == 2


@several
def test_callers_keep_their_current_device(
    gpu: SimulatedRuntime, open_channel: OpenChannel
) -> None:
    gpu.set_devices(2)
    gpu.device_index = 1
    staged = open_channel(threaded=False)
    [memory] = staged.allocate([3 * PIECE])
    assert gpu.current_device == 0
    reduction = staged.reduction(memory)
    fill(memory)
    producer = Stream(gpu, 1)
    reduction.submit(producer.address)
    assert gpu.current_device == 0
    assert reduction.wait(TIMEOUT)
    assert gpu.current_device == 0
    check(memory)


@several
class TestMemory:
    @pytest.mark.parametrize("name", ["shared", "mpi"])
    def test_small_buckets_of_two_queues_are_pinned_apart(
        self, gpu: SimulatedRuntime, open_channel: OpenChannel, name: str
    ) -> None:
        first, second = open_channel(name), open_channel(name)
        memories = [staged.allocate([8, 16, 64], [8, 0, 4]) for staged in (first, second)]
        assert gpu.counts.registrations == 2
        del memories
        assert gpu.counts.registrations == 0

    def test_stays_while_copies_use_it(
        self, gpu: SimulatedRuntime, open_channel: OpenChannel
    ) -> None:
        staged = open_channel()
        [memory, other] = staged.allocate([3 * PIECE, 64])
        reduction = staged.reduction(memory)
        gpu.hold_copies(to_device=True)
        reduction.submit()
        assert reduction.wait(TIMEOUT)
        del memory, other, reduction
        assert gpu.busy
        assert gpu.counts.registrations == 1
        staged.allocate([64])
        assert gpu.counts.registrations == 1
        gpu.release()
        deadline = time.perf_counter() + TIMEOUT
        while gpu.busy:
            assert time.perf_counter() < deadline
            time.sleep(0.001)
        staged.allocate([64])
        assert gpu.counts.registrations == 0

    def test_stays_while_the_engine_uses_it(
        self, gpu: SimulatedRuntime, open_channel: OpenChannel
    ) -> None:
        staged = open_channel()
        [memory] = staged.allocate([3 * PIECE])
        [other] = staged.allocate([PIECE])
        gpu.hold_copies(to_host=True)
        first = staged.reduction(memory)
        fill(memory)
        first.submit()
        del memory, first
        gpu.release()
        gpu.hold_copies()
        last = staged.reduction(other)
        fill(other)
        last.submit()
        assert last.wait(TIMEOUT)
        check(other)
        deadline = time.perf_counter() + TIMEOUT
        while not staged.channel.idle:
            assert time.perf_counter() < deadline
            time.sleep(0.001)
        forget_failures(gpu)

    def test_is_unpinned_with_its_transport(self, gpu: SimulatedRuntime) -> None:
        from mpi4py import MPI

        engine, communicator = Engine(), MPI.COMM_WORLD.Dup()
        channel = choice.open_channel(engine, communicator, "auto", CPU)
        [memory] = channel.allocate([3 * PIECE], [8])
        assert isinstance(memory, GpuMemory)
        reduction = SingleAllReduce(channel, memory, torch.float32, float(SIZE))
        fill(memory)
        reduction.submit()
        assert reduction.wait(TIMEOUT)
        memory.wait_on(0)
        engine.close_channel(channel)
        channel.transport.free()
        assert gpu.counts.alive == (0, 0, 0, 0)
        assert memory.wait_on(0) == 0
        check(memory)
        communicator.Free()
        engine.stop()

    def test_is_left_alone_by_a_forked_child(
        self, gpu: SimulatedRuntime, open_channel: OpenChannel
    ) -> None:
        staged = open_channel()
        [memory] = staged.allocate([3 * PIECE])
        alive, queries = gpu.counts.alive, gpu.counts.queries
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            del memory
            os._exit((gpu.counts.alive, gpu.counts.queries) != (alive, queries))
        assert os.waitpid(child, 0)[1] == 0

    def test_wrong_sizes(self, open_channel: OpenChannel, gpu: SimulatedRuntime) -> None:
        staged = open_channel()
        with pytest.raises(ValueError, match=r"tails of \[8\] bytes are more"):
            staged.allocate([4], [8])
        for piece_bytes in (0, 100):
            with pytest.raises(ValueError, match="piece_bytes must be a multiple of 64"):
                StagingTransport(staged.channel.transport.inner, gpu, CPU, piece_bytes=piece_bytes)


def test_world_of_one(gpu: SimulatedRuntime) -> None:
    engine = Engine()
    channel = choice.open_channel_of_one(engine, CPU)
    assert channel.device == CPU
    [memory] = channel.allocate([100], [8])
    assert isinstance(memory, GpuMemory)
    assert (memory.buffer.nbytes, memory.tail.nbytes) == (92, 8)
    reduction = SingleAllReduce(channel, memory, torch.float32, 1.0)
    memory.buffer.view(torch.float32).fill_(3)
    reduction.submit()
    assert reduction.done
    assert reduction.wait(TIMEOUT)
    assert memory.wait_on(0) == 0
    assert memory.buffer.view(torch.float32).unique().tolist() == [3]
    assert not engine.has_thread
    engine.close_channel(channel)


def test_a_module_on_the_cpu_has_no_device() -> None:
    engine = Engine()
    channel: Any = choice.open_channel_of_one(engine)
    assert channel.device is None
    assert len(channel.allocate([8, 8], [4, 4])) == 2
    engine.close_channel(channel)
