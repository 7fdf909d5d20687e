"""TORCH_DISTRIBUTED_DEBUG=DETAIL: calls that don't fit together raise on all ranks, and say how."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_data import rank, size
from torch.distributed import ReduceOp

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest) -> Any:
    """Return a group of all ranks that was made with the setting."""
    request.getfixturevalue("world")
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(timeout=timedelta(seconds=20))
    dist.set_debug_level(before)
    return group


def others(first: int) -> str:
    """Return words for all ranks but one."""
    ranks = [one for one in range(size()) if one != first]
    return {1: f"rank {ranks[0]}"}.get(len(ranks), "") or {
        0: f"ranks {'1 and 2' if size() == 3 else '1 to 3'}",
        1: f"ranks {'0 and 2' if size() == 3 else '0, 2 and 3'}",
    }[first]


def assert_all_raise(call: Callable[[], object], *words: str) -> None:
    from mpiddp.flight_recorder import ring

    under_way = ring.under_way()
    with pytest.raises(RuntimeError) as caught:
        call()
    assert ring.under_way() <= under_way  # else the watchdog would speak of it for ever
    for word in words:
        assert word in str(caught.value)


Call = Callable[[Any], object]

# What rank 1 calls, and the others; and how it is told.
MISMATCHES: dict[str, tuple[Call, str, Call, str]] = {
    "operation": (
        lambda group: dist.all_reduce(torch.ones(3, 4), group=group),
        "all_reduce(SUM) of float32 (3, 4)",
        lambda group: dist.all_reduce(torch.ones(3, 4), ReduceOp.MAX, group=group),
        "all_reduce(MAX) of float32 (3, 4)",
    ),
    "shape": (
        lambda group: dist.all_reduce(torch.ones(3, 4), group=group),
        "all_reduce(SUM) of float32 (3, 4)",
        lambda group: dist.all_reduce(torch.ones(12), group=group),
        "all_reduce(SUM) of float32 (12,)",
    ),
    "dtype": (
        lambda group: dist.all_reduce(torch.ones(3), group=group),
        "all_reduce(SUM) of float32 (3,)",
        lambda group: dist.all_reduce(torch.ones(3, dtype=torch.int32), group=group),
        "all_reduce(SUM) of int32 (3,)",
    ),
    "root": (
        lambda group: dist.broadcast(torch.ones(3), src=0, group=group),
        "broadcast(root 0) of float32 (3,)",
        lambda group: dist.broadcast(torch.ones(3), src=1, group=group),
        "broadcast(root 1) of float32 (3,)",
    ),
    "kind": (
        lambda group: dist.all_reduce(torch.ones(()), group=group),
        "all_reduce(SUM) of float32 ()",
        lambda group: dist.barrier(group=group),
        "barrier",
    ),
    "size to gather": (
        lambda group: group.all_gather_single(torch.ones(3 * size()), torch.ones(3)),
        "all_gather of float32 (3,)",
        lambda group: group.all_gather_single(torch.ones(2 * size()), torch.ones(2)),
        "all_gather of float32 (2,)",
    ),
}


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("kind", MISMATCHES)
def test_told_on_all_ranks_with_both_sides(checked: Any, kind: str) -> None:
    call_of_one, told_of_one, call_of_others, told_of_others = MISMATCHES[kind]
    expected = f"rank 1 called {told_of_one} where {others(1)} called {told_of_others}"
    if size() == 2:
        expected = f"rank 1 called {told_of_one} where rank 0 called {told_of_others}"
    assert_all_raise(
        lambda: (call_of_one if rank() == 1 else call_of_others)(checked), f": {expected}. Nothing"
    )
    # Nothing is left of it.
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=checked)
    assert tensor.tolist() == [size()] * 2


def test_one_of_many_tensors(checked: Any) -> None:
    shapes: list[tuple[int, ...]] = [(2, one + 1) for one in range(9)]
    if rank() == 0:
        shapes[7] = (3,)
    outputs = [torch.empty(shape) for shape in shapes]

    def call() -> None:
        from mpiddp.process_group import call_check

        call_check.check(checked, "all_reduce_coalesced", "SUM", outputs)

    one = "all_reduce_coalesced(SUM) with float32 (3,) as tensor 8 of 9"
    many = "all_reduce_coalesced(SUM) with float32 (2, 8) as tensor 8 of 9"
    expected = f"{others(0)} called {many} where rank 0 called {one}"
    if size() > 2:
        expected = f"rank 0 called {one} where {others(0)} called {many}"
    assert_all_raise(call, expected)


def test_sizes_for_one_rank_that_do_not_fit(checked: Any) -> None:
    """Of gather and scatter each rank knows one side only."""
    last = size() - 1
    sent = torch.ones(5 if rank() == last else 3)
    parts = [torch.empty(3) for _ in range(size())] if rank() == 0 else None
    assert_all_raise(
        lambda: dist.gather(sent, parts, dst=0, group=checked),
        "gather(root 0) of float32 on process group",
        f"rank {last} sends 5 elements to rank 0, which expects 3. Nothing was sent.",
    )
    assert_all_raise(
        lambda: dist.scatter(sent, parts, src=0, group=checked),
        "scatter(root 0) of float32 on process group",
        f"rank 0 sends 3 elements to rank {last}, which expects 5. Nothing was sent.",
    )


def test_dtype_of_one_rank_s_part(checked: Any) -> None:
    sent = torch.ones(3, dtype=torch.float64 if rank() == 1 else torch.float32)
    parts = [torch.empty(3) for _ in range(size())] if rank() == 0 else None
    assert_all_raise(
        lambda: dist.gather(sent, parts, dst=0, group=checked),
        "gather(root 0) of float64",
        "gather(root 0) of float32",
    )


def test_what_may_differ(checked: Any) -> None:
    """Sizes that differ over ranks, where torch.distributed lets them."""
    own = torch.full((rank() + 1, 2), float(rank()))
    every = [torch.full((one + 1, 2), float(one)) for one in range(size())]
    gathered = [torch.empty_like(one) for one in every]
    dist.all_gather(gathered, own, group=checked)
    assert all(map(torch.equal, gathered, every))

    gathered = [torch.empty_like(one) for one in every]
    dist.gather(own, gathered if rank() == 1 else None, dst=1, group=checked)
    assert rank() != 1 or all(map(torch.equal, gathered, every))

    received = torch.empty_like(own)
    dist.scatter(received, every if rank() == 1 else None, src=1, group=checked)
    assert torch.equal(received, own)

    tensor = torch.zeros(0, 3)
    dist.all_reduce(tensor, group=checked)


def test_objects(checked: Any) -> None:
    objects: list[Any] = [None] * size()
    dist.all_gather_object(objects, "x" * rank(), group=checked)
    assert objects == ["x" * one for one in range(size())]
    dist.gather_object("x" * rank(), objects if rank() == 1 else None, dst=1, group=checked)
    shared: list[Any] = ["all" if rank() == 1 else None]
    dist.broadcast_object_list(shared, src=1, group=checked)
    assert shared == ["all"]
    dist.scatter_object_list(shared, objects if rank() == 1 else None, src=1, group=checked)
    assert shared == ["x" * rank()]


def test_rank_that_never_comes() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group(timeout=timedelta(seconds=0.3))
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    if rank() == 0:
        assert_all_raise(
            lambda: dist.barrier(group=group), "barrier on process group", "has waited", "ank"
        )
    dist.barrier()


@pytest.mark.essential
def test_training(checked: Any) -> None:
    """A whole training: torch's and our own collectives around it agree."""
    from mpiddp import DistributedDataParallel

    torch.manual_seed(rank())
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )
    wrapped = DistributedDataParallel(model, process_group=checked)
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with wrapped.join():
            for _ in range(2 + rank()):
                wrapped(torch.randn(3, 4)).square().mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad
                wrapped.zero_grad()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    digests: list[Any] = [None] * size()
    state = torch.cat([value.flatten() for value in model.parameters()])
    dist.all_gather_object(digests, state.tolist(), group=checked)
    assert digests == [digests[0]] * size()
