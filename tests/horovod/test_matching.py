"""Operations match by name: any order, errors where ranks differ, progress without a wait."""

import random
import threading
import time

import pytest
import torch
from replicas import RANK, SIZE, gather, together

import mpiddp.horovod as hvd

pytestmark = [pytest.mark.mpi, pytest.mark.sizes, pytest.mark.timeout(60)]


def submit(place: int) -> tuple[int, object]:
    """Submit an operation of one of several kinds; return its handle and its result."""
    kind, name = place % 5, f"operation {place}"
    mine = torch.full((4 * SIZE,), float(place + RANK))
    total = float(place * SIZE + sum(range(SIZE)))
    if kind == 0:
        return hvd.allreduce_async(mine, name=name, op=hvd.Sum), torch.full((4 * SIZE,), total)
    if kind == 1:
        expected = torch.arange(SIZE) + float(place)
        return hvd.allgather_async(mine[:1], name=name), expected
    if kind == 2:
        root = place % SIZE
        return hvd.broadcast_async_(mine, root, name), torch.full((4 * SIZE,), float(place + root))
    if kind == 3:
        return hvd.reducescatter_async(mine, name, op=hvd.Sum), torch.full((4,), total)
    handle = hvd.grouped_allreduce_async_([mine, mine[:2].double()], name=name, op=hvd.Max)
    return handle, float(place + SIZE - 1)


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("seed", range(2))
def test_any_order(seed):
    order = list(range(60))
    random.Random(1000 * seed + RANK).shuffle(order)
    handles, expected = {}, {}
    for place in order[:40]:
        handles[place], expected[place] = submit(place)
    results = {}
    for place in order[:10]:  # some ranks wait while others still submit
        if all(place in theirs for theirs in gather(order[:40])):
            results[place] = hvd.synchronize(handles.pop(place))
    for place in order[40:]:
        handles[place], expected[place] = submit(place)
    random.Random(RANK).shuffle(order)
    for place in order:
        if place in handles:
            results[place] = hvd.synchronize(handles[place])
    with together():
        for place, result in results.items():
            if isinstance(result, tuple):
                assert all((each == expected[place]).all() for each in result), place
            else:
                assert torch.equal(result, expected[place]), place


def test_unnamed_operations_match_by_their_order_per_kind():
    """A rank may wait for one kind first, another rank for the other."""
    if RANK % 2:
        gathered = hvd.allgather_async(torch.tensor([RANK]))
        first = hvd.allreduce_async(torch.tensor([1.0]), op=hvd.Sum)
    else:
        first = hvd.allreduce_async(torch.tensor([1.0]), op=hvd.Sum)
        gathered = hvd.allgather_async(torch.tensor([RANK]))
    second = hvd.allreduce_async(torch.tensor([2.0]), op=hvd.Sum)
    with together():
        assert hvd.synchronize(second).item() == 2 * SIZE
        assert hvd.synchronize(first).item() == SIZE
        assert hvd.synchronize(gathered).tolist() == list(range(SIZE))


DIFFERENT = {
    "shape": lambda odd: hvd.allreduce_async(torch.ones(3 + odd, 2), name="x"),
    "shape ": lambda odd: hvd.allgather_async(torch.ones(2, 3 + odd), name="x"),
    "data type": lambda odd: hvd.broadcast_async(
        torch.ones(2, dtype=torch.float64 if odd else torch.float32), 0, name="x"
    ),
    "reduction": lambda odd: hvd.allreduce_async(
        torch.ones(2), name="x", op=hvd.Min if odd else hvd.Max
    ),
    "factors": lambda odd: hvd.allreduce_async(torch.ones(2), name="x", postscale_factor=1 + odd),
    "root rank": lambda odd: hvd.broadcast_async(torch.ones(2), int(odd), name="x"),
    "number of tensors": lambda odd: hvd.grouped_allreduce_async(
        [torch.ones(2)] * (1 + odd), name="x"
    ),
    "data type ": lambda odd: hvd.alltoall_async(
        torch.ones(SIZE, dtype=torch.int32 if odd else torch.int64), name="x"
    ),
    "shape  ": lambda odd: hvd.reducescatter_async(torch.ones(4 + odd), name="x"),
}


@pytest.mark.essential(keep=1)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", DIFFERENT)
def test_a_difference_is_an_error_on_all_ranks(what):
    odd = RANK == SIZE - 1
    handle = DIFFERENT[what](odd)
    with together():
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.synchronize(handle)
        text = str(caught.value)
        assert f"the ranks differ in the {what.strip()} of " in text
        others = ", ".join(map(str, range(SIZE - 1)))
        assert f"rank{'s' if SIZE > 2 else ''} {others}: " in text
        assert f"; rank {SIZE - 1}: " in text
        assert hvd.synchronize(handle) is None
    # The name can be used again.
    with together():
        assert hvd.allreduce(torch.ones(1), name="x").item() == 1


@pytest.mark.mpi(min_size=2)
def test_a_name_that_waits_already():
    if RANK == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
        with pytest.raises(ValueError, match=r"allreduce\.twice was submitted"):
            hvd.allreduce_async(torch.ones(1), name="twice")
        other_kind = hvd.broadcast_async(torch.ones(1), 0, name="twice")
    gather(None)
    if RANK != 0:
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
        other_kind = hvd.broadcast_async(torch.ones(1), 0, name="twice")
    with together():
        assert hvd.synchronize(handle).item() == 1
        assert hvd.synchronize(other_kind).item() == 1


@pytest.mark.mpi(min_size=2)
def test_poll():
    late = SIZE - 1
    handle = hvd.allreduce_async(torch.ones(1), name="polled") if late != RANK else None
    with together():
        if handle is not None:
            for _ in range(20):
                assert not hvd.poll(handle)
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(1), name="polled")
    while not hvd.poll(handle):
        time.sleep(1e-3)
    with together():
        assert hvd.synchronize(handle).item() == 1
        with pytest.raises(ValueError, match="no handle"):
            hvd.poll(handle)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("waiting", [0, 1])
def test_a_rank_that_computes_keeps_nobody_waiting(waiting):
    """Only one rank waits; the others have submitted and ask for nothing."""
    handles = [hvd.allreduce_async(torch.ones(1), name=f"c{place}") for place in range(5)]
    if waiting == RANK:
        results = [hvd.synchronize(handle) for handle in handles]
    seen = gather(None)  # outside of Horovod: whoever is here does not drive it
    if waiting != RANK:
        results = [hvd.synchronize(handle) for handle in handles]
    with together():
        assert len(seen) == SIZE
        assert all(result.item() == 1 for result in results)


def test_several_threads_of_a_rank():
    results: dict[int, list[float]] = {}

    def run(which: int) -> None:
        names = [f"thread {which} {place}" for place in range(10)]
        values = [hvd.allreduce(torch.tensor([float(which)]), name=name) for name in names]
        results[which] = [value.item() for value in values]

    threads = [threading.Thread(target=run, args=(which,)) for which in range(3)]
    random.Random(RANK).shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with together():
        assert results == {which: [float(which)] * 10 for which in range(3)}


def test_the_thread_sleeps_when_nothing_is_under_way():
    hvd.allreduce(torch.ones(1))
    time.sleep(0.05)
    (thread,) = [each for each in threading.enumerate() if each.name == "mpiddp.horovod"] or [None]
    began = time.thread_time()
    with together():
        if thread is not None:  # none is needed in a world of one
            assert thread.daemon
            clock = time.pthread_getcpuclockid(thread.ident)
            before = time.clock_gettime(clock)
            time.sleep(0.5)
            assert time.clock_gettime(clock) - before < 0.02
        assert began >= 0
