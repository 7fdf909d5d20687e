"""Collectives in memory that the ranks of a node share: sizes, orders, threads, and what is left.

What each operation and dtype gives, the other tests of this folder say: they run in memory as well.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_versions
from group_data import group, rank, size

from mpiddp.collectives import point_to_point

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120), pytest.mark.sizes]

# In bytes: what is reduced in one meeting, in slices, what fits into a half, and what does not.
SIZES = (0, 4, 32 << 10, (32 << 10) - 4, 512 << 10, (512 << 10) + 4, (2 << 20) + 12)


@pytest.fixture(autouse=True, params=["copied", "read"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """All through copies in shared memory, or all read where it is."""
    memory = group().state.memory
    if memory is None:
        pytest.skip("the ranks share no memory")
    before = memory.direct_from
    if request.param == "read" and not before[0]:
        pytest.skip("the ranks may not read each other's memory")
    memory.read_directly(*((1, 1, 1) if request.param == "read" else (0, 0, 0)))
    yield request.param
    memory.read_directly(*before)


def numbers(count: int, of: int) -> torch.Tensor:
    """Return floats whose sums are exact, others on each rank."""
    return torch.arange(count, dtype=torch.float32).remainder(1000).add(1000 * of)


def all_of(count: int) -> list[torch.Tensor]:
    return [numbers(count, of) for of in range(size())]


@pytest.mark.parametrize("size_in_bytes", SIZES)
class TestSizes:
    def test_all_reduce(self, size_in_bytes: int) -> None:
        count = size_in_bytes // 4
        tensor = numbers(count, rank())
        dist.all_reduce(tensor)
        assert torch.equal(tensor, sum(all_of(count)))
        tensor = numbers(count, rank())
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        assert torch.equal(tensor, numbers(count, size() - 1))

    def test_reduce(self, size_in_bytes: int) -> None:
        count, root = size_in_bytes // 4, size() - 1
        tensor = numbers(count, rank())
        dist.reduce(tensor, root)
        expected = sum(all_of(count)) if rank() == root else numbers(count, rank())
        assert torch.equal(tensor, expected)

    def test_reduce_scatter(self, size_in_bytes: int) -> None:
        count = size_in_bytes // 4
        whole = numbers(count * size(), rank())
        output = torch.empty(count)
        dist.reduce_scatter(
            output, list(whole.clone().chunk(size())) if count else [output] * size()
        )
        expected = sum(all_of(count * size()))[rank() * count : (rank() + 1) * count]
        assert torch.equal(output, expected)

    def test_all_gather(self, size_in_bytes: int) -> None:
        count = size_in_bytes // 4
        outputs = [torch.empty(count) for _ in range(size())]
        dist.all_gather(outputs, numbers(count, rank()))
        for output, expected in zip(outputs, all_of(count), strict=True):
            assert torch.equal(output, expected)

    def test_broadcast(self, size_in_bytes: int) -> None:
        for root in range(size()):
            tensor = numbers(size_in_bytes // 4, rank())
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, numbers(size_in_bytes // 4, root))

    def test_all_to_all(self, size_in_bytes: int) -> None:
        count = size_in_bytes // 4
        output = torch.empty(count * size())
        dist.all_to_all_single(output, numbers(count * size(), rank()))
        parts = [
            numbers(count * size(), of)[rank() * count : (rank() + 1) * count]
            for of in range(size())
        ]
        assert torch.equal(output, torch.cat(parts))


@pytest.mark.parametrize("later", [False, True])
class TestSeveralInOneCall:
    """Each as if it were alone, and none by messages."""

    COUNTS = (5, 0, 70_000, 300_000)

    @pytest.fixture(autouse=True)
    def without_mpi(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        sent: list[Any] = []
        pending = type(group()).pending
        monkeypatch.setattr(
            type(group()), "pending", lambda *a, **n: sent.append(a) or pending(*a, **n)
        )
        yield
        assert not sent

    def own(self) -> list[torch.Tensor]:
        return [numbers(count, rank()) for count in self.COUNTS]

    def test_sums(self, later: bool) -> None:
        own = self.own()
        with dist._coalescing_manager(async_ops=later) as manager:
            for tensor in own:
                dist.all_reduce(tensor)
        if later:
            manager.wait()
        for tensor, count in zip(own, self.COUNTS, strict=True):
            assert torch.equal(tensor, sum(all_of(count)))
        own = self.own()
        own[0] = own[0].to(torch.int64)  # not as one
        options = dist.AllreduceCoalescedOptions()
        options.asyncOp = later
        group().allreduce_coalesced(own, options).wait()
        for tensor, count in zip(own, self.COUNTS, strict=True):
            assert torch.equal(tensor.float(), sum(all_of(count)))
        own = self.own()
        group().reduce(own, root=1).wait()
        for tensor, count in zip(own, self.COUNTS, strict=True):
            assert rank() != 1 or torch.equal(tensor, sum(all_of(count)))

    def test_gathered(self, later: bool) -> None:
        outputs = [torch.empty(count * size()) for count in self.COUNTS]
        with dist._coalescing_manager(async_ops=later) as manager:
            for output, tensor in zip(outputs, self.own(), strict=True):
                torch_versions.all_gather_single(output, tensor)
        if later:
            manager.wait()
        for output, count in zip(outputs, self.COUNTS, strict=True):
            assert torch.equal(output, torch.cat(all_of(count)))
        lists = [[torch.empty(count) for _ in range(size())] for count in self.COUNTS]
        group().allgather(lists, self.own()).wait()
        for parts, count in zip(lists, self.COUNTS, strict=True):
            assert all(map(torch.equal, parts, all_of(count)))

    def test_reduced_and_scattered(self, later: bool) -> None:
        outputs = [torch.empty(count) for count in self.COUNTS]
        wholes = [numbers(count * size(), rank()) for count in self.COUNTS]
        expected = [sum(all_of(count * size()))[rank() * count :][:count] for count in self.COUNTS]
        with dist._coalescing_manager(async_ops=later) as manager:
            for output, whole in zip(outputs, wholes, strict=True):
                torch_versions.reduce_scatter_single(output, whole)
        if later:
            manager.wait()
        assert all(map(torch.equal, outputs, expected))
        lists = [list(whole.split(max(whole.numel() // size(), 1))) for whole in wholes]
        lists[1] = [wholes[1]] * size()
        outputs = [torch.empty(count) for count in self.COUNTS]
        group().reduce_scatter(outputs, lists, dist.ReduceScatterOptions()).wait()
        assert all(map(torch.equal, outputs, expected))

    def test_lists_of_other_sizes_reduced_and_scattered(self, later: bool) -> None:
        for count in self.COUNTS:
            lengths = [count * (of + 1) for of in range(size())]
            output = torch.empty(lengths[rank()])
            work = dist.reduce_scatter(
                output, [numbers(length, rank()) for length in lengths], async_op=later
            )
            if work is not None:
                work.wait()
            assert torch.equal(output, sum(all_of(lengths[rank()])))

    def test_copied_to_all(self, later: bool) -> None:
        own = self.own()
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = size() - 1, later
        group().broadcast(own, options).wait()
        for tensor, count in zip(own, self.COUNTS, strict=True):
            assert torch.equal(tensor, numbers(count, size() - 1))

    def test_one_that_is_wrong(self, later: bool) -> None:
        """It is an error before anything has begun, so the group goes on."""
        good, wrong = torch.ones(3), torch.ones(4)
        with pytest.raises(ValueError, match="needs an output of"):
            group().all_gather_single_coalesced([good.repeat(size()), good], [good, good])
        inputs = [good.repeat(size()), wrong]
        with pytest.raises(ValueError, match="needs an input of"):
            group().reduce_scatter_single_coalesced([good, good], inputs).wait()
        dist.barrier()


@pytest.mark.parametrize("count", [3, 300_000])
def test_inputs_that_are_parts_of_outputs(count: int) -> None:
    for part in (rank(), (rank() + 1) % size()):
        output = numbers(count * size(), rank())
        expected = [
            numbers(count * size(), of)[place * count : (place + 1) * count]
            for of in range(size())
            for place in [(part - rank() + of) % size()]
        ]
        group().all_gather_single(output, output[part * count : (part + 1) * count]).wait()
        assert torch.equal(output, torch.cat(expected))
        whole = numbers(count * size(), rank())
        place = slice(part * count, (part + 1) * count)
        group().reduce_scatter_single(whole[place], whole).wait()
        own = sum(all_of(count * size()))[rank() * count : (rank() + 1) * count]
        assert torch.equal(whole[place], own)


def calls(part: Any, count: int) -> Iterator[tuple[Callable[[], Any], Callable[[], None]]]:
    """Yield what begins an operation, and what checks its result when it has ended."""
    me, ranks = part.rank(), part.size()
    for step in range(12):
        tensor = torch.full((count,), float(me + step))
        if step % 3 == 0:
            expected = torch.full((count,), float(sum(range(ranks)) + step * ranks))
            begin = lambda t=tensor: dist.all_reduce(t, group=part, async_op=True)  # noqa: E731
        elif step % 3 == 1:
            root = step % ranks
            expected = torch.full((count,), float(root + step))
            begin = lambda t=tensor, r=root: dist.broadcast(  # noqa: E731
                t, group=part, group_src=r, async_op=True
            )
        else:
            expected = tensor.clone()
            begin = lambda: dist.barrier(part, async_op=True)  # noqa: E731

        def check(tensor: torch.Tensor = tensor, expected: torch.Tensor = expected) -> None:
            assert torch.equal(tensor, expected)

        yield begin, check


@pytest.mark.parametrize("count", [5, 700_000])
@pytest.mark.parametrize("backwards", [False, True])
def test_many_at_once_are_waited_for_in_any_order(count: int, backwards: bool) -> None:
    several = list(calls(group(), count))
    begun = [(begin(), check) for begin, check in several]
    for work, check in reversed(begun) if backwards else begun:
        work.wait()
        check()


def test_moves_while_nobody_waits() -> None:
    dist.barrier()
    time.sleep(0.05 * rank())  # so that nobody but the first can end it at once
    tensor = torch.full((1 << 20,), float(rank()))
    work = dist.all_reduce(tensor, async_op=True)
    last, expected = tensor[-1:], float(sum(range(size())))
    assert work is not None
    until = time.monotonic() + 20
    # Without a thread, whoever waits makes progress.
    while group().engine.has_thread and last.item() != expected and time.monotonic() < until:
        time.sleep(0.01)
    if not group().engine.has_thread:
        work.wait()
    assert last.item() == expected
    work.wait()


def test_threads_with_a_group_each() -> None:
    parts: list[Any] = [dist.new_group() for _ in range(3)]
    errors: list[BaseException] = []

    def run(part: Any, count: int) -> None:
        try:
            for _ in range(4):
                for begin, check in calls(part, count):
                    begin().wait()
                    check()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(part, count), daemon=True)
        for part, count in zip(parts, (7, 9000, 200_000), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    dist.barrier()
    for part in parts:
        dist.destroy_process_group(part)


def shared_bytes() -> int:
    """Return this process's part of the memory that it shares by files without a name."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Shmem:"):
            return int(line.split()[1]) << 10
    pytest.skip("the kernel does not tell it")


@pytest.mark.thorough
def test_memory_goes_with_the_group() -> None:
    def use() -> None:
        part: Any = dist.new_group()
        assert part.state.memory is not None
        dist.all_reduce(torch.ones(1 << 18), group=part)
        dist.barrier()
        dist.destroy_process_group(part)
        del part
        gc.collect()

    use()
    dist.barrier()
    before = shared_bytes()
    for _ in range(40):
        use()
    dist.barrier()
    assert shared_bytes() < before + (1 << 20)  # what 40 groups used is 40 times as much


def test_lists_of_sizes_that_differ() -> None:
    outputs = [torch.empty(of + 1) for of in range(size())]
    dist.all_gather(outputs, torch.full((rank() + 1,), float(rank())))
    for of, output in enumerate(outputs):
        assert torch.equal(output, torch.full((of + 1,), float(of)))


# Elements of the smallest part: nothing, one round, and many.
@pytest.mark.parametrize("count", [0, 3, 200_000])
class TestSizesThatDiffer:
    """Each rank has another size for each; the largest say how many rounds there are."""

    def part(self, of: int, to: int, count: int) -> torch.Tensor:
        return numbers(count * (1 + of) * (2 if to == 1 else 1) + to, of + 10 * to)

    def test_all_to_all(self, count: int) -> None:
        ranks = range(size())
        inputs = [self.part(rank(), to, count) for to in ranks]
        expected = [self.part(of, rank(), count) for of in ranks]
        outputs = [torch.empty_like(part) for part in expected]
        dist.all_to_all(outputs, inputs)
        assert all(map(torch.equal, outputs, expected))
        output = torch.empty(sum(part.numel() for part in expected))
        splits = [[part.numel() for part in parts] for parts in (expected, inputs)]
        dist.all_to_all_single(output, torch.cat(inputs), *splits)
        assert torch.equal(output, torch.cat(expected))

    def test_gather_and_scatter(self, count: int) -> None:
        root, ranks = 1, range(size())
        expected = [self.part(of, root, count) for of in ranks]
        outputs = [torch.empty_like(part) for part in expected] if rank() == root else None
        dist.gather(self.part(rank(), root, count), outputs, root)
        assert outputs is None or all(map(torch.equal, outputs, expected))
        output = torch.empty_like(self.part(root, rank(), count))
        inputs = [self.part(root, to, count) for to in ranks] if rank() == root else None
        dist.scatter(output, inputs, root)
        assert torch.equal(output, self.part(root, rank(), count))

    def test_all_gather(self, count: int) -> None:
        expected = [self.part(of, 1, count) for of in range(size())]
        outputs = [torch.empty_like(part) for part in expected]
        dist.all_gather(outputs, self.part(rank(), 1, count))
        assert all(map(torch.equal, outputs, expected))

    def test_asynchronous_and_late(self, count: int) -> None:
        ranks = range(size())
        works: list[Any] = []
        results = []
        for step in range(3):
            if rank() == step % size():
                time.sleep(0.02)
            inputs = [self.part(rank(), to, count) for to in ranks]
            outputs = [torch.empty_like(self.part(of, rank(), count)) for of in ranks]
            works.append(dist.all_to_all(outputs, inputs, async_op=True))
            results.append(outputs)
        for work, outputs in zip(works, results, strict=True):
            work.wait()
            expected = [self.part(of, rank(), count) for of in ranks]
            assert all(map(torch.equal, outputs, expected))

    @pytest.mark.parametrize("own", [True, False])
    def test_scatters_one_after_the_other(self, count: int, own: bool) -> None:
        """From changing roots, late ones too, some of which wait for nobody; and others between."""
        every, works, pairs = range(size()), [], []
        for number in range(4 * size()):
            root = number // 2 % size()
            if rank() == number % size():
                time.sleep(0.003)
            sent = [self.part(root, to + number, count) for to in every]
            output = torch.empty_like(sent[rank()])
            if rank() == root and own:
                output.copy_(sent[root])
                sent[root] = output  # its part is there already
            parts = sent if rank() == root else None
            works.append(dist.scatter(output, parts, root, async_op=bool(number % 3)))
            pairs.append((output, self.part(root, rank() + number, count)))
            if number % 4 == 0:
                dist.all_reduce(total := torch.full((count + 1,), float(rank())))
                assert total[-1] == sum(every)
        for work, (output, expected) in zip(works, pairs, strict=True):
            if work is not None:
                work.wait()
            assert torch.equal(output, expected)

    def test_scatter_over_its_own_inputs(self, count: int) -> None:
        """What the root gets may lie where another rank's part was."""
        count += 1
        for root in range(size()):
            parts = list(numbers(count * size(), root).split(count))
            dist.scatter(parts[0], parts if rank() == root else None, root)
            expected = numbers(count * size(), root).split(count)[rank()]
            assert torch.equal(parts[0], expected)

    def test_the_root_may_write_to_its_inputs_again(self, count: int) -> None:
        for root in range(size()):
            parts = [self.part(root, to, count) for to in range(size())] if rank() == root else []
            output = torch.empty_like(self.part(root, rank(), count))
            if rank() != root:
                time.sleep(0.02)
            dist.scatter(output, parts or None, root)
            for part in parts:
                part.fill_(-1.0)
            assert torch.equal(output, self.part(root, rank(), count))

    def test_nothing_for_some(self, count: int) -> None:
        output = torch.empty(count * rank())
        parts = [numbers(count * to, to) for to in range(size())] if rank() == 0 else None
        dist.scatter(output, parts)
        assert torch.equal(output, numbers(count * rank(), rank()))

    def test_none_sends_messages(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        sent = []
        send = point_to_point.send_bytes
        monkeypatch.setattr(point_to_point, "send_bytes", lambda *a: sent.append(a) or send(*a))
        self.test_all_to_all(count)
        self.test_all_gather(count)
        self.test_gather_and_scatter(count)
        assert not sent


@pytest.mark.parametrize("count", [3, 20_000])
def test_a_scatter_waits_for_the_root_alone(count: int, way: str) -> None:
    """Nor does the root wait for others, where all that it has fits into its half."""
    dist.barrier()
    if rank() == size() - 1:
        time.sleep(0.8)
    began = time.monotonic()
    output = torch.empty(count)
    dist.scatter(output, [numbers(count, to) for to in range(size())] if rank() == 0 else None)
    took = time.monotonic() - began
    assert torch.equal(output, numbers(count, rank()))
    assert took < 0.6
    dist.barrier()


class TestAwaitedCallers:
    """See Note [Awaited callers] in group_memory.pyx."""

    def test_who_waits_later_holds_nobody_up(self) -> None:
        """What others need of a rank is there before it waits."""
        dist.barrier()
        began = time.monotonic()
        tensor = torch.full((4,), float(rank()))
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        if rank() == 0:
            time.sleep(2)
        work.wait()
        took = time.monotonic() - began
        assert tensor[0] == sum(range(size()))
        assert took > 1.9 if rank() == 0 else took < 1
        dist.barrier()

    @pytest.mark.parametrize("late", [0, 1])
    def test_many_that_are_waited_for_in_any_order(self, late: int) -> None:
        for reverse in (False, True):
            tensors = [torch.full((3,), float(rank() + number)) for number in range(20)]
            if rank() == late:
                time.sleep(0.05)
            works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for work in reversed(works) if reverse else works:
                work.wait()
            for number, tensor in enumerate(tensors):
                assert tensor[0] == sum(range(size())) + number * size()

    @pytest.mark.parametrize("late", [0, 1])
    def test_asked_again_and_again(self, late: int) -> None:
        tensor = torch.full((3,), float(rank()))
        if rank() == late:
            time.sleep(0.05)
        work: Any = dist.all_reduce(tensor, async_op=True)
        until = time.monotonic() + 20
        while not work.is_completed() and time.monotonic() < until:
            pass
        assert work.is_success()
        assert tensor[0] == sum(range(size()))

    @pytest.mark.parametrize("late", [0, 1])
    def test_future_without_a_wait(self, late: int) -> None:
        """Nobody comes back for it."""
        dist.barrier()
        tensor = torch.full((3,), float(rank()))
        if rank() == late:
            time.sleep(1)
        began = time.monotonic()
        work: Any = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        assert time.monotonic() - began < 0.7  # it does not wait, either
        until = time.monotonic() + 20
        while not torch.futures.Future.done(future) and time.monotonic() < until:
            time.sleep(0.001)  # ours would move it along
        assert torch.futures.Future.done(future)
        assert future.value()[0][0] == sum(range(size()))

    def test_one_thread_waits_while_another_begins(self) -> None:
        part = dist.new_group()
        for step in range(200):
            first, second = torch.ones(3), torch.full((5,), 2.0)
            work: Any = dist.all_reduce(first, group=part, async_op=True)
            waiter = threading.Thread(target=work.wait)
            if step % size() == rank():
                time.sleep(0.001)
            waiter.start()
            dist.all_reduce(second, group=part)
            waiter.join()
            assert first[0] == size()
            assert second[0] == 2 * size()

    def test_broken_meanwhile(self) -> None:
        """The group is broken while one is left to its caller."""
        part = dist.new_group(timeout=timedelta(seconds=2))
        dist.barrier(part)
        tensor = torch.ones(3)
        work: Any = None
        if rank() == 0:
            work = dist.all_reduce(tensor, group=part, async_op=True)
            with pytest.raises(RuntimeError, match="all_reduce"):
                work.wait()
            assert tensor[0] == 1
        dist.barrier()
