"""Transports that give device memory to MPI: sums, order, waits, errors.

On the simulated GPU, whose memory is the host's; and, where `-m gpu` asks for it, on a real one.
"""

from collections.abc import Callable, Iterator

import gpus
import pytest
import torch
from gpus import Gpu
from mpi4py import MPI
from replicas import RANK, SIZE, gather, together

from mpiddp.engine.engine import Channel, Engine
from mpiddp.engine.memory import GpuMemory
from mpiddp.engine.single_all_reduce import SingleAllReduce
from mpiddp.gpu.runtime import GpuError
from mpiddp.transports.gpu_iallreduce import GpuIallreduceTransport
from mpiddp.transports.gpu_ring import GpuRingTransport

pytestmark = pytest.mark.mpi(min_size=2)

# What is to go wrong on the GPU, and what it has been given, only the simulated one can be told.
simulated_only = pytest.mark.parametrize("gpu", ["simulated"], indirect=True)

KINDS = {"device": GpuIallreduceTransport, "ring": GpuRingTransport}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

Opener = Callable[..., Channel]


@pytest.fixture(params=gpus.PLACES)
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    with gpus.on(request.param) as gpu:
        yield gpu


@pytest.fixture(params=[False, True], ids=["waiting", "thread"])
def threaded(request: pytest.FixtureRequest) -> bool:
    """Make progress where somebody waits, or on the engine's thread as well."""
    return bool(request.param)


@pytest.fixture
def opened(gpu: Gpu) -> Iterator[Opener]:
    """Return a function that opens a channel over one of `KINDS`, where the MPI can do that."""
    made: list[tuple[Engine, Channel, MPI.Comm]] = []

    def open_one(kind: str, threaded: bool = False, **settings: int) -> Channel:
        if gpu.real:
            gpus.require(kind, gpu.device)
        communicator = MPI.COMM_WORLD.Dup()
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
        engine = Engine(threaded=threaded)
        transport = KINDS[kind](communicator, gpu.device, **settings)
        channel = engine.open_channel(transport, communicator)
        made.append((engine, channel, communicator))
        return channel

    yield open_one
    for engine, channel, communicator in made:
        if channel.idle:
            engine.close_channel(channel)
            communicator.Free()
        engine.stop()


def given(elements: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Return small whole numbers, whose sums are exact in any order and any dtype."""
    return ((torch.arange(elements) + 3 * rank) % 13).to(dtype)


def total(elements: int, dtype: torch.dtype) -> torch.Tensor:
    return sum((given(elements, dtype, rank) for rank in range(SIZE)), torch.zeros(elements)).to(
        dtype
    )


def submit(
    channel: Channel, elements: int, dtype: torch.dtype, *, flags: int = 3, stream: int = 0
) -> SingleAllReduce:
    """Fill a bucket with this rank's numbers and hand it over."""
    memory = allocate(channel, elements, dtype, flags)
    memory.buffer.view(dtype).copy_(given(elements, dtype, RANK))
    memory.tail.view(dtype).copy_(torch.arange(flags).to(dtype) + RANK)
    reduction = SingleAllReduce(channel, memory, dtype, SIZE)
    reduction.submit(stream)
    return reduction


def allocate(channel: Channel, elements: int, dtype: torch.dtype, flags: int = 0) -> GpuMemory:
    size, tail = elements * dtype.itemsize, flags * dtype.itemsize
    [memory] = channel.allocate([size + tail], [tail])
    assert isinstance(memory, GpuMemory)
    assert memory.divides_before
    return memory


def assert_summed(
    reduction: SingleAllReduce, elements: int, dtype: torch.dtype, flags: int = 3
) -> None:
    """Assert that gradients hold the sum, not divided, and the flags their mean."""
    with together():
        assert reduction.wait(20)
        memory = reduction.memory
        assert isinstance(memory, GpuMemory)
        assert torch.equal(memory.buffer.view(dtype).cpu(), total(elements, dtype))
        mean = torch.arange(flags) + (SIZE - 1) / 2
        assert torch.equal(memory.tail.view(dtype), mean.to(dtype))


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums(opened: Opener, threaded: bool, kind: str, dtype: torch.dtype) -> None:
    """Odd sizes, fewer elements than ranks, none at all; several buckets at once, twice."""
    channel = opened(kind, threaded, chunk_bytes=4096)
    sizes = [10_007, 1, 0, 4096 // dtype.itemsize, 2, 3 * 4096 // dtype.itemsize + 1]
    for _ in range(2):
        reductions = [submit(channel, elements, dtype) for elements in sizes]
        for reduction, elements in zip(reductions, sizes, strict=True):
            assert_summed(reduction, elements, dtype)
    assert channel.idle


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_on_all_ranks_and_from_run_to_run(opened: Opener, kind: str) -> None:
    channel = opened(kind, chunk_bytes=1024)
    memory = allocate(channel, 5001, torch.float32)
    own = torch.randn(SIZE, 5001)[RANK]
    results = []
    for _ in range(2):
        memory.buffer.view(torch.float32).copy_(own)
        reduction = SingleAllReduce(channel, memory, torch.float32, 1.0)
        reduction.submit()
        assert reduction.wait(20)
        results.append(memory.buffer.cpu().clone())
    with together():
        assert torch.equal(*results)
        assert len(set(gather(results[0].numpy().tobytes()))) == 1
        reference = sum(gather(own))
        torch.testing.assert_close(results[0].view(torch.float32), reference)


@pytest.mark.parametrize("kind", KINDS)
def test_mpi_waits_for_the_kernel_that_fills_the_bucket(
    opened: Opener, gpu: Gpu, threaded: bool, kind: str
) -> None:
    """Without the wait the zeros of before are summed. Each rank's kernel is slow in its turn."""
    channel = opened(kind, threaded, chunk_bytes=4096)
    stream = gpu.new_stream()
    source = given(3001, torch.float32, RANK).to(gpu.device)
    for slow in range(SIZE):
        memory = allocate(channel, 3001, torch.float32)
        filled = memory.buffer.view(torch.float32)
        gpu.copy_late(stream, filled, source, 0.03 if slow == RANK else 0.0)
        reduction = SingleAllReduce(channel, memory, torch.float32, 1.0)
        reduction.submit(stream)
        # Other streams are not waited for.
        other = submit(channel, 17, torch.float32)
        assert_summed(reduction, 3001, torch.float32, 0)
        assert_summed(other, 17, torch.float32)


def test_ring_waits_for_its_own_sums(opened: Opener, gpu: Gpu, threaded: bool) -> None:
    """Without the wait a rank passes on what has not been added yet."""
    channel = opened("ring", threaded, chunk_bytes=gpu.chunk_bytes)
    with gpu.late_sums():
        reduction = submit(channel, gpu.many, torch.float32)
        assert_summed(reduction, gpu.many, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_buckets_of_late_ranks(opened: Opener, gpu: Gpu, threaded: bool, kind: str) -> None:
    """Many buckets under way, one rank always behind: chunks of one never meet another's."""
    channel = opened(kind, threaded, chunk_bytes=256, window=3)
    stream = gpu.new_stream()
    sizes = [1000, 3, 700, 64, 65, 1]
    reductions = []
    for elements in sizes:
        if elements % SIZE == RANK:
            gpu.sleep(stream, 0.003)
        reductions.append(submit(channel, elements, torch.float64, stream=stream))
    for reduction, elements in zip(reductions, sizes, strict=True):
        assert_summed(reduction, elements, torch.float64)


@simulated_only
@pytest.mark.parametrize("call", ["EventRecord", "EventQuery", "cublasAxpyEx", "SetDevice"])
def test_errors_of_the_gpu_come_out_of_the_wait(
    opened: Opener, gpu: gpus.SimulatedGpu, call: str
) -> None:
    """On all ranks at once here, so that none waits for another."""
    runtime = gpu.runtime
    channel = opened("ring")
    memory = allocate(channel, 100, torch.float32)
    reduction = SingleAllReduce(channel, memory, torch.float32, 1.0)
    if call == "SetDevice":
        # Another device is the current one, and the ring's cannot be chosen.
        runtime.set_devices(2)
        runtime.use_device(1)
    with runtime.failing(call, 13), together():
        reduction.submit()
        with pytest.raises(GpuError) as caught:
            reduction.wait(20)
    assert caught.value.code == 13
    assert caught.value.call.endswith(call)
    assert "device 0" in str(caught.value)
    # And so is whoever comes next.
    with pytest.raises(GpuError):
        SingleAllReduce(channel, memory, torch.float32, 1.0).submit()


def test_works_of_all_dtypes_keep_their_order(opened: Opener, threaded: bool) -> None:
    """What MPI adds and what goes around the ring follow each other on one communicator."""
    channel = opened("device", threaded, chunk_bytes=1024, window=1)
    plan = [(1000 + 7 * number, DTYPES[number % 4]) for number in range(12)]
    reductions = [submit(channel, elements, dtype) for elements, dtype in plan]
    for reduction, (elements, dtype) in zip(reductions, plan, strict=True):
        assert_summed(reduction, elements, dtype)


@simulated_only
@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_checked(gpu: Gpu, kind: str) -> None:
    for settings in ({"chunk_bytes": 0}, {"chunk_bytes": 100}, {"chunk_bytes": 1 << 31}):
        with pytest.raises(ValueError, match="chunk_bytes"):
            KINDS[kind](MPI.COMM_SELF, gpu.device, **settings)
    for window in (0, 17):
        with pytest.raises(ValueError, match="window"):
            KINDS[kind](MPI.COMM_SELF, gpu.device, window=window)
    with pytest.raises(ValueError, match="is no GPU"):
        KINDS[kind](MPI.COMM_SELF, torch.device("meta"))


@simulated_only
@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_given_back(gpu: gpus.SimulatedGpu, kind: str) -> None:
    before = gpu.runtime.counts.alive
    transport = KINDS[kind](MPI.COMM_SELF, gpu.device)
    memories = transport.allocate([100, 200], [4, 8])
    assert [memory.buffer.numel() for memory in memories] == [96, 192]
    assert [memory.tail.numel() for memory in memories] == [4, 8]
    assert gpu.runtime.counts.alive > before
    del transport, memories
    assert gpu.runtime.counts.alive == before


@pytest.mark.parametrize("kind", KINDS)
def test_sums_in_memory_of_the_runtimes_own(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """And freed after use: no later bucket at the same address is taken for it."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    channel = opened(kind)
    for elements in (100_001, 100_003, 17):
        assert_summed(submit(channel, elements, torch.float32), elements, torch.float32)


@simulated_only
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_is_the_runtimes_own_beside_expandable_segments(
    opened: Opener,
    gpu: gpus.SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """What torch maps piece by piece cannot be handed to other processes."""
    channel = opened("device")
    before = gpu.runtime.counts.allocations
    allocate(channel, 100, torch.float32)
    assert gpu.runtime.counts.allocations == before
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    memory = allocate(channel, 100, torch.float32)
    assert gpu.runtime.counts.allocations == before + 1
    assert not memory.buffer.any()
    view = memory.buffer.view(torch.float32)[3:5]
    del memory
    assert gpu.runtime.counts.allocations == before + 1
    assert not view.any()
    del view
    assert gpu.runtime.counts.allocations == before
    monkeypatch.setenv(name, "expandable_segments:False")
    allocate(channel, 100, torch.float32)
    assert gpu.runtime.counts.allocations == before
    monkeypatch.setenv(name, "expandable_segments:True")
    with gpu.runtime.failing("Malloc", 2), pytest.raises(GpuError, match="cudaMalloc"):
        allocate(channel, 100, torch.float32)
