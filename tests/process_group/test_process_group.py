"""The process group's other collectives, its Work, its groups and its time limit."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_versions
from group_data import (
    EIGHT_BIT_FLOATS,
    EVERY,
    assert_same_bits,
    group,
    make,
    name_of,
    rank,
    size,
)

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.sizes,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


class TestBroadcast:
    @pytest.mark.essential(keep=3)
    @pytest.mark.smoke(keep=1)
    @pytest.mark.parametrize("dtype", EVERY, ids=name_of)
    def test_every_root_and_dtype(self, dtype: torch.dtype) -> None:
        for root in range(size()):
            tensor = make(dtype, rank())
            dist.broadcast(tensor, src=root)
            assert_same_bits(tensor, make(dtype, root))
            # torch turns complex and 8-bit tensors into others; the group takes them itself, too.
            tensor = make(dtype, rank())
            options = dist.BroadcastOptions()
            options.rootRank = root
            group().broadcast([tensor], options).wait()
            assert_same_bits(tensor, make(dtype, root))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e5m2], ids=name_of)
    def test_layouts(self, dtype: torch.dtype) -> None:
        root = size() - 1
        transposed = make(dtype, rank(), 60).view(6, 10).t()
        dist.broadcast(transposed, src=root)
        assert transposed.stride() == (1, 10)
        assert_same_bits(transposed, make(dtype, root, 60).view(6, 10).t())

        images = (
            make(dtype, rank(), 120).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
        )
        dist.broadcast(images, src=root)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert_same_bits(images, make(dtype, root, 120).view(2, 3, 4, 5))

        whole = make(dtype, rank(), 60)
        dist.broadcast(whole[::2], src=root)
        assert_same_bits(whole[::2], make(dtype, root, 60)[::2])
        assert_same_bits(whole[1::2], make(dtype, rank(), 60)[1::2])

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
    def test_small_shapes(self, shape: tuple[int, ...]) -> None:
        tensor = torch.full(shape, float(rank()))
        dist.broadcast(tensor, src=size() - 1)
        assert_same_bits(tensor, torch.full(shape, float(size() - 1)))

    def test_conjugated_and_negated(self) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = size() - 1
        conjugated = make(torch.complex64, rank()).conj()
        group().broadcast([conjugated], options).wait()
        assert_same_bits(conjugated, make(torch.complex64, size() - 1).conj())
        negated = make(torch.complex64, rank()).conj().imag
        assert negated.is_neg()
        dist.broadcast(negated, src=size() - 1)
        assert_same_bits(negated, make(torch.complex64, size() - 1).conj().imag)

    def test_parameter(self) -> None:
        parameter = torch.nn.Parameter(torch.full((5,), float(rank())))
        dist.broadcast(parameter, src=0)
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert_same_bits(parameter.detach(), torch.zeros(5))

    def test_several_tensors(self) -> None:
        tensors = [make(torch.float32, rank()), make(torch.int64, rank())]
        group().broadcast(tensors, dist.BroadcastOptions()).wait()
        assert_same_bits(tensors[0], make(torch.float32, 0))
        assert_same_bits(tensors[1], make(torch.int64, 0))


class TestAllGather:
    @pytest.mark.essential(keep=3)
    @pytest.mark.parametrize("dtype", EVERY, ids=name_of)
    def test_lists_of_every_dtype(self, dtype: torch.dtype) -> None:
        source = make(dtype, rank())
        output = [torch.empty_like(source) for _ in range(size())]
        group().allgather([output], [source]).wait()
        for seed, part in enumerate(output):
            assert_same_bits(part, make(dtype, seed))
        if dtype not in EIGHT_BIT_FLOATS:
            output = [torch.empty_like(source) for _ in range(size())]
            dist.all_gather(output, source)
            for seed, part in enumerate(output):
                assert_same_bits(part, make(dtype, seed))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.bool], ids=name_of)
    def test_sizes_that_differ(self, dtype: torch.dtype) -> None:
        # None from rank 0, then one more from each.
        output = [torch.empty(seed, 3, dtype=dtype) for seed in range(size())]
        dist.all_gather(output, make(dtype, rank(), 3 * rank()).view(-1, 3))
        for seed, part in enumerate(output):
            assert_same_bits(part, make(dtype, seed, 3 * seed).view(-1, 3))

    def test_layouts(self) -> None:
        output = [torch.empty(6, 10).t() for _ in range(size())]
        dist.all_gather(output, make(torch.float32, rank(), 60).view(10, 6))
        for seed, part in enumerate(output):
            assert part.stride() == (1, 10)
            assert_same_bits(part, make(torch.float32, seed, 60).view(10, 6))
        dist.all_gather(output, make(torch.float32, rank(), 60).view(6, 10).t())
        for seed, part in enumerate(output):
            assert_same_bits(part, make(torch.float32, seed, 60).view(6, 10).t())

    @pytest.mark.essential(keep=1)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=name_of)
    def test_single_tensor(self, dtype: torch.dtype) -> None:
        expected = torch.cat([make(dtype, seed, 6) for seed in range(size())])
        for shape, own in (((size() * 6,), (6,)), ((size(), 6), (6,)), ((size() * 2, 3), (2, 3))):
            output = torch.empty(shape, dtype=dtype)
            torch_versions.all_gather_single(output, make(dtype, rank(), 6).view(own))
            assert_same_bits(output, expected.view(shape))

    @pytest.mark.essential
    @pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.* is deprecated")
    def test_into_tensor(self) -> None:
        output = torch.empty(size(), 2, dtype=torch.int64)
        dist.all_gather_into_tensor(output, torch.tensor([rank(), 7]))
        assert output.tolist() == [[seed, 7] for seed in range(size())]

    def test_single_tensor_that_is_not_contiguous(self) -> None:
        output = torch.zeros(3, 2 * size()).t()[::2]
        group().all_gather_single(output, make(torch.float32, rank(), 3)).wait()
        expected = [make(torch.float32, seed, 3) for seed in range(size())]
        assert_same_bits(output, torch.stack(expected))

    def test_wrong_number_of_outputs(self) -> None:
        output = [torch.empty(1) for _ in range(size() + 1)]
        with pytest.raises(ValueError, match=rf"{size()} output tensors, .*not {size() + 1}"):
            dist.all_gather(output, torch.ones(1))
        with pytest.raises(ValueError, match=rf"needs .* of {2 * size()} elements, not 9"):
            torch_versions.all_gather_single(torch.empty(9), torch.ones(2))

    def test_own_output_of_another_size(self) -> None:
        output = [torch.full((3,), -1.0) for _ in range(size())]
        with pytest.raises(ValueError, match="3"):
            dist.all_gather(output, torch.ones(1))

    def test_output_of_another_dtype(self) -> None:
        with pytest.raises((TypeError, ValueError), match="float64"):
            group().all_gather_single(torch.zeros(size(), dtype=torch.float64), torch.ones(1))

    @pytest.mark.smoke
    def test_objects(self) -> None:
        everyone: list[Any] = [None] * size()
        dist.all_gather_object(everyone, {"rank": rank(), "text": "x" * 10 ** (rank() + 1)})
        assert [entry["rank"] for entry in everyone] == list(range(size()))
        assert [len(entry["text"]) for entry in everyone] == [10 ** (r + 1) for r in range(size())]
        assert group().allgather_objects(rank()) == list(range(size()))

    def test_objects_to_one_rank_and_from_one(self) -> None:
        for root in range(size()):
            everyone: list[Any] = [None] * size()
            dist.gather_object({"rank": rank()}, everyone if rank() == root else None, dst=root)
            if rank() == root:
                assert everyone == [{"rank": seed} for seed in range(size())]
            received: list[Any] = [None]
            dist.scatter_object_list(received, ["x" * seed for seed in range(size())], src=root)
            assert received == ["x" * rank()]

    def test_broadcast_objects(self) -> None:
        for root in range(size()):
            objects: list[Any] = [rank(), {"from": rank()}, "x" * 1000 * rank()]
            dist.broadcast_object_list(objects, src=root)
            assert objects == [root, {"from": root}, "x" * 1000 * root]


class TestBarrier:
    @pytest.mark.essential
    def test_nobody_leaves_before_the_last_one_came(self) -> None:
        dist.barrier()
        if rank() == size() - 1:
            time.sleep(0.3)
        came = time.monotonic()  # the same clock for all processes of a machine
        dist.barrier()
        left = time.monotonic()
        times = group().allgather_objects((came, left))
        assert min(left for _, left in times) >= max(came for came, _ in times)


class TestWork:
    def started(self) -> dict[str, tuple[Any, Any]]:
        """Return each collective's Work and what its future must hold."""
        summed, copied = torch.ones(3), torch.full((3,), float(rank()))
        gathered = [torch.empty(1) for _ in range(size())]
        single = torch.empty(size())
        return {
            "all_reduce": (dist.all_reduce(summed, async_op=True), [summed]),
            "broadcast": (dist.broadcast(copied, src=0, async_op=True), [copied]),
            # One tensor of all ranks', as with NCCL.
            "all_gather": (
                dist.all_gather(gathered, torch.ones(1), async_op=True),
                [torch.ones(size(), 1)],
            ),
            "all_gather_single": (
                torch_versions.all_gather_single(single, torch.ones(1), async_op=True),
                [single],
            ),
            "barrier": (dist.barrier(async_op=True), []),
        }

    @pytest.mark.essential
    def test_is_work(self) -> None:
        for name, (work, result) in self.started().items():
            assert isinstance(work, dist.Work), name
            assert work.wait(), name
            assert work.is_completed(), name
            assert work.get_future().done(), name
            value = work.get_future().value()
            assert len(value) == len(result), name
            for got, expected in zip(value, result, strict=True):
                if name == "all_gather":
                    assert torch.equal(got, expected)
                else:
                    assert got.data_ptr() == expected.data_ptr(), name

    @pytest.mark.smoke
    def test_future_runs_what_is_chained_to_it(self) -> None:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        halved = work.get_future().then(lambda future: future.value()[0] / size())
        assert torch.equal(halved.wait(), torch.ones(3))

    def test_result_is_there_after_wait(self) -> None:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, async_op=True).wait()
        assert torch.equal(tensor, torch.full((3,), float(size())))


class TestGroups:
    @pytest.mark.smoke
    def test_default_group_has_torch_names(self) -> None:
        assert dist.get_backend() == "mpiddp"
        assert group().getBackendName() == "mpiddp"
        assert group().group_name
        assert dist.get_process_group_ranks(group()) == list(range(size()))

    @pytest.mark.essential(keep=2)
    @pytest.mark.smoke(keep=1)
    @pytest.mark.parametrize(
        "ranks",
        [
            pytest.param(lambda n: [0], id="first"),
            pytest.param(lambda n: [n - 1], id="last"),
            pytest.param(lambda n: [0, 1], id="two"),
            pytest.param(lambda n: list(range(0, n, 2)), id="even"),
            pytest.param(lambda n: list(range(1, n)), id="all-but-first"),
            pytest.param(lambda n: list(range(n)), id="all"),
        ],
    )
    @pytest.mark.mpi(min_size=2)
    def test_subset(self, ranks: Callable[[int], list[int]]) -> None:
        members = ranks(size())
        part = dist.new_group(members)
        if rank() not in members:
            assert part is dist.GroupMember.NON_GROUP_MEMBER
            assert dist.get_rank(part) == -1
        else:
            assert dist.get_rank(part) == members.index(rank())
            assert dist.get_world_size(part) == len(members)
            tensor = torch.tensor([float(rank())])
            dist.all_reduce(tensor, group=part)
            assert tensor.item() == sum(members)
            copied = torch.tensor([float(rank())])
            dist.broadcast(copied, src=members[-1], group=part)  # a rank of the world
            assert copied.item() == members[-1]
            dist.broadcast(copied, group_src=0, group=part)
            assert copied.item() == members[-1]
            everyone: list[Any] = [None] * len(members)
            dist.all_gather_object(everyone, rank(), group=part)
            assert everyone == members
            dist.destroy_process_group(part)
        dist.barrier()

    @pytest.mark.mpi(min_size=3)
    def test_subset_made_by_its_members_alone(self) -> None:
        members = [1, 2]
        if rank() in members:
            part = dist.new_group(members, use_local_synchronization=True)
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=part)
            assert tensor.item() == 2
            dist.destroy_process_group(part)
        dist.barrier()

    def test_many_groups_made_and_destroyed(self) -> None:
        from mpi4py import MPI

        for index in range(50):
            part = dist.new_group()
            tensor = torch.full((1,), float(index))
            dist.all_reduce(tensor, group=part)
            assert tensor.item() == index * size()
            communicator = part.communicator
            dist.destroy_process_group(part)
            assert communicator == MPI.COMM_NULL  # freed

    @pytest.mark.essential
    def test_gloo_group(self, gloo: Any) -> None:
        tensor = torch.tensor([float(rank())])
        dist.all_reduce(tensor, group=gloo)
        assert tensor.item() == sum(range(size()))
        everyone: list[Any] = [None] * size()
        dist.all_gather_object(everyone, rank(), group=gloo)
        assert everyone == list(range(size()))
        last = dist.new_group([size() - 1], backend="gloo")
        if rank() == size() - 1:
            dist.all_reduce(tensor, group=last)
            assert tensor.item() == sum(range(size()))
            dist.destroy_process_group(last)

    @pytest.mark.smoke
    def test_store_is_shared(self) -> None:
        store = group().get_group_store()
        store.set(f"of rank {rank()}", str(rank()))
        for other in range(size()):
            assert store.get(f"of rank {other}") == str(other).encode()
        dist.barrier()


def several_times(call: Callable[[], None]) -> None:
    """Make a call until it raises: a gather, for one, does not wait for its root."""
    for _ in range(50):
        call()
        time.sleep(0.02)


class TestGatherAndScatter:
    @pytest.mark.essential(keep=2)
    @pytest.mark.parametrize("dtype", EVERY, ids=name_of)
    def test_every_root_and_dtype(self, dtype: torch.dtype) -> None:
        for root in range(size()):
            own = make(dtype, rank())
            gathering = dist.GatherOptions()
            gathering.rootRank = root
            output = [torch.empty_like(own) for _ in range(size() if rank() == root else 0)]
            group().gather([output] if output else [], [own], gathering).wait()
            for seed, part in enumerate(output):
                assert_same_bits(part, make(dtype, seed))
            scattering = dist.ScatterOptions()
            scattering.rootRank = root
            back = torch.empty_like(own)
            group().scatter([back], [output] if output else [], scattering).wait()
            assert_same_bits(back, own)

    def test_layouts_and_sizes(self) -> None:
        root = size() - 1
        output = [torch.empty(4, 3).t() for _ in range(size())]
        own = make(torch.float32, rank(), 12).view(3, 4)
        dist.gather(own, output if rank() == root else None, dst=root)
        if rank() == root:
            for seed, part in enumerate(output):
                assert_same_bits(part, make(torch.float32, seed, 12).view(3, 4))
        back = torch.zeros(3, 8)[:, ::2]
        dist.scatter(back, output if rank() == root else None, src=root)
        assert_same_bits(back, make(torch.float32, rank(), 12).view(3, 4))
        options = dist.ScatterOptions()
        grown = torch.empty(rank())
        parts = [make(torch.float32, seed, seed) for seed in range(size())]
        group().scatter([grown], [parts] if rank() == 0 else [], options).wait()
        assert_same_bits(grown, parts[rank()])

    @pytest.mark.thorough(keep=1)
    @pytest.mark.essential
    @pytest.mark.parametrize("name", ["gather", "scatter"])
    def test_wrong_number(self, name: str) -> None:
        """The root has sent nothing; what it calls next must not meet what others call now."""
        part: Any = dist.new_group()
        own = torch.ones(1)

        def call(tensors: int) -> None:
            several = [torch.ones(1) for _ in range(tensors)] if rank() == 0 else None
            if name == "gather":
                dist.gather(own, several, group=part)
            else:
                dist.scatter(own, several, group=part)

        if rank() == 0:
            with pytest.raises(ValueError, match=rf"needs {size()} .*, .* {size() + 1}"):
                call(size() + 1)
        if size() > 1:
            with pytest.raises(RuntimeError, match=r"group is broken"):
                several_times(lambda: call(size()))
        dist.destroy_process_group(part)

    def test_what_all_ranks_are_refused(self) -> None:
        """Ranks that have all been refused are at the same place."""
        for _ in range(2):
            with pytest.raises(TypeError):
                dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size()] * 2


@pytest.mark.mpi(min_size=2)
class TestTimeout:
    @pytest.mark.essential
    @pytest.mark.parametrize("name", ["all_reduce", "barrier"])
    def test_rank_that_comes_late(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from mpiddp.watch import roll_call

        monkeypatch.setattr(roll_call, "_PERIOD", 0.03)
        part: Any = dist.new_group(timeout=timedelta(seconds=0.4))

        def call() -> None:
            if name == "barrier":
                dist.barrier(group=part)
            else:
                dist.all_reduce(torch.ones(1), group=part)

        dist.barrier()
        began = time.monotonic()
        if rank() == size() - 1:
            dist.barrier()  # the others have given up waiting
            # It must not meet what they do next.
            with pytest.raises(RuntimeError, match=rf"group is broken: {name} on rank"):
                call()
        else:
            with pytest.raises(RuntimeError, match=rf"rank {rank()} of {size()}: {name} .*0\.4 s"):
                call()
            assert time.monotonic() - began > 0.4
            dist.barrier()
            with pytest.raises(RuntimeError, match="group is broken"):
                call()
        dist.barrier()
        assert group().allgather_objects(rank()) == list(range(size()))

    def test_set_timeout(self) -> None:
        part = dist.new_group(timeout=timedelta(seconds=50))
        part.set_timeout(timedelta(seconds=0.3))
        assert part.timeout == timedelta(seconds=0.3)
        dist.destroy_process_group(part)

    def test_torchs_functions_set_it(self) -> None:
        """Torch 2.14 has set_timeout; the older name had effect on Gloo and NCCL only."""
        part = dist.new_group(timeout=timedelta(seconds=50))
        if hasattr(dist, "set_timeout"):
            dist.set_timeout(timedelta(seconds=3), part)
        else:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), part)
        assert part.timeout == timedelta(seconds=3)
        assert dist.all_reduce(torch.ones(1), group=part, async_op=True).wait()
        dist.destroy_process_group(part)


class TestSharedMemory:
    """Inputs that are a part of the output, or the other way round, as NCCL allows."""

    @pytest.mark.essential
    def test_all_gather(self) -> None:
        output = torch.zeros(size(), 3)
        output[rank()] = float(rank())
        torch_versions.all_gather_single(output, output[rank()])
        assert output[:, 0].tolist() == list(range(size()))
        parts = [torch.full((3,), float(rank())) for _ in range(size())]
        dist.all_gather(parts, parts[rank()])
        assert [part[0].item() for part in parts] == list(range(size()))

    def test_reduce_scatter(self) -> None:
        whole = torch.arange(2.0 * size())
        torch_versions.reduce_scatter_single(whole[2 * rank() : 2 * rank() + 2], whole)
        expected = size() * torch.arange(2.0 * size())[2 * rank() : 2 * rank() + 2]
        assert_same_bits(whole[2 * rank() : 2 * rank() + 2], expected)

    def test_all_to_all(self) -> None:
        whole = torch.arange(1.0 * size()) + 10 * rank()
        dist.all_to_all_single(whole, whole)
        assert whole.tolist() == [rank() + 10 * source for source in range(size())]
        splits = [1] * size()
        dist.all_to_all_single(whole, whole, splits, splits)
        assert whole.tolist() == [source + 10 * rank() for source in range(size())]
        parts = list(whole.clone().split(1))
        dist.all_to_all(parts, parts)
        assert [part.item() for part in parts] == [rank() + 10 * s for s in range(size())]

    def test_gather_and_scatter(self) -> None:
        parts = [torch.full((2,), float(rank())) for _ in range(size())]
        dist.gather(parts[rank()], parts if rank() == 0 else None, dst=0)
        if rank() == 0:
            assert [part[0].item() for part in parts] == list(range(size()))
        dist.scatter(parts[rank()], parts if rank() == 0 else None, src=0)
        assert parts[rank()].tolist() == [rank()] * 2


# torch 2.11 says so at any profile.
@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
def test_profiler_sees_operations() -> None:
    """Under names like Gloo's "gloo:all_reduce"."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(3), 0, async_op=True).wait()
    names = {event.key for event in profile.key_averages()}
    assert {"mpiddp:all_reduce", "mpiddp:broadcast"} <= names


class TestShorterCalls:
    """torch's own Python calls groups with one tensor and single options, as C++ lets it."""

    def group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    @pytest.mark.smoke
    def test_reductions(self) -> None:
        ranks, last = size() * (size() - 1) / 2, size() - 1
        tensor = torch.full((2, 3), float(rank()))
        self.group().allreduce(tensor).wait()
        assert (tensor == ranks).all()
        for call in (
            lambda given: self.group().allreduce(given, dist.ReduceOp.MAX),
            lambda given: self.group().allreduce([given], op=dist.ReduceOp.MAX),
            lambda given: self.group().allreduce(given, dist.ReduceOp.MAX, timedelta(seconds=20)),
        ):
            tensor = torch.full((2, 3), float(rank()))
            call(tensor).wait()
            assert (tensor == last).all()
        tensor = torch.full((2,), float(rank()))
        self.group().reduce(tensor, last).wait()
        assert tensor[0] == (ranks if rank() == last else rank())
        parts = [torch.full((2,), float(index)) for index in range(size())]
        self.group().reduce_scatter(tensor, parts).wait()
        assert tensor.tolist() == [float(rank() * size())] * 2

    @pytest.mark.smoke
    def test_movement(self) -> None:
        last = size() - 1
        tensor = torch.full((2,), float(rank()))
        self.group().broadcast(tensor, last).wait()
        assert tensor.tolist() == [last] * 2
        own, parts = torch.full((2,), float(rank())), [torch.empty(2) for _ in range(size())]
        self.group().allgather(parts, own).wait()
        assert [part[0].item() for part in parts] == list(range(size()))
        parts = [torch.empty(2) for _ in range(size())] if rank() == last else []
        self.group().gather(parts, own, last).wait()
        assert [part[0].item() for part in parts] == list(range(size() if parts else 0))
        self.group().scatter(tensor, parts, root=last).wait()
        assert tensor.tolist() == [rank()] * 2
        self.group().alltoall(
            [torch.empty(1) for _ in range(size())],
            [torch.ones(1) for _ in range(size())],
            timedelta(seconds=20),
        ).wait()
        self.group().barrier(timeout=timedelta(seconds=20)).wait()
