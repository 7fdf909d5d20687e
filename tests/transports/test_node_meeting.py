"""Rounds in which the ranks of a node meet."""

import time

import pytest
from mpi4py import MPI
from replicas import RANK, SIZE, gather, together

from mpiddp.ddp.node_parts import owner_of
from mpiddp.mpi.nodes import is_crowded, ranks_of_node
from mpiddp.transports.node_meeting import NodeMeeting
from mpiddp.transports.shared_buckets import SharedBuckets
from mpiddp.transports.shared_memory import allocate_common

pytestmark = [pytest.mark.mpi, pytest.mark.sizes]


@pytest.fixture(params=[False, True], ids=["spins", "sleeps"])
def meeting(request: pytest.FixtureRequest) -> NodeMeeting:
    return NodeMeeting(MPI.COMM_WORLD, crowded=request.param or is_crowded(MPI.COMM_WORLD))


@pytest.mark.essential(keep=1)
def test_all_have_come(meeting: NodeMeeting) -> None:
    """Nobody leaves a round before all are there, and each reads what the others brought."""
    log = allocate_common(MPI.COMM_WORLD, 8, [(0, 8)])
    done = memoryview(log).cast("Q")
    for step in range(300):
        if step % SIZE == RANK:
            time.sleep(1e-4)
            done[0] = step + 1
        meeting.arrive(step * 100 + RANK)
        assert meeting.wait(10)
        assert done[0] >= step + 1
        assert meeting.numbers_of_all() == [step * 100 + rank for rank in range(SIZE)]
    assert meeting.failed is None


def test_who_is_missing(meeting: NodeMeeting) -> None:
    late = SIZE - 1
    if late != RANK or SIZE == 1:
        meeting.arrive()
    gather(0)
    with together():
        if late != RANK:
            assert not meeting.wait(0.2)
            assert meeting.missing() == [late]
    if late == RANK and SIZE > 1:
        meeting.arrive()
    with together():
        assert meeting.wait(10)
        assert meeting.missing() == []


@pytest.mark.parametrize("failing", ["one", "all"])
def test_failure_ends_every_wait(meeting: NodeMeeting, failing: str) -> None:
    if RANK == SIZE - 1 or failing == "all":
        meeting.fail()
    else:
        meeting.arrive()
        assert meeting.wait(10)
    with together():
        for _ in range(3):
            meeting.arrive()
            assert meeting.wait(10)
        if failing == "one":
            assert meeting.failed == SIZE - 1
        assert meeting.failed in range(SIZE)


def test_owners() -> None:
    """Python and C give the same chunks to the same ranks, and each rank gets its share."""
    node = ranks_of_node(MPI.COMM_WORLD)
    for size in (1, 100, 64 << 10, (5 << 20) + 12):
        buckets = SharedBuckets(node, [size, size], 1 << 16)
        for bucket in range(2):
            owners = buckets.owners(bucket)
            chunks = -(-size // (1 << 16))
            expected = [owner_of(chunk, chunks, bucket, SIZE) for chunk in range(chunks)]
            with together():
                assert owners == expected
                counts = [owners.count(rank) for rank in range(SIZE)]
                assert max(counts) - min(counts) <= 1
    node.Free()


def test_writes_that_are_private() -> None:
    """Until they are kept, and only those of the rank that keeps them."""
    mapping = allocate_common(MPI.COMM_WORLD, 100_000, [(0, 100_000)])
    file = mapping.another()
    view, shared = memoryview(mapping), memoryview(file)
    gather(0)
    mapping.make_private()
    with together():
        assert not mapping.has_own_pages()
        assert mapping.changes(file) == (0, [])
    view[RANK * 10_000] = RANK + 1
    page = RANK * 10_000 // 4096 * 4096
    with together():
        assert view[RANK * 10_000] == RANK + 1
        assert mapping.has_own_pages()
        assert mapping.changes(file)[1] == [(page, page + 4096)]
    digests = gather(mapping.changes(file)[0])
    with together():
        assert 0 not in digests
        assert len(set(digests)) == SIZE
    gather(0)
    # What another process writes is seen in all other pages.
    if RANK == SIZE - 1:
        shared[99_999] = 7
    gather(0)
    with together():
        assert view[99_999] == 7
        assert mapping.changes(file)[1] == [(page, page + 4096)]
    gather(0)
    view[RANK * 10_000] = shared[RANK * 10_000]
    with together():
        assert mapping.has_own_pages()
        assert mapping.changes(file) == (0, [])
    view[RANK * 10_000] = RANK + 1
    gather(0)
    if RANK == 0:
        mapping.keep_writes(file)
    with together():
        assert mapping.own_ranges(0, mapping.size) == [(page, page + 4096)]
        assert mapping.own_ranges(page, page + 4096) == [(page, page + 4096)]
        assert mapping.own_ranges(page + 4096, mapping.size) == []
    mapping.forget_writes()
    gather(0)
    with together():
        assert mapping.own_ranges(0, mapping.size) == []
        assert view[0] == 1
        assert all(view[rank * 10_000] == 0 for rank in range(1, SIZE))
