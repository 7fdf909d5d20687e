"""The words in which the ranks of a node compare their calls."""

import os

import pytest
import torch

from mpiddp.process_group.call_table import BROKEN, BYTES, DIFFERS, FITS, CallTable
from mpiddp.system import memory_files
from mpiddp.transports.shared_memory import Mapping


@pytest.fixture
def table() -> CallTable:
    descriptor = memory_files.create("test")
    os.ftruncate(descriptor, BYTES)
    return CallTable(Mapping(descriptor, BYTES, own=True), [0, 1])


def test_sizes_names_roots_and_dtypes(table: CallTable) -> None:
    page = table.page(table.take(2))
    calls = [
        ("all_reduce", 0, [torch.ones(3)]),
        ("all_reduce", 1, [torch.ones(3)]),
        ("all_reduce", 0, [torch.ones(3, dtype=torch.int32)]),
        ("all_reduce", 0, [torch.ones(4)]),
        ("all_reduce", 0, [torch.ones(3), torch.ones(3)]),
        ("broadcast", 0, [torch.ones(3)]),
        ("broadcast", 0, []),
        ("broadcast", (0, 1), []),
    ]
    number = 0
    for one, first in enumerate(calls):
        for other, second in enumerate(calls):
            number += 1
            assert page.enter(number, *first) == FITS
            assert page.enter(number, *second) == (FITS if one == other else DIFFERS)


def test_bytes_may_be_called_otherwise(table: CallTable) -> None:
    """What only moves data does not care for the dtype, as with Gloo."""
    page = table.page(table.take(2))
    assert page.enter(1, "broadcast", 0, [torch.ones(4)]) == FITS
    assert page.enter(1, "broadcast", 0, [torch.ones(16, dtype=torch.uint8)]) == FITS


def test_ranks_that_are_apart(table: CallTable) -> None:
    """A rank that is so far behind that its word is gone is not compared, and harms nobody."""
    page = table.page(table.take(2))
    for number in range(1, 2000):
        assert page.enter(number, "broadcast", 0, [torch.ones(number)]) == FITS
    assert page.enter(1, "broadcast", 0, [torch.ones(7)]) == FITS
    assert page.enter(1999, "broadcast", 0, [torch.ones(7)]) == DIFFERS


def test_after_four_thousand_million_collectives(table: CallTable) -> None:
    page = table.page(table.take(2))
    for number in range(2**32 - 3, 2**32 + 3):
        assert page.enter(number, "barrier", None, ()) == FITS
        assert page.enter(number, "barrier", None, ()) == FITS
        assert page.enter(number, "broadcast", 0, ()) == DIFFERS


def test_refused_by_all_or_by_some(table: CallTable) -> None:
    page = table.page(table.take(2))
    assert page.refuse(1) == FITS
    assert page.refuse(1) == FITS
    assert page.enter(1, "barrier", None, ()) == DIFFERS
    assert page.enter(2, "barrier", None, ()) == FITS
    assert page.refuse(2) == DIFFERS


def test_broken(table: CallTable) -> None:
    page, other = table.page(table.take(2)), table.page(table.take(2))
    page.break_at(7)
    page.break_at(9)
    assert page.broken == 7
    assert page.enter(10, "barrier", None, ()) == BROKEN
    assert page.refuse(10) == FITS
    assert other.broken == 0


def test_a_page_is_free_when_all_have_left_it(table: CallTable) -> None:
    index = table.take(2)
    one, other = table.page(index), table.page(index)
    one.break_at(3)
    one.release()
    one.release()
    assert table.take(1) != index
    other.release()
    assert table.take(1) == index
    assert table.page(index).broken == 0
    while table.take(1) >= 0:
        pass
    table.page(5).release()
    assert table.take(2) == 5


def test_both_ends_of_messages(table: CallTable) -> None:
    page = table.page(table.take(3))
    for number in range(1, 5000):
        assert page.exchange(number, 0, [0, 4, 8], [0, 5, 2**40]) == -1
        assert page.exchange(number, 1, [5, 0, 7], [4, 0, 9]) == -1
    assert page.exchange(4999, 2, [2**40, 9, 0], [8, 7, 0]) == -1
    assert page.exchange(4998, 2, [2**41, 9, 0], [8, 7, 0]) == 0
    assert page.exchange(4997, 2, [2**40, 9, 0], [8, 6, 0]) == 1
    assert page.exchange(1, 2, [1, 1, 0], [1, 1, 0]) == -1, "too far behind to know"
    assert page.enter(4999, "gather", 0, ()) == FITS


def test_too_many_ranks_for_pairs(table: CallTable) -> None:
    page = table.page(table.take(100))
    for rank in range(2):
        assert page.exchange(1, rank, [rank] * 100, [0] * 100) == -1
