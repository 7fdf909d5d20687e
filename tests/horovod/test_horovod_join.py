"""Ranks that run out of data join, and the others go on."""

import time

import pytest
import torch
from replicas import RANK, SIZE, gather, together

import mpiddp.horovod as hvd

pytestmark = [pytest.mark.mpi, pytest.mark.sizes, pytest.mark.timeout(60)]


@pytest.mark.essential
def test_uneven_work():
    """Each rank has one batch more than the one before it."""
    means = []
    for batch in range(RANK + 1):
        handles = [
            hvd.allreduce_async(torch.full((3,), 2.0), name=f"a{batch}", op=hvd.Sum),
            hvd.allreduce_async(torch.full((2, 2), 6.0), name=f"b{batch}"),
            hvd.grouped_allreduce_async_([torch.ones(2).half(), torch.ones(1).int()], op=hvd.Sum),
        ]
        means.append([hvd.synchronize(handle) for handle in handles])
    last = hvd.join()
    with together():
        assert last == SIZE - 1
        for batch, (total, mean, (half, count)) in enumerate(means):
            left = SIZE - batch
            assert total.tolist() == [2.0 * left] * 3
            torch.testing.assert_close(mean, torch.full((2, 2), 6.0 * left / SIZE))
            assert half.tolist() == [left] * 2
            assert count.tolist() == [left]
    # And once more, in another order.
    time.sleep(0.02 * (SIZE - RANK))
    again = hvd.join()
    with together():
        assert len(set(gather(again))) == 1


@pytest.mark.mpi(min_size=2)
def test_adasum_with_a_joined_rank_leaves_what_the_others_have():
    if SIZE == 2:
        value = torch.tensor([1.0, 2.0])
        if RANK == 0:
            value = hvd.allreduce(value, op=hvd.Adasum)
        assert hvd.join() == 0 or RANK >= 0
        with together():
            assert value.tolist() == [1.0, 2.0]


@pytest.mark.thorough(keep=2)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "operation",
    [
        lambda: hvd.allgather_async(torch.ones(1)),
        lambda: hvd.broadcast_async(torch.ones(1), 0),
        lambda: hvd.alltoall_async(torch.ones(SIZE)),
        lambda: hvd.reducescatter_async(torch.ones(SIZE)),
    ],
    ids=["allgather", "broadcast", "alltoall", "reducescatter"],
)
def test_other_operations_fail_while_a_rank_has_joined(operation):
    failure = ""
    if RANK != 0:
        time.sleep(0.02)
        try:
            hvd.synchronize(operation())
        except hvd.HorovodInternalError as error:
            failure = str(error)
    hvd.join()
    with together():
        if RANK != 0:
            assert "rank 0 called hvd.join(), and only all-reduces go on" in failure


@pytest.mark.mpi(min_size=2)
def test_unnamed_operations_match_after_a_join():
    """Until then the ranks have submitted different numbers of them, failed or not."""
    for turn in range(2):
        sums, failed = [], 0
        for _ in range(RANK + turn):
            sums.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
        if RANK == SIZE - 1:
            try:
                hvd.allgather(torch.ones(3))
            except hvd.HorovodInternalError:
                failed = 1
        last = hvd.join()
        total = hvd.allreduce(torch.full((2,), float(RANK)), op=hvd.Sum)
        rows = hvd.allgather(torch.tensor([RANK]))
        everyone = hvd.allgather_object((RANK, last, failed))
        hvd.barrier()
        with together():
            left = [[rank + turn > step for rank in range(SIZE)] for step in range(len(sums))]
            assert sums == [sum(each) for each in left]
            assert total.tolist() == [sum(range(SIZE))] * 2
            assert rows.tolist() == list(range(SIZE))
            assert everyone == [(rank, last, rank == SIZE - 1) for rank in range(SIZE)]
