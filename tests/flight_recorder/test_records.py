"""The ring of records: what it keeps, for how long, and what a record costs."""

from __future__ import annotations

import threading
import timeit
from collections.abc import Iterator

import pytest
import torch

from mpiddp.flight_recorder import ring
from mpiddp.flight_recorder.call_text import call_of

pytestmark = pytest.mark.once

CALL = call_of("all_reduce", None, [torch.ones(3, 4)])


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    ring.allocate(4)
    yield
    ring.allocate(2000)


def by_id() -> dict[int, ring.Record]:
    return {record[0]: record for record in ring.snapshot()}


@pytest.mark.smoke
def test_states() -> None:
    first, second, third = (ring.begin(7, number, CALL) for number in (5, 6, 7))
    assert ring.under_way() == 3
    for record in (first, second):
        ring.started(record)
    ring.ended(first)
    ring.failed(second)
    assert ring.under_way() == 1
    told = by_id()
    assert [told[one][1:4] for one in (first, second, third)] == [
        (7, number, CALL) for number in (5, 6, 7)
    ]
    began, started, ended = told[first][6:9]
    assert 0 < began <= started <= ended
    assert told[second][8] == -1
    assert told[third][7:9] == (0, 0)
    assert told[first][9] == threading.get_ident()


def test_the_oldest_give_way() -> None:
    ids = [ring.begin(0, number, CALL) for number in range(6)]
    assert sorted(by_id()) == ids[2:]
    assert ids == list(range(ids[0], ids[0] + 6))
    ring.ended(ids[0])  # its place is another's by now
    assert all(record[8] == 0 for record in ring.snapshot())
    ring.ended(ids[4])
    assert [record[0] for record in ring.snapshot() if record[8]] == [ids[4]]


def test_an_id_of_an_old_world_ends_no_record_of_a_new_one() -> None:
    old = [ring.begin(0, number, CALL) for number in range(4)]
    ring.allocate(4)
    assert ring.oldest() is None
    assert ring.snapshot() == []
    ids = [ring.begin(0, number, CALL) for number in range(3)]
    for each in old:
        ring.ended(each)
        ring.failed(each)
    assert ring.under_way() == 3
    assert [record[0] for record in ring.snapshot()] == ids
    oldest = ring.oldest()
    assert oldest is not None
    assert oldest[0] == ids[0]


def test_the_call_of_a_number() -> None:
    other = call_of("barrier", None, [])
    first = ring.begin(3, 1, CALL)
    ring.begin(3, 2, other)
    ring.begin(4, 1, other)
    assert ring.find_call(3, 1) == (CALL, True)
    ring.ended(first)
    assert ring.find_call(3, 1) == (CALL, False)
    assert ring.find_call(3, 2) == (other, True)
    assert ring.find_call(3, 3) is None
    ring.fail_source(3)
    assert ring.under_way() == 1
    assert by_id()[first][8] > 0  # it had ended well


@pytest.mark.essential
def test_frames_of_the_caller() -> None:
    def inner() -> int:
        return ring.begin(0, 1, CALL)

    def outer() -> int:
        return inner()

    record = outer()
    told = by_id()[record]
    first = inner.__code__.co_firstlineno
    names = [(name.rpartition(".")[2], line) for name, _, line in told[10][:2]]
    assert names == [("inner", first + 1), ("outer", first + 4)]
    assert told[10][0][1] == __file__
    assert len(told[10]) == 16


def test_frames_keep_nothing_alive() -> None:
    alive = threading.Event()

    class Tensor:
        def __del__(self) -> None:
            alive.set()

    def call() -> None:
        tensor = Tensor()  # noqa: F841
        ring.begin(0, 1, CALL)

    call()
    assert alive.is_set()


def test_nothing_is_recorded() -> None:
    ring.allocate(0)
    assert ring.begin(0, 1, CALL) == -1
    ring.started(-1)
    ring.ended(-1)
    assert ring.seconds_per_bucket(10) > 0
    assert ring.snapshot() == []
    assert ring.under_way() == 0


@pytest.mark.essential
def test_costs() -> None:
    """At most 1 us an operation and 50 ns a bucket."""
    ring.allocate(2000)

    def operation() -> None:
        record = ring.begin(0, 1, CALL)
        ring.started(record)
        ring.ended(record)

    # The least of several, as timeit has it: other programs only add.
    assert min(timeit.repeat(operation, number=5000, repeat=9)) / 5000 < 1e-6
    assert min(ring.seconds_per_bucket(5000) for _ in range(9)) < 50e-9
