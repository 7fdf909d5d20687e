"""Collectives of tensors on a real GPU, which the ranks may share, and what torch builds on them.

Not run without a GPU; tests/process_group/test_gpu_tensors.py does the like on a simulated one.
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_calls import Tensors, calls, on_host
from group_data import EVERY, assert_same_bits, group, make, name_of, rank, size
from torch import nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.mpi(min_size=2),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

CYCLES = 20_000_000  # of a kernel that does nothing: about 10 ms


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Return this rank's GPU, the current one meanwhile, with a stream of its own current."""
    with torch.cuda.device(rank() % torch.cuda.device_count()):
        with torch.cuda.stream(torch.cuda.Stream()):
            yield torch.device("cuda", torch.cuda.current_device())
        torch.cuda.synchronize()


def produce(device: torch.device, values: Tensors) -> Tensors:
    """Return tensors that the current stream will fill with values after a slow kernel."""
    tensors = [torch.full_like(value, 77, device=device) for value in values]
    sources = [value.to(device) for value in values]
    torch.cuda._sleep(CYCLES)
    for tensor, source in zip(tensors, sources, strict=True):
        tensor.copy_(source)
    return tensors


def all_reduce(tensor: torch.Tensor) -> Any:
    return dist.all_reduce(tensor, async_op=True)


class TestCollectives:
    @pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
    @pytest.mark.parametrize("name", list(calls()))
    def test_between_a_producer_and_a_consumer(
        self, device: torch.device, name: str, later: bool
    ) -> None:
        call = calls()[name]()
        expected = on_host(call)
        read, room = produce(device, call.read), produce(device, call.room)
        for work in call.run(read, room, later):
            work.wait()
        found = [tensor.clone() for tensor in call.written(read, room)]  # on the current stream
        for got, value in zip(found, expected, strict=True):
            assert_same_bits(got.cpu(), value)

    @pytest.mark.parametrize("dtype", EVERY, ids=name_of)
    def test_every_dtype_moves(self, device: torch.device, dtype: torch.dtype) -> None:
        tensor = make(dtype, rank()).to(device)
        options = dist.BroadcastOptions()
        options.rootRank = size() - 1
        group().broadcast([tensor], options).wait()
        assert_same_bits(tensor.cpu(), make(dtype, size() - 1))

    @pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
    def test_layouts(self, device: torch.device, later: bool) -> None:
        whole = make(torch.float32, rank(), 60)
        hosts = [
            whole.view(6, 10).t(),
            whole[1::2],
            make(torch.complex64, rank()).conj(),
            torch.ones(()),
            torch.ones(3, 0),
        ]
        options = dist.AllreduceOptions()
        options.asyncOp = later
        for host in hosts:
            tensor = host.to(device)
            if not host.is_contiguous() and not host.is_complex():
                tensor = torch.empty_strided(host.shape, host.stride(), device=device)
                tensor.copy_(host)
            expected = host.clone()
            group().allreduce([expected]).wait()
            group().allreduce([tensor], options).wait()
            assert torch.equal(tensor.cpu(), expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=name_of)
    def test_like_gloo_on_the_gpu(
        self, device: torch.device, gloo: Any, dtype: torch.dtype
    ) -> None:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            ours, theirs = make(dtype, rank()).to(device), make(dtype, rank()).to(device)
            dist.all_reduce(ours, op)
            dist.all_reduce(theirs, op, group=gloo)
            assert_same_bits(ours.cpu(), theirs.cpu())
        dist.broadcast(ours, size() - 1)
        dist.broadcast(theirs, size() - 1, group=gloo)
        assert_same_bits(ours.cpu(), theirs.cpu())

    def test_large(self, device: torch.device) -> None:
        tensor = torch.full((1 << 24,), float(rank()), device=device)
        work = all_reduce(tensor)
        work.wait()
        assert (tensor == sum(range(size()))).all()
        while not work.is_completed():
            pass
        assert work.is_success()

    def test_memory_of_forgotten_tensors_is_not_written_to(self, device: torch.device) -> None:
        """The caching allocator must not give it to others before the copy back is over."""
        works = [all_reduce(torch.ones(1 << 20, device=device)) for _ in range(4)]
        for work in works:
            work.get_future()
        del works, work
        others = [torch.zeros(1 << 20, device=device) for _ in range(8)]
        dist.barrier()
        dist.all_reduce(torch.ones(1, device=device))
        torch.cuda.synchronize()
        assert all(other.eq(0).all() for other in others)

    def test_sparse(self, device: torch.device) -> None:
        tensor = torch.eye(4, device=device).to_sparse() * (rank() + 1)
        dist.all_reduce(tensor)
        assert torch.equal(tensor.to_dense().cpu(), torch.eye(4) * sum(range(1, size() + 1)))

    def test_factor_on_the_gpu(self, device: torch.device) -> None:
        tensor = torch.ones(3, device=device)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(torch.tensor([0.5], device=device)))
        assert tensor.tolist() == [0.5 * size()] * 3

    def test_devices_that_differ_are_refused(self, device: torch.device) -> None:
        for tensors in ([torch.ones(1), torch.ones(1, device=device)], None):
            pair = tensors or [torch.ones(1, device=device), torch.ones(1)]
            with pytest.raises(ValueError, match=r"(?s)on one device.*(cpu.*cuda|cuda.*CPU)"):
                group().allreduce(pair)
        dist.barrier()

    def test_some_ranks_on_the_gpu(self, device: torch.device) -> None:
        tensor = torch.ones(3, device=device if rank() == 0 else "cpu")
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size()] * 3


class TestFutures:
    def test_values(self, device: torch.device) -> None:
        torch.cuda._sleep(CYCLES)
        tensor = torch.full((1 << 20,), float(rank()), device=device)
        value = all_reduce(tensor).get_future().wait()[0]
        assert value.data_ptr() == tensor.data_ptr()
        assert (value + 1)[-1].item() == sum(range(size())) + 1

    def test_continuations(self, device: torch.device) -> None:
        future = all_reduce(torch.full((1 << 20,), float(rank()), device=device)).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2).wait()
        assert (doubled == 2 * sum(range(size()))).all()

    def test_waiters_in_cpp(self, device: torch.device) -> None:
        tensors = [torch.full((1 << 16,), float(index), device=device) for index in range(5)]
        futures = [all_reduce(tensor).get_future() for tensor in tensors]
        torch.futures.collect_all(futures).wait()
        assert all((tensor == index * size()).all() for index, tensor in enumerate(tensors))

    def test_functional_collectives(self, device: torch.device) -> None:
        import torch.distributed._functional_collectives as functional

        tensor = functional.all_reduce(
            torch.full((1 << 20,), float(rank()), device=device), "sum", dist.group.WORLD
        )
        assert (tensor + 0 == sum(range(size()))).all()


class TestGroups:
    def test_devices(self, device: torch.device) -> None:
        assert group()._device_types == [torch.device("cpu"), torch.device("cuda")]
        assert dist.get_backend() == "mpiddp"

    def test_objects(self, device: torch.device) -> None:
        everyone: list[Any] = [None] * size()
        dist.all_gather_object(everyone, {"rank": rank()})
        assert everyone == [{"rank": seed} for seed in range(size())]
        objects = [rank()]
        dist.broadcast_object_list(objects, src=0, device=device)
        assert objects == [0]

    def test_barrier_waits_for_its_device(self, device: torch.device) -> None:
        torch.cuda._sleep(CYCLES)
        event = torch.cuda.Event()
        event.record()
        dist.barrier(device_ids=[device.index])
        assert event.query()

    def test_new_groups(self, device: torch.device) -> None:
        for part in (
            dist.new_group(device_id=device),
            dist.split_group(split_ranks=[list(range(size()))]),
        ):
            tensor = torch.ones(2, device=device)
            dist.all_reduce(tensor, group=part)
            assert tensor.tolist() == [size()] * 2
            dist.destroy_process_group(part)
        dist.monitored_barrier(timeout=timedelta(seconds=20))


class TestUsers:
    """What torch and this package build on the process group."""

    def test_state(self, device: torch.device) -> None:
        values = [make(torch.float32, rank(), 50), make(torch.int64, rank()).view(-1, 1)]
        tensors = produce(device, values)
        versions = [tensor._version for tensor in tensors]
        if group().broadcast_state(tensors):
            assert_same_bits((tensors[0] + 0).cpu(), make(torch.float32, 0, 50))
            assert_same_bits((tensors[1] + 0).cpu(), make(torch.int64, 0).view(-1, 1))
            changed = [tensor._version > old for tensor, old in zip(tensors, versions, strict=True)]
            assert changed == [rank() > 0] * 2

    @pytest.mark.parametrize("ours", [False, True], ids=["torch", "mpiddp"])
    def test_sync_batch_norm(self, device: torch.device, ours: bool) -> None:
        """Either layer does on the GPU what plain normalisation does with the whole batch."""
        from mpiddp import SyncBatchNorm

        whole = torch.randn(2 * size(), 3, 4, generator=torch.Generator().manual_seed(1))
        plain = nn.BatchNorm1d(3)
        expected = plain(whole.clone().requires_grad_())
        layer = (SyncBatchNorm if ours else nn.SyncBatchNorm)(3).to(device)
        own = whole[2 * rank() : 2 * rank() + 2].to(device).requires_grad_()
        output = layer(own)
        torch.testing.assert_close(output.cpu(), expected[2 * rank() : 2 * rank() + 2])
        (output * output.detach().sin()).sum().backward()
        reference = whole.clone().requires_grad_()
        value = nn.BatchNorm1d(3)(reference)
        (value * value.detach().sin()).sum().backward()
        assert own.grad is not None
        assert reference.grad is not None
        torch.testing.assert_close(
            own.grad.cpu(), reference.grad[2 * rank() : 2 * rank() + 2], atol=1e-4, rtol=1e-4
        )
        assert plain.running_var is not None
        assert layer.running_var is not None
        torch.testing.assert_close(layer.running_var.cpu(), plain.running_var)

    def test_torchs_ddp(self, device: torch.device) -> None:
        """The reducer of torch's own wrapper waits for our futures in C++."""
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
        plain = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
        plain.load_state_dict(module.state_dict())
        model = nn.parallel.DistributedDataParallel(module, device_ids=[device.index])
        inputs = torch.randn(size() * 4, 64, device=device)
        dist.broadcast(inputs, 0)
        model(inputs[4 * rank() : 4 * rank() + 4]).mean().backward()
        plain(inputs).mean().backward()
        for got, expected in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad)

    def test_fsdp(self, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(4)
        module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(device)
        plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(device)
        plain.load_state_dict(module.state_dict())
        mesh = init_device_mesh("cuda", (size(),))
        for layer in module:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        inputs = torch.ones(2, 16, device=device)
        for model in (module, plain):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
        for sharded, whole in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(sharded.full_tensor(), whole)  # type: ignore[attr-defined]

    def test_distributed_tensors(self, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cuda", (size(),))
        whole = torch.arange(float(8 * size()), device=device).view(2 * size(), 4)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
        total = (sharded @ sharded.t()).redistribute(mesh, [Replicate()])
        assert torch.equal(total.to_local(), whole @ whole.t())

    def test_zero_redundancy_optimizer(self, device: torch.device) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        torch.manual_seed(5)
        model = nn.Linear(8, 8).to(device)
        plain = nn.Linear(8, 8).to(device)
        plain.load_state_dict(model.state_dict())
        ours = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        theirs = torch.optim.Adam(plain.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 8, device=device)).sum().backward()
            plain(torch.ones(2, 8, device=device)).sum().backward()
            ours.step()
            theirs.step()
        for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, expected)
