"""Hooks before and after each operation of a group, before an abort, and the check for NaN."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replicas import RANK, SIZE, together
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch_versions import all_gather_single, reduce_scatter_single

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi(min_size=2)

has_hooks = pytest.mark.skipif(
    not hasattr(c10d, "PreHookArgs"), reason="torch 2.14 brought hooks of groups"
)

Run = Callable[[dist.ProcessGroup], object]


def ones(count: int = 4) -> torch.Tensor:
    return torch.ones(count)


def each(count: int = 4) -> list[torch.Tensor]:
    return [torch.ones(count) for _ in range(SIZE)]


def first(value: Any) -> Any:
    return value if RANK == 0 else None


def exchange(group: dist.ProcessGroup) -> None:
    if RANK == 0:
        dist.send(ones(), 1, group=group)
    if RANK == 1:
        dist.recv(ones(), 0, group=group)


CALLS: dict[str, Run] = {
    "all_reduce": lambda group: dist.all_reduce(ones(), group=group),
    "asynchronous": lambda group: dist.all_reduce(ones(), group=group, async_op=True).wait(),
    "broadcast": lambda group: dist.broadcast(ones(), 1, group=group),
    "reduce": lambda group: dist.reduce(ones(), 1, group=group),
    "all_gather": lambda group: dist.all_gather(each(), ones(), group=group),
    "all_gather_single": lambda group: all_gather_single(ones(4 * SIZE), ones(), group=group),
    "gather": lambda group: dist.gather(ones(), first(each()), group=group),
    "scatter": lambda group: dist.scatter(ones(), first(each()), group=group),
    "reduce_scatter": lambda group: dist.reduce_scatter(ones(), each(), group=group),
    "reduce_scatter_single": lambda group: reduce_scatter_single(
        ones(), ones(4 * SIZE), group=group
    ),
    "all_to_all": lambda group: dist.all_to_all(each(), each(), group=group),
    "all_to_all_single": lambda group: dist.all_to_all_single(ones(SIZE), ones(SIZE), group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "message": exchange,
}


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Return a group of its own: hooks stay with a group."""
    made = dist.new_group()
    yield made
    dist.destroy_process_group(made)


def shapes(tensors: list[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


def seen_by_hooks(group: Any, run: Run) -> list[Any]:
    """Return what the hooks of a group are told while `run` calls it."""
    seen: list[Any] = []
    numbers: list[int] = []

    def before(told: Any) -> None:
        numbers.append(told.op_id)
        tensors = shapes(told.input_tensors), shapes(told.output_tensors)
        seen.append(("before", told.name, told.async_op, *tensors, told.root))

    def after(told: Any) -> None:
        assert told.op_id == numbers[-1]
        seen.append(("after", told.name, told.async_op, told.work is not None))

    group.register_pre_hook(1, before)
    group.register_post_hook(2, after)
    run(group)
    group.unregister_pre_hook(1)
    group.unregister_post_hook(2)
    run(group)  # nobody hears of this one
    return seen


@has_hooks
@pytest.mark.parametrize("name", CALLS)
def test_hooks_see_what_gloos_see(name, group, gloo):
    seen = seen_by_hooks(group, CALLS[name])
    expected = seen_by_hooks(gloo, CALLS[name])
    with together():
        assert seen == expected


@has_hooks
def test_hooks_run_in_order_of_their_numbers(group):
    order: list[int] = []
    for number in (7, -3, 5):
        group.register_pre_hook(number, lambda told, number=number: order.append(number))
    dist.all_reduce(ones(), group=group)
    with together():
        assert order == [-3, 5, 7]


@has_hooks
def test_an_error_of_a_hook_keeps_the_operation_from_starting(group):
    def refuse(told: object) -> None:
        raise ValueError("not this one")

    tensor = torch.full((4,), float(RANK))
    group.register_pre_hook(1, refuse)
    with pytest.raises(ValueError, match="not this one"):
        dist.all_reduce(tensor, group=group)
    group.unregister_pre_hook(1)
    dist.all_reduce(tensor, group=group)
    with together():
        assert tensor.tolist() == [sum(range(SIZE))] * 4


@has_hooks
def test_the_profiler_does_not_show_a_call_twice(group):
    with torch.profiler.profile():
        seen = seen_by_hooks(group, CALLS["all_reduce"])
    with together():
        assert [event[0] for event in seen] == ["before", "after"]


def two_steps(module_class: type, group: dist.ProcessGroup) -> Run:
    model = module_class(torch.nn.Linear(300, 1000), process_group=group)
    for _ in range(2):  # after the first, buckets are laid out again
        model(torch.ones(1, 300)).sum().backward()
    return lambda _: model(torch.ones(1, 300)).sum().backward()


@has_hooks
def test_buckets_of_gradients_are_all_reduces_as_with_gloo(group, gloo):
    seen = seen_by_hooks(group, two_steps(DDP, group))
    expected = seen_by_hooks(gloo, two_steps(TorchDDP, gloo))
    told = [event for event in seen if event[0] == "before"]
    with together():
        assert told == [event for event in expected if event[0] == "before"]
        assert len(seen) == len(expected)


class TestNanCheck:
    @pytest.fixture
    def checked(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
        monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
        group = dist.new_group()
        yield group
        dist.destroy_process_group(group)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
    def test_it_is_found_before_anything_is_sent(self, checked, dtype):
        tensor = torch.tensor([1.0, float("nan")], dtype=dtype)
        with pytest.raises(RuntimeError, match=f"rank {RANK}: NaN found in input tensor of all"):
            dist.all_reduce(tensor, group=checked)
        dist.all_reduce(torch.ones(2, dtype=dtype), group=checked)

    def test_integers_and_infinity_pass(self, checked):
        numbers, infinite = torch.ones(2, dtype=torch.int64), torch.tensor([float("inf")])
        dist.all_reduce(numbers, group=checked)
        dist.all_reduce(infinite, group=checked)
        with together():
            assert numbers.tolist() == [SIZE, SIZE]
            assert infinite.isinf().all()

    def test_only_what_a_rank_gives_counts(self, checked):
        tensor = ones() if RANK == 0 else torch.full((4,), float("nan"))
        dist.broadcast(tensor, 0, group=checked)
        dist.all_gather(
            [torch.full((4,), float("nan")) for _ in range(SIZE)], ones(), group=checked
        )
        with together():
            assert tensor.tolist() == [1.0] * 4

    def test_gradients(self, checked):
        model = DDP(torch.nn.Linear(2, 1), process_group=checked)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match="NaN found in input tensor of allreduce"):
            model(torch.full((1, 2), float("nan"))).sum().backward()


class TestAbortHooks:
    def test_they_run_when_time_is_over(self, group):
        told: list[str] = []

        def broken() -> None:
            raise KeyError("a hook's own fault")

        group.register_abort_hook(1, broken)
        group.register_abort_hook(2, lambda: told.append("two"))
        group.register_abort_hook(3, lambda: told.append("three"))
        group.unregister_abort_hook(3)
        group.set_timeout(timedelta(seconds=0.5))
        if RANK == 0:  # the others never come
            with pytest.raises(RuntimeError, match="its timeout is over"):
                dist.all_reduce(ones(), group=group)
        dist.barrier()
        with together():
            assert told == (["two"] if RANK == 0 else [])
            assert group.supports_abort_hooks


def test_what_is_not_served_says_so(group):
    with together():
        assert not group.supports_reconfigure
        assert not group.supports_window
        for name in ("new_window", "reconfigure"):
            with pytest.raises(RuntimeError, match=f"Backend mpiddp does not support {name}"):
                getattr(group, name)(ones())
        with pytest.raises(RuntimeError, match="does not support get_reconfigure_handle"):
            group.get_reconfigure_handle()


def test_a_work_tells_its_limit_and_number(group):
    limit = group.timeout
    first = dist.all_reduce(ones(), group=group, async_op=True)
    second = dist.all_reduce(ones(), group=group, async_op=True)
    group.set_timeout(timedelta(seconds=77))
    third = dist.all_reduce(ones(), group=group, async_op=True)
    for work in (first, second, third):
        work.wait()
    with together():
        assert second._get_sequence_number() == first._get_sequence_number() + 1
        assert (first.timeout, third.timeout) == (limit, timedelta(seconds=77))


class TestGatherSingle:
    """torch.distributed.gather_single, which Gloo does not have."""

    @pytest.mark.parametrize("root", [0, 1])
    @pytest.mark.parametrize("count", [0, 5])
    def test_result(self, group, root, count):
        own = torch.arange(count) + 10.0 * RANK
        output = torch.zeros(SIZE, count)
        options = dist.GatherOptions()
        options.rootRank = root
        group.gather_single(output, own, options).wait()
        expected = torch.stack([torch.arange(count) + 10.0 * rank for rank in range(SIZE)])
        with together():
            assert torch.equal(output, expected if root == RANK else torch.zeros(SIZE, count))

    @pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="torch 2.14 brought it")
    def test_as_torch_calls_it(self):
        output = torch.zeros(2 * SIZE) if RANK == 0 else None
        dist.gather_single(torch.tensor([1.0, RANK]), output)
        with together():
            if RANK == 0:
                assert output.view(SIZE, 2).tolist() == [[1, rank] for rank in range(SIZE)]

    def test_a_wrong_output(self, group):
        options = dist.GatherOptions()
        options.rootRank = RANK  # each is root: nobody sends before the check
        with pytest.raises(ValueError, match="needs an output of"):
            group.gather_single(torch.zeros(1), torch.zeros(3), options)
