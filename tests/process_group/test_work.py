"""Asynchronous operations: progress, completion, futures, threads, groups beside each other."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_versions
from group_data import group, rank, size

pytestmark = [pytest.mark.mpi, pytest.mark.sizes, pytest.mark.timeout(120)]


def one_of_each(part: Any) -> dict[str, Callable[[], Any]]:
    """Return how to start each operation, asynchronously, on a group."""
    n = size()
    return {
        "all_reduce": lambda: dist.all_reduce(torch.ones(3), group=part, async_op=True),
        "broadcast": lambda: dist.broadcast(torch.ones(3), 0, group=part, async_op=True),
        "reduce": lambda: dist.reduce(torch.ones(3), 0, group=part, async_op=True),
        "all_gather": lambda: dist.all_gather(
            [torch.empty(3) for _ in range(n)], torch.ones(3), group=part, async_op=True
        ),
        "all_gather_single": lambda: torch_versions.all_gather_single(
            torch.empty(3 * n), torch.ones(3), group=part, async_op=True
        ),
        "gather": lambda: dist.gather(
            torch.ones(3),
            [torch.empty(3) for _ in range(n)] if rank() == 0 else None,
            group=part,
            async_op=True,
        ),
        "scatter": lambda: dist.scatter(
            torch.empty(3),
            [torch.ones(3) for _ in range(n)] if rank() == 0 else None,
            group=part,
            async_op=True,
        ),
        "reduce_scatter": lambda: dist.reduce_scatter(
            torch.empty(3), [torch.ones(3)] * n, group=part, async_op=True
        ),
        "reduce_scatter_single": lambda: torch_versions.reduce_scatter_single(
            torch.empty(3), torch.ones(3 * n), group=part, async_op=True
        ),
        "all_to_all": lambda: dist.all_to_all(
            [torch.empty(3) for _ in range(n)], [torch.ones(3)] * n, group=part, async_op=True
        ),
        "all_to_all_single": lambda: dist.all_to_all_single(
            torch.empty(3 * n), torch.ones(3 * n), group=part, async_op=True
        ),
        "barrier": lambda: dist.barrier(group=part, async_op=True),
    }


@pytest.mark.smoke
def test_every_operation_as_gloo(gloo: Any) -> None:
    """Each gives a Work; its future holds what Gloo's does, except for what ours is more."""
    ours, theirs = one_of_each(None), one_of_each(gloo)
    for name in ours:
        work = ours[name]()
        assert isinstance(work, dist.Work), name
        assert work.wait(), name
        assert work.is_completed(), name
        assert work.is_success(), name
        assert work.exception() is None, name
        work.get_future().wait()
        if name == "reduce_scatter":
            continue  # Gloo has none for lists
        try:
            other = theirs[name]()
        except RuntimeError as error:
            if "gloo does not support alltoall" not in str(error):
                raise
            continue  # as in torch 2.11
        other.wait()
        if name in ("all_gather", "barrier", "all_to_all_single", "reduce_scatter_single"):
            continue  # Gloo's futures are of other kinds
        if name in ("gather", "reduce", "scatter") and rank():
            continue  # ours hold the tensors on every rank
        assert torch.equal(flat(work.get_future().value()), flat(other.get_future().value())), name


def flat(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.reshape(-1)
    return torch.cat([flat(part) for part in value])


@pytest.mark.mpi(min_size=2)
def test_returns_before_the_others_have_come() -> None:
    """An asynchronous call returns at once; it is complete only when all have called."""
    part = dist.new_group()
    for name, start in one_of_each(part).items():
        if name in ("broadcast", "gather", "scatter", "reduce"):
            continue  # a rank may be done without the others
        dist.barrier()
        if rank() == 0:
            work = start()
            assert not work.is_completed(), name
            dist.barrier()
            work.wait()
        else:
            dist.barrier()
            start().wait()
    dist.destroy_process_group(part)


@pytest.mark.essential
@pytest.mark.mpi(min_size=2)
def test_progress_while_nobody_waits() -> None:
    """A large message arrives while the main thread computes, and nobody tests for it."""
    beside = dist.new_group()
    tensor = torch.full((1 << 20,), float(rank()))
    if rank() != 0:
        dist.barrier(group=beside)
    work = dist.all_reduce(tensor, async_op=True)
    if rank() == 0:  # it came first, so its call cannot have ended at once
        pending = work.pending
        dist.barrier(group=beside)
        end = time.monotonic() + 20
        while not all(each.done for each in pending) and time.monotonic() < end:
            torch.ones(1000).sum()  # Python, but no call of ours
        assert all(each.done for each in pending)
    work.wait()
    assert tensor[0] == sum(range(size()))
    dist.destroy_process_group(beside)


def test_many_in_flight() -> None:
    tensors = [torch.full((100,), float(index)) for index in range(200)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for index in reversed(range(200)):
        works[index].wait()
        assert tensors[index][0] == index * size()


def test_forgotten_works_end_all_the_same() -> None:
    """Nobody keeps the Works; their memory lives until MPI is done with it, and no longer."""
    part = dist.new_group()
    tensors = [torch.full((50_000,), float(rank())) for _ in range(40)]
    storages = [weakref.ref(tensor) for tensor in tensors]
    for tensor in tensors:
        dist.all_reduce(tensor, group=part, async_op=True)
    del tensor
    tensors.clear()
    gc.collect()
    dist.barrier(group=part)
    end = time.monotonic() + 20
    left = torch.ones(1)  # on how many ranks there are some: all make as many calls
    while left[0] > 0 and time.monotonic() < end:
        part.under_way.sweep()
        gc.collect()
        left.fill_(any(storage() is not None for storage in storages))
        dist.all_reduce(left, group=part, async_op=True).wait()
    assert not any(storage() is not None for storage in storages)
    dist.destroy_process_group(part)


def test_polling() -> None:
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, async_op=True)
    end = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0)
    # No wait: the result is there once it says that it is complete.
    assert tensor[0] == size()


class TestFutures:
    @pytest.mark.smoke
    def test_value_is_the_tensor(self) -> None:
        tensor = torch.ones(3)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        assert future.wait()[0].data_ptr() == tensor.data_ptr()
        assert future.done()

    @pytest.mark.smoke
    def test_completed_for_waiters_in_cpp(self) -> None:
        """What waits below Python, as torch's reducer does, is woken though nobody tests."""
        tensors = [torch.full((1000,), float(index)) for index in range(20)]
        futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
        torch._C._collect_all(futures).wait()
        for index, tensor in enumerate(tensors):
            assert tensor[0] == index * size()

    @pytest.mark.essential
    def test_continuations_may_start_collectives(self) -> None:
        """They run where they are added, so all ranks start everything in one order."""

        def again(future: Any) -> torch.Tensor:
            tensor = future.value()[0]
            return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

        chains = []
        for index in range(10):
            work = dist.all_reduce(torch.full((10,), float(index)), async_op=True)
            chains.append(work.get_future().then(again))
            dist.all_reduce(torch.ones(5))
        for index, chain in enumerate(chains):
            assert chain.wait()[0] == index * size() ** 2

    @pytest.mark.essential
    @pytest.mark.mpi(min_size=2)
    def test_failure(self) -> None:
        part: Any = dist.new_group(timeout=timedelta(seconds=0.3))
        if rank() == 0:
            work = dist.all_reduce(torch.ones(1), group=part, async_op=True)
            future = work.get_future()
            with pytest.raises(RuntimeError, match=r"all_reduce .* has waited 0\.3 s"):
                torch._C._collect_all([future]).wait()
            assert work.is_completed()
            assert not work.is_success()
            assert isinstance(work.exception(), RuntimeError)
            with pytest.raises(RuntimeError, match=r"has waited 0\.3 s"):
                work.wait()
        dist.barrier()
        with pytest.raises(RuntimeError, match="group is broken"):
            dist.all_reduce(torch.ones(1), group=part)
        dist.barrier()

    def test_not_held_for_ever(self) -> None:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.get_future().then(lambda future: None)
        work.wait()
        held = weakref.ref(work)
        del work
        end = time.monotonic() + 20
        while held() is not None and time.monotonic() < end:  # a thread may be looking at it
            group().under_way.sweep()
            gc.collect()
        assert held() is None


class TestThreadsAndGroups:
    def test_groups_beside_each_other(self) -> None:
        """Operations of several groups may start and end in any order."""
        parts = [dist.new_group() for _ in range(3)]
        order = parts if rank() % 2 == 0 else parts[::-1]
        works = []
        tensors = {id(part): torch.full((10,), float(i)) for i, part in enumerate(parts)}
        for part in order:
            works.append(dist.all_reduce(tensors[id(part)], group=part, async_op=True))
        for work in works[::-1]:
            work.wait()
        for i, part in enumerate(parts):
            assert tensors[id(part)][0] == i * size()
        for part in parts:
            dist.destroy_process_group(part)

    @pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
    def test_a_thread_a_group(self, asynchronous: bool) -> None:
        """Threads that wait in different groups neither mix nor block each other."""
        parts = [dist.new_group() for _ in range(4)]
        wrong: list[str] = []

        def work(index: int) -> None:
            for step in range(30):
                tensor = torch.full((index + 1,), float(index * 100 + step))
                work = dist.all_reduce(tensor, group=parts[index], async_op=asynchronous)
                if asynchronous:
                    work.wait()
                if tensor[0] != size() * (index * 100 + step):
                    wrong.append(f"thread {index}, step {step}: {tensor}")

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert not any(thread.is_alive() for thread in threads)
        for part in parts:
            dist.destroy_process_group(part)

    @pytest.mark.essential
    def test_beside_gradients(self) -> None:
        """Asynchronous collectives go on while DistributedDataParallel reduces gradients."""
        from mpiddp import DistributedDataParallel

        model = DistributedDataParallel(torch.nn.Linear(300, 300))
        for step in range(5):
            tensor = torch.full((10_000,), float(step))
            work = dist.all_reduce(tensor, async_op=True)
            model(torch.ones(2, 300)).sum().backward()
            work.wait()
            assert tensor[0] == step * size()
            assert model.module.bias.grad.eq(2.0 * (step + 1)).all()


@pytest.mark.mpi(min_size=2)
def test_waiting_burns_no_core() -> None:
    """A rank that waits for a late one sleeps most of the time."""
    dist.barrier()
    if rank() == 0:
        time.sleep(1.0)
    began, ran = time.monotonic(), time.thread_time()
    dist.all_reduce(torch.ones(1))
    if rank() and time.monotonic() - began > 0.5:
        assert time.thread_time() - ran < 0.25
    dist.barrier()


class TestCoalescing:
    @pytest.mark.smoke
    def test_manager(self) -> None:
        tensors = [torch.ones(3), torch.full((2, 2), 2.0), torch.full((5,), 3.0)]
        with dist._coalescing_manager() as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        assert [tensor.flatten()[0] for tensor in tensors] == [size(), 2 * size(), 3 * size()]
        outputs = [torch.empty(2 * size()), torch.empty(size())]
        with dist._coalescing_manager(async_ops=True) as manager:
            torch_versions.all_gather_single(outputs[0], torch.full((2,), float(rank())))
            torch_versions.all_gather_single(outputs[1], torch.full((1,), float(rank())))
        manager.wait()
        assert outputs[1].tolist() == list(range(size()))

    @pytest.mark.essential
    @pytest.mark.mpi(min_size=2)
    def test_old_way(self) -> None:
        received = torch.empty(3)
        group()._start_coalescing(torch.device("cpu"))
        dist.isend(torch.full((3,), float(rank())), (rank() + 1) % size())
        dist.irecv(received, (rank() - 1) % size())
        group()._end_coalescing(torch.device("cpu")).wait()
        assert received.tolist() == [(rank() - 1) % size()] * 3

    def test_dtypes_that_differ(self) -> None:
        tensors = [torch.ones(3), torch.ones(3, dtype=torch.int64)]
        group().allreduce_coalesced(tensors).wait()
        assert tensors[0].tolist() == tensors[1].tolist() == [size()] * 3


@pytest.mark.parametrize("count", [4, 100_000, 3_000_000])
@pytest.mark.parametrize("late", [0.0, 0.05])
def test_a_future_that_waits_in_c_ends_with_its_collective(count: int, late: float) -> None:
    """The reducer of torch waits so: nobody in Python drives the operation along."""
    began = time.monotonic()
    for _ in range(5):
        dist.barrier()
        if rank() == size() - 1:
            time.sleep(late)
        work = dist.all_reduce(torch.ones(count), async_op=True)
        assert work is not None
        (total,) = torch.futures.Future.wait(work.get_future())
        assert total[0] == size()
    # Half a second each, if it ended only when a thread looks at the clock.
    assert time.monotonic() - began < 1.5
