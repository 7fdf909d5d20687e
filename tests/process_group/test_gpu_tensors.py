"""Collectives of tensors on a GPU, a simulated one: order on streams, futures, errors, memory.

Tensors on the CPU stand for the GPU's. Its kernels take their time, so what is not waited for is
not there yet. tests/on_gpu/test_gpu_collectives.py does the like on a real one.
"""

import contextlib
import gc
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_versions
from collective_calls import Tensors, calls, on_host
from group_data import EVERY, assert_same_bits, group, make, name_of, rank, size
from simulated_gpu import SimulatedRuntime, on_cpu_tensors

from mpiddp.engine.engine import look_while_waiting
from mpiddp.gpu.runtime import GpuError, Stream
from mpiddp.process_group import gpu_tensors
from mpiddp.process_group.gpu_copies import copier_of

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.once,
    pytest.mark.simulated_gpu,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

CPU = torch.device("cpu")
SLOW = 0.01  # seconds that a kernel, or a copy, may take


@contextlib.contextmanager
def on_gpu(delay: float = 0.0) -> Iterator[SimulatedRuntime]:
    """Let tensors on the CPU be on a GPU, to which copies take `delay` seconds."""
    with on_cpu_tensors() as simulated, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_tensors, "CPU_IS_HOST", False)
        simulated.set_delays(to_device=delay)
        yield simulated


@contextlib.contextmanager
def current_stream(simulated: SimulatedRuntime) -> Iterator[Stream]:
    """Work on a stream beside the thread, and wait for it at the end."""
    stream = Stream(simulated, 0)
    with simulated.use_stream(stream):
        yield stream
    stream.synchronize()


def produce(simulated: SimulatedRuntime, stream: Stream, values: Tensors) -> Tensors:
    """Return tensors that a slow kernel on the stream will fill with values."""
    tensors = [torch.full_like(value, 77) for value in values]
    for tensor, value in zip(tensors, values, strict=True):
        simulated.copy(stream.address, tensor, value, SLOW)
    return tensors


def consume(simulated: SimulatedRuntime, stream: Stream, tensors: Tensors) -> Tensors:
    """Return what a kernel on the stream finds in tensors; the host does not wait for it."""
    found = [torch.full_like(tensor, 78) for tensor in tensors]
    for copy, tensor in zip(found, tensors, strict=True):
        simulated.copy(stream.address, copy, tensor)
    return found


def all_reduce(tensor: torch.Tensor, part: Any = None) -> Any:
    return dist.all_reduce(tensor, group=part, async_op=True)


def summed(value: float = 1.0) -> float:
    return sum(rank + value for rank in range(size()))


class TestOrder:
    @pytest.mark.essential(keep=3)
    @pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
    @pytest.mark.parametrize("name", list(calls()))
    def test_between_a_producer_and_a_consumer(self, name: str, later: bool) -> None:
        """The input is what the stream will have written; the result is what it then finds."""
        call = calls()[name]()
        expected = on_host(call)
        with on_gpu(SLOW) as simulated, current_stream(simulated) as stream:
            copied = simulated.counts.copies_to_host
            read = produce(simulated, stream, call.read)
            room = produce(simulated, stream, call.room)
            for work in call.run(read, room, later):
                work.wait()
            found = consume(simulated, stream, call.written(read, room))
            stream.synchronize()
            reads = name != "broadcast" or rank() == size() - 1
            assert simulated.counts.copies_to_host - copied == (len(read) if reads else 0)
        for got, value in zip(found, expected, strict=True):
            assert_same_bits(got, value)

    def test_result_comes_behind_what_the_stream_had_to_do(self) -> None:
        """A tensor that is received into may still be written by kernels before the call."""
        tensor, stale = torch.zeros(3), torch.full((3,), 7.0)
        sending = dist.isend(torch.full((3,), float(rank())), (rank() + 1) % size())
        with on_gpu() as simulated, current_stream(simulated) as stream:
            simulated.copy(stream.address, tensor, stale, 0.2)
            receiving = dist.irecv(tensor, (rank() - 1) % size())
            receiving.wait()  # the message overtakes the kernel
            found = consume(simulated, stream, [tensor])
        sending.wait()
        assert found[0].tolist() == [(rank() - 1) % size()] * 3

    def test_asynchronous_call_does_not_wait_for_the_way_back(self) -> None:
        tensor = torch.ones(3)
        with on_gpu() as simulated, current_stream(simulated):
            simulated.hold_copies(to_device=True)
            work = all_reduce(tensor)
            work.wait()
            assert not work.is_completed()
            simulated.release()
            while not work.is_completed():
                time.sleep(0.001)
            assert work.is_success()
            assert tensor.tolist() == [size()] * 3

    def test_complete_only_when_the_result_is_there(self) -> None:
        """A poll that says so is enough, without a wait."""
        tensor = torch.full((3,), float(rank()))
        with on_gpu(SLOW) as simulated, current_stream(simulated):
            work = all_reduce(tensor)
            while not work.is_completed():
                time.sleep(0)
            assert tensor.tolist() == [summed(0)] * 3

    def test_other_streams_wait_too(self) -> None:
        """Each stream that is current at a wait comes behind the result."""
        tensor = torch.full((3,), float(rank()))
        with on_gpu(SLOW) as simulated:
            with current_stream(simulated):
                work = all_reduce(tensor)
            for _ in range(2):
                with current_stream(simulated) as stream:
                    work.wait()
                    found = consume(simulated, stream, [tensor])
                assert found[0].tolist() == [summed(0)] * 3

    def test_barrier_waits_for_the_stream_of_its_device(self) -> None:
        with on_gpu() as simulated, current_stream(simulated) as stream:
            simulated.sleep(stream.address, 0.05)
            event = copier_of(CPU).mark(stream.address)
            gpu_tensors.wait_for_stream(group(), "barrier", CPU)
            assert event.query()

    def test_comes_back_by_itself(self) -> None:
        """Nobody waits, and nobody keeps the Work: the tensor is written all the same."""
        tensor = torch.full((3,), float(rank()))
        with on_gpu(SLOW) as simulated, current_stream(simulated):
            all_reduce(tensor)
            dist.barrier()
            end = time.monotonic() + 20
            while tensor[0] != summed(0) and time.monotonic() < end:
                group().under_way.sweep()
                time.sleep(0.001)
            assert tensor.tolist() == [summed(0)] * 3


class TestTensors:
    @pytest.mark.parametrize("dtype", EVERY, ids=name_of)
    def test_every_dtype_moves(self, dtype: torch.dtype) -> None:
        with on_gpu():
            tensor = make(dtype, rank())
            options = dist.BroadcastOptions()
            options.rootRank = size() - 1
            group().broadcast([tensor], options).wait()
        assert_same_bits(tensor, make(dtype, size() - 1))

    @pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
    def test_layouts(self, later: bool) -> None:
        whole = make(torch.float32, rank(), 60)
        transposed, stepped = whole.clone().view(6, 10).t(), whole.clone()[1::2]
        conjugated = make(torch.complex64, rank()).conj()
        tensors = [transposed, stepped, conjugated, torch.ones(()), torch.ones(3, 0)]
        expected = [tensor.clone() for tensor in tensors]
        for tensor in expected:
            group().allreduce([tensor]).wait()
        with on_gpu(SLOW):
            for tensor in tensors:
                options = dist.AllreduceOptions()
                options.asyncOp = later
                group().allreduce([tensor], options).wait()
        assert transposed.stride() == (1, 10)
        for tensor, value in zip(tensors, expected, strict=True):
            assert torch.equal(tensor, value)

    def test_parameter(self) -> None:
        parameter = torch.nn.Parameter(torch.full((5,), float(rank())))
        with on_gpu():
            dist.broadcast(parameter, src=0)
        assert parameter.is_leaf
        assert parameter.tolist() == [0.0] * 5

    def test_input_that_is_a_part_of_the_output(self) -> None:
        output = torch.zeros(2 * size())
        own = output[2 * rank() : 2 * rank() + 2]
        with on_gpu(), torch.no_grad():
            own.fill_(rank())
            torch_versions.all_gather_single(output, own)
        assert output.tolist() == [float(seed) for seed in range(size()) for _ in range(2)]

    def test_tensor_that_is_given_twice(self) -> None:
        value = torch.full((2,), float(rank()))
        output = torch.empty(2)
        with on_gpu() as simulated:
            copied = simulated.counts.copies_to_host
            dist.reduce_scatter(output, [value] * size())
            assert simulated.counts.copies_to_host - copied == 1
        assert output.tolist() == [summed(0)] * 2

    def test_sparse(self) -> None:
        tensor = torch.eye(4).to_sparse() * (rank() + 1)
        with on_gpu():
            dist.all_reduce(tensor)
        assert torch.equal(tensor.to_dense(), torch.eye(4) * summed(1))

    def test_factor_of_a_premultiplied_sum(self) -> None:
        tensor = torch.ones(3)
        with on_gpu():
            dist.all_reduce(tensor, dist._make_nccl_premul_sum(torch.tensor([0.5])))
        assert tensor.tolist() == [0.5 * size()] * 3

    def test_devices_may_differ_over_the_ranks(self) -> None:
        tensor = torch.ones(3)
        with on_gpu() if rank() == 0 else contextlib.nullcontext():
            dist.all_reduce(tensor)
        assert tensor.tolist() == [size()] * 3

    @pytest.mark.parametrize("first", ["cpu", "meta"])
    @pytest.mark.parametrize("simulated", [False, True], ids=["host", "gpu"])
    def test_several_devices_in_one_call_are_refused(self, first: str, simulated: bool) -> None:
        tensors = [torch.ones(1, device=first), torch.ones(1), torch.ones(1, device="meta")]
        with (
            on_gpu() if simulated else contextlib.nullcontext(),
            pytest.raises(ValueError, match=r"(?s)on one device.*(cpu.*meta|meta.*CPU)"),
        ):
            group().allreduce(tensors)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)  # nothing is left under way
        assert tensor.item() == size()

    def test_device_without_a_runtime_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"on the CPU and on GPUs .* not on meta"):
            dist.all_reduce(torch.ones(1, device="meta"))

    def test_objects(self) -> None:
        everyone: list[Any] = [None] * size()
        with on_gpu(SLOW):
            dist.all_gather_object(everyone, {"rank": rank()})
            objects = [rank()]
            dist.broadcast_object_list(objects, src=size() - 1)
        assert [each["rank"] for each in everyone] == list(range(size()))
        assert objects == [size() - 1]


class TestFutures:
    def test_value_is_there_for_who_waits(self) -> None:
        tensor = torch.full((3,), float(rank()))
        with on_gpu(SLOW) as simulated, current_stream(simulated) as stream:
            future = all_reduce(tensor).get_future()
            value = future.wait()[0]
            found = consume(simulated, stream, [value])
        assert value.data_ptr() == tensor.data_ptr()
        assert found[0].tolist() == [summed(0)] * 3

    def test_value_of_an_all_gather_is_of_the_results(self) -> None:
        gathered = [torch.empty(2) for _ in range(size())]
        with on_gpu(SLOW) as simulated, current_stream(simulated):
            work = dist.all_gather(gathered, torch.full((2,), float(rank())), async_op=True)
            value = work.get_future().wait()
        assert value[0].tolist() == [[float(seed)] * 2 for seed in range(size())]

    def test_continuations(self) -> None:
        seen = []
        with on_gpu(SLOW) as simulated, current_stream(simulated):
            future = all_reduce(torch.full((3,), float(rank()))).get_future()
            future.add_done_callback(lambda done: seen.append(done.value()[0].clone()))
            doubled = future.then(lambda done: done.value()[0] * 2).wait()
        assert seen[0].tolist() == [summed(0)] * 3
        assert doubled.tolist() == [2 * summed(0)] * 3

    @pytest.mark.essential
    def test_completed_for_waiters_in_cpp(self) -> None:
        tensors = [torch.full((3,), float(index)) for index in range(5)]
        with on_gpu(SLOW) as simulated, current_stream(simulated):
            futures = [all_reduce(tensor).get_future() for tensor in tensors]
            torch._C._collect_all(futures).wait()
            assert [tensor[0].item() for tensor in tensors] == [i * size() for i in range(5)]

    @pytest.mark.essential
    def test_of_functional_collectives(self) -> None:
        """Waiting there calls the Work's wait, on the stream that is current there."""
        import torch.distributed._functional_collectives as functional

        with on_gpu(SLOW) as simulated, current_stream(simulated) as stream:
            tensor = torch.ops._c10d_functional.all_reduce(
                torch.full((3,), float(rank())), "sum", group().group_name
            )
            tensor = functional.wait_tensor(tensor)
            found = consume(simulated, stream, [tensor])
        assert found[0].tolist() == [summed(0)] * 3


class TestErrors:
    def test_copy_to_the_host(self) -> None:
        with on_gpu() as simulated:
            with (
                simulated.failing("MemcpyAsync"),
                pytest.raises(GpuError, match=rf"MemcpyAsync failed on .*rank {rank()}"),
            ):
                dist.all_reduce(torch.ones(3))
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [size()] * 3

    def test_copy_back(self) -> None:
        with on_gpu() as simulated:
            with (
                simulated.failing("MemcpyAsync", after=1),
                pytest.raises(GpuError, match="MemcpyAsync failed on"),
            ):
                dist.all_reduce(torch.ones(3))
            with simulated.failing("MemcpyAsync", after=1):
                work = all_reduce(torch.ones(3))
                with pytest.raises(GpuError, match="MemcpyAsync failed on"):
                    work.wait()
                assert work.is_completed()
                assert not work.is_success()
                assert isinstance(work.exception(), GpuError)
                with pytest.raises(RuntimeError, match="MemcpyAsync failed on"):
                    work.get_future().wait()
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [size()] * 3

    def test_stream_that_does_not_come_to_it(self) -> None:
        """Meanwhile it looks at others, where no thread does."""
        part = dist.new_group(timeout=timedelta(seconds=0.1))
        looks: list[bool] = []
        with on_gpu() as simulated, current_stream(simulated) as stream:
            simulated.hold(stream.address)
            look_while_waiting(lambda: looks.append(True))
            try:
                with pytest.raises(
                    RuntimeError, match=r"all_reduce .* has waited 0\.1 s for what the current str"
                ):
                    all_reduce(torch.ones(3), part)
            finally:
                look_while_waiting(None)
                simulated.release()
        assert looks
        dist.barrier()
        dist.destroy_process_group(part)

    def test_other_ranks_that_do_not_come(self) -> None:
        part = dist.new_group(timeout=timedelta(seconds=0.2))
        with on_gpu():
            if rank() == 0:
                with pytest.raises(RuntimeError, match=r"has waited 0\.2 s for other ranks"):
                    all_reduce(torch.ones(3), part).wait()
            dist.barrier()
            with pytest.raises(
                RuntimeError, match=r"group is broken: all_reduce on rank 0 has wai"
            ):
                dist.all_reduce(torch.ones(3), group=part)
        dist.barrier()

    def test_calls_that_differ(self) -> None:
        """What TORCH_DISTRIBUTED_DEBUG=DETAIL compares, tensors on a GPU or not."""
        part = dist.new_group()
        part._checked = True
        with on_gpu():
            tensor = torch.ones(3)
            dist.all_reduce(tensor, group=part)
            assert tensor.tolist() == [size()] * 3
            with pytest.raises(RuntimeError, match=r"called all_reduce.*Nothing was sent"):
                dist.all_reduce(torch.ones(3 + (rank() == 0)), group=part)
        dist.destroy_process_group(part)


class TestMemory:
    def test_lives_until_the_copy_is_over_and_no_longer(self) -> None:
        with on_gpu() as simulated, current_stream(simulated):
            tensor = torch.ones(3)
            alive = weakref.ref(tensor)
            simulated.hold_copies(to_device=True)
            work = all_reduce(tensor)
            while work._operation is not None:
                work.wait_for_end()
            del tensor, work
            group().under_way.sweep()
            gc.collect()
            assert alive() is not None  # the copy back is under way
            simulated.release()
            while simulated.busy:
                time.sleep(0.001)
            copier_of(CPU).let_go()
            assert alive() is None

    def test_is_the_callers_after_a_wait(self) -> None:
        """As with any work of torch's: what comes later on the stream may use the memory."""
        memory = torch.ones(3)  # the CPU's allocator, unlike a GPU's, knows no streams
        with on_gpu(delay=0.1) as simulated, current_stream(simulated):
            tensor = memory[:]
            alive = weakref.ref(tensor)
            work = all_reduce(tensor)
            work.wait()
            del tensor, work
            group().under_way.sweep()
            gc.collect()
            assert alive() is None

    def test_nothing_piles_up(self) -> None:
        with on_gpu() as simulated:
            dist.all_reduce(torch.ones(3))
            before = simulated.counts
            for _ in range(50):
                all_reduce(torch.ones(3)).wait()
                dist.all_reduce(torch.ones(3))
            group().under_way.sweep()
            gc.collect()
            after = simulated.counts
            assert after.streams == before.streams
            assert after.events < before.events + 20
            assert len(copier_of(CPU)._kept) < 4


class TestState:
    def test_is_rank_0s(self) -> None:
        """Produced by a slow kernel there, found by a kernel everywhere."""
        values = [make(torch.float32, rank(), 50), make(torch.int64, rank()).view(-1, 1)]
        with on_gpu(SLOW) as simulated:
            group().broadcast_state([torch.ones(200)])  # makes the shared memory
            with current_stream(simulated) as stream:
                tensors = produce(simulated, stream, values)
                assert group().broadcast_state(tensors)
                found = consume(simulated, stream, tensors)
        assert_same_bits(found[0], make(torch.float32, 0, 50))
        assert_same_bits(found[1], make(torch.int64, 0).view(-1, 1))

    def test_what_is_equal_is_not_touched(self) -> None:
        """Autograd may have saved it: a new version would be an error in backward."""
        equal, other = torch.ones(5), torch.full((5, 2), float(rank())).t()
        versions = equal._version, other._version
        with on_gpu() as simulated:
            copied = simulated.counts.copies_to_device
            assert group().broadcast_state([equal, other])
            assert simulated.counts.copies_to_device == copied
        assert equal._version == versions[0]
        assert (other._version > versions[1]) == (rank() > 0)
        assert other.eq(0).all()

    def test_of_a_module(self) -> None:
        from mpiddp import DistributedDataParallel

        torch.manual_seed(rank())
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        with on_gpu() as simulated:
            copied = simulated.counts.copies_to_host
            DistributedDataParallel(module)
            assert simulated.counts.copies_to_host > copied
        sums = [float(tensor.double().sum()) for tensor in module.state_dict().values()]
        assert group().allgather_objects(sums) == [sums] * size()


class TestGroup:
    @pytest.mark.essential
    def test_is_its_own_backend_for_every_device(self) -> None:
        cuda = torch.device("cuda")
        assert group()._get_backend(cuda) is group()
        assert torch.device("cpu") in group()._device_types
        assert (cuda in group()._device_types) == torch.cuda.is_available()
        assert not group().supports_tensor_alloc(cuda)
        assert "cuda" in dist.Backend.backend_capability["mpiddp"]

    def test_with_a_device_bound_to_the_world(self) -> None:
        """As init_process_group(device_id=...) binds it: groups and barriers look at it."""
        group().bound_device_id = torch.device("cuda", 0)
        try:
            part = dist.new_group()
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=part)
            assert tensor.item() == size()
            if not torch.backends.cuda.is_built():  # else torch asks the driver
                dist.barrier()
            dist.destroy_process_group(part)
        finally:
            group().bound_device_id = None

    # torch 2.11 says so at any profile.
    @pytest.mark.essential
    @pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
    def test_profiler_shows_names(self) -> None:
        with on_gpu(), torch.profiler.profile() as profiler:
            dist.all_reduce(torch.ones(3))
            all_reduce(torch.ones(3)).wait()
        events = [event.name for event in profiler.events() if event.name == "mpiddp:all_reduce"]
        assert len(events) == 2
