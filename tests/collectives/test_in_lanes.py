"""Large collectives of a group over several nodes, in lanes."""

import gc
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import patience
import pretended_nodes
import pytest
import torch
import torch.distributed as dist
from pretended_nodes import group_in_lanes
from replicas import RANK, SIZE, together

from mpiddp.collectives import way_table
from mpiddp.collectives.group_lanes import count_open
from mpiddp.process_group import node_lanes

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.sizes]

# Less than a cache line, slices that some ranks have none of, and several pieces of each stream.
COUNTS = (1, 15, 17, 4099, 200_003, 1_500_007)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# torch 2.13 renamed these and warns at the old names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let collectives of any size go in lanes."""
    for name in way_table.lanes_from():
        monkeypatch.setitem(way_table.lanes_from(), name, 0)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make a group over nodes of two ranks."""
    with group_in_lanes(monkeypatch) as made:
        yield made


class Case:
    """One collective of each kind, with what it is to give.

    Values are small integers, whose sums are exact in every dtype.
    """

    def __init__(self, group: Any, count: int, dtype: torch.dtype, root: int = 0) -> None:
        self._group, self._root = group, root
        every = [(torch.arange(count) * (rank + 1) % 13).to(dtype) for rank in range(SIZE)]
        self._own = every[RANK]
        # What this rank has for each, and what each has for this one.
        self._parts = [self._own + 5 * rank for rank in range(SIZE)]
        for_us = [each + 5 * RANK for each in every]
        self._rows = [torch.zeros(count, dtype=dtype) for _ in every]
        self._out, self._row = torch.zeros(count, dtype=dtype), torch.zeros(count * SIZE).to(dtype)
        total, mine = sum(each.double() for each in every), sum(each.double() for each in for_us)
        assert isinstance(total, torch.Tensor)
        assert isinstance(mine, torch.Tensor)
        self.expected = {
            "all_reduce": [total.to(dtype)],
            "mean": [(total / SIZE).to(dtype)],
            "all_gather": every,
            "all_gather_single": [torch.cat(every)],
            "reduce_scatter": [mine.to(dtype)],
            "reduce_scatter_single": [mine.to(dtype)],
            "broadcast": [every[root]],
        }

    def begin(self, kind: str) -> "tuple[Any, list[torch.Tensor]]":
        """Return a Work, and what gets the result."""
        group, own, out = self._group, self._own.clone(), self._out.clone()
        rows, row = [each.clone() for each in self._rows], self._row.clone()
        mean = dist.ReduceOp.AVG
        calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[torch.Tensor]]] = {
            "all_reduce": (dist.all_reduce, (own,), [own]),
            "mean": (dist.all_reduce, (own, mean), [own]),
            "all_gather": (dist.all_gather, (rows, own), rows),
            "all_gather_single": (all_gather_single, (row, own), [row]),
            "reduce_scatter": (dist.reduce_scatter, (out, self._parts), [out]),
            "reduce_scatter_single": (
                reduce_scatter_single,
                (out, torch.cat(self._parts)),
                [out],
            ),
            "broadcast": (dist.broadcast, (own, self._root), [own]),
        }
        call, arguments, results = calls[kind]
        return call(*arguments, group=group, async_op=True), results

    def check(self, kind: str, results: list[torch.Tensor]) -> None:
        for result, right in zip(results, self.expected[kind], strict=True):
            assert torch.equal(result, right), kind


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
def test_each_kind(count: int, dtype: torch.dtype, group: Any) -> None:
    """All of them under way at a time, waited for in another order on each rank."""
    case = Case(group, count, dtype, root=count % SIZE)
    begun = [(kind, *case.begin(kind)) for kind in case.expected]
    begun = begun[RANK:] + begun[:RANK]
    for _, work, _ in begun:
        work.wait()
    with together():
        for kind, _, results in begun:
            case.check(kind, results)


def test_nothing_at_all(group: Any) -> None:
    """Tensors without elements, between others."""
    for count in (0, 100, 0):
        case = Case(group, count, torch.float32)
        for kind in case.expected:
            work, results = case.begin(kind)
            work.wait()
            with together():
                case.check(kind, results)


def test_inputs_stay_as_they_are(group: Any) -> None:
    """An output may be a part of the input, and strides may be any."""
    whole = torch.arange(4 * SIZE, dtype=torch.float32).repeat_interleave(1000) + RANK
    before, own = whole.clone(), whole.view(SIZE, -1)[RANK]
    total = reduce_scatter_of(before)
    reduce_scatter_single(own, whole, group=group)
    columns = torch.arange(6000, dtype=torch.float32).view(2000, 3)[:, 1] + RANK
    expected = columns * SIZE + sum(range(SIZE)) - RANK * SIZE
    dist.all_reduce(columns, group=group)
    gathered = torch.zeros(SIZE, 500)
    gathered[RANK] = RANK
    all_gather_single(gathered.view(-1), gathered[RANK], group=group)
    with together():
        assert torch.equal(own, total)
        others = [rank for rank in range(SIZE) if rank != RANK]
        assert torch.equal(whole.view(SIZE, -1)[others], before.view(SIZE, -1)[others])
        assert torch.equal(columns, expected)
        assert torch.equal(gathered, torch.arange(SIZE).float()[:, None].expand(SIZE, 500))


def reduce_scatter_of(whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sum over ranks that differ by their numbers."""
    return whole.view(SIZE, -1)[RANK] * SIZE + sum(range(SIZE)) - RANK * SIZE


def test_other_reductions_and_dtypes(group: Any) -> None:
    """What the kernels do not add goes as before, also between others that are under way."""
    works = []
    for number in range(3):
        floats = torch.full((50_000,), float(RANK + number))
        largest, whole = floats.clone(), torch.full((50_000,), RANK + number)
        works += [
            (dist.all_reduce(floats, group=group, async_op=True), floats, number),
            (dist.all_reduce(largest, dist.ReduceOp.MAX, group=group, async_op=True), largest, -1),
            (dist.all_reduce(whole, group=group, async_op=True), whole, number),
        ]
    for work, _, _ in works:
        work.wait()
    with together():
        for place, (_, tensor, number) in enumerate(works):
            right = SIZE - 1 + place // 3 if number < 0 else sum(range(SIZE)) + SIZE * number
            assert torch.equal(tensor, torch.full_like(tensor, right))


def test_large_means_stay_finite(group: Any) -> None:
    """A sum may overflow where the mean does not."""
    tensor = torch.full((100_000,), 2e38)
    half = torch.full((100_000,), 6e4, dtype=torch.float16)
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
    dist.all_reduce(half, dist.ReduceOp.AVG, group=group)
    with together():
        assert torch.equal(tensor, torch.full_like(tensor, 2e38))
        assert torch.equal(half, torch.full_like(half, 6e4))


def test_progress_while_nobody_waits(group: Any) -> None:
    tensors = [torch.ones(1_000_000) for _ in range(3)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    until = time.monotonic() + patience.enough(10)
    while time.monotonic() < until and not all(bool((t == SIZE).all()) for t in tensors):
        time.sleep(0.02)
    with together():
        assert all(bool((t == SIZE).all()) for t in tensors)
    for work in works:
        assert work is not None
        work.wait()


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others name it, the group is broken on all, and the next group works."""
    with group_in_lanes(monkeypatch, timeout=timedelta(seconds=2)) as part:
        tensor, said = torch.ones(300_000), ""
        dist.all_reduce(tensor, group=part)
        if RANK != SIZE - 1:
            # It has compared its call, and does not begin.
            try:
                dist.all_reduce(tensor, group=part)
            except RuntimeError as error:
                said = str(error)
        dist.barrier()
        with together():
            assert RANK == SIZE - 1 or "has waited 2 s" in said or "is broken" in said
        with pytest.raises(RuntimeError, match="is broken"):
            dist.all_reduce(tensor, group=part)
    with group_in_lanes(monkeypatch) as again:
        tensor = torch.ones(300_000)
        dist.all_reduce(tensor, group=again)
        with together():
            assert torch.equal(tensor, torch.full_like(tensor, SIZE))


def test_a_rank_that_stops_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has begun, and its engine does not go on: the wait has a limit there as well."""
    with group_in_lanes(monkeypatch, timeout=timedelta(seconds=2)) as made:
        part: Any = made
        tensor, said = torch.ones(3_000_000), ""
        if RANK == 0:
            # Its call is compared and then begins only when it is told to, which nobody does.
            lanes = part.lanes
            monkeypatch.setattr(type(part), "lanes", property(lambda group: lanes))
            lanes.later = True
        try:
            dist.all_reduce(tensor, group=part)
        except RuntimeError as error:
            said = str(error)
        dist.barrier()
        with together():
            assert "has waited 2 s" in said or "is broken" in said


def test_groups_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of them one after the other: no lanes stay open, no descriptor or memory is lost."""

    def use() -> None:
        with group_in_lanes(monkeypatch) as part:
            tensor = torch.ones(10_000)
            dist.all_reduce(tensor, group=part)
            assert tensor[0] == SIZE

    def held() -> "tuple[int, int, int]":
        gc.collect()
        # What /proc/self/status says of it may be some MB old.
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        anonymous = next(line for line in lines if line.startswith("Anonymous:"))
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        return descriptors, int(anonymous.split()[1]), count_open()

    for _ in range(20):
        use()
    before = held()
    for _ in range(100):
        use()
    after = held()
    with together():
        assert after[0] <= before[0] + 2
        assert after[1] <= before[1] + (16 << 10)
        assert after[2] == before[2]


def test_no_more_groups_than_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes some communicators. Where one rank has enough, the next group has none."""
    with group_in_lanes(monkeypatch) as first:
        most = count_open() if RANK == 1 else 64
        monkeypatch.setattr(node_lanes, "_MOST_GROUPS", most)
        with monkeypatch.context() as patch:
            patch.setattr(pretended_nodes, "REQUIRES_LANES", False)
            with group_in_lanes(monkeypatch) as second:
                lanes = second.state.lanes  # type: ignore[attr-defined]
                tensor = torch.ones(600_000)
                dist.all_reduce(tensor, group=second)
                with together():
                    assert lanes is None
                    assert tensor[-1] == SIZE
        dist.barrier(group=first)
    monkeypatch.setattr(node_lanes, "_MOST_GROUPS", most)
    with group_in_lanes(monkeypatch):  # there is one less
        pass
