"""The words in which the ranks of a node compare their calls."""

import os
from typing import Any

import pytest
import torch

from mpiddp.process_group.call_table import (
    BROKEN,
    BYTES,
    DIFFERS,
    FITS,
    CallPage,
    CallTable,
    balance,
    call_digest,
)
from mpiddp.system import memory_files
from mpiddp.transports.shared_memory import Mapping


@pytest.fixture
def table() -> CallTable:
    descriptor = memory_files.create("test")
    os.ftruncate(descriptor, BYTES)
    return CallTable(Mapping(descriptor, BYTES, own=True), [0, 1])


def enter(page: CallPage, number: int, name: str, detail: object, tensors: Any) -> int:
    return page.enter(number, call_digest(number, name, detail, tensors))


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
            assert enter(page, number, *first) == FITS
            assert enter(page, number, *second) == (FITS if one == other else DIFFERS)


def test_bytes_may_be_called_otherwise(table: CallTable) -> None:
    """What only moves data does not care for the dtype, as with Gloo."""
    page = table.page(table.take(2))
    assert enter(page, 1, "broadcast", 0, [torch.ones(4)]) == FITS
    assert enter(page, 1, "broadcast", 0, [torch.ones(16, dtype=torch.uint8)]) == FITS


def test_ranks_that_are_apart(table: CallTable) -> None:
    """A rank that is so far behind that its word is gone is not compared, and harms nobody."""
    page = table.page(table.take(2))
    for number in range(1, 2000):
        assert enter(page, number, "broadcast", 0, [torch.ones(number)]) == FITS
    assert enter(page, 1, "broadcast", 0, [torch.ones(7)]) == FITS
    assert enter(page, 1999, "broadcast", 0, [torch.ones(7)]) == DIFFERS


def test_after_four_thousand_million_collectives(table: CallTable) -> None:
    page = table.page(table.take(2))
    for number in range(2**32 - 3, 2**32 + 3):
        assert enter(page, number, "barrier", None, ()) == FITS
        assert enter(page, number, "barrier", None, ()) == FITS
        assert enter(page, number, "broadcast", 0, ()) == DIFFERS


def test_refused_by_all_or_by_some(table: CallTable) -> None:
    page = table.page(table.take(2))
    assert page.refuse(1) == FITS
    assert page.refuse(1) == FITS
    assert enter(page, 1, "barrier", None, ()) == DIFFERS
    assert enter(page, 2, "barrier", None, ()) == FITS
    assert page.refuse(2) == DIFFERS


def test_broken(table: CallTable) -> None:
    page, other = table.page(table.take(2)), table.page(table.take(2))
    page.break_at(7)
    page.break_at(9)
    assert page.broken == 7
    assert enter(page, 10, "barrier", None, ()) == BROKEN
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
        assert page.exchange(number, 0, [0, 4, 8], [0, 5, 2**40], range(3)) == -1
        assert page.exchange(number, 1, [5, 0, 7], [4, 0, 9], range(3)) == -1
    assert page.exchange(4999, 2, [2**40, 9, 0], [8, 7, 0], range(3)) == -1
    assert page.exchange(4998, 2, [2**41, 9, 0], [8, 7, 0], range(3)) == 0
    assert page.exchange(4997, 2, [2**40, 9, 0], [8, 6, 0], range(3)) == 1
    assert page.exchange(1, 2, [1, 1, 0], [1, 1, 0], range(3)) == -1, "too far behind to know"
    assert enter(page, 4999, "gather", 0, ()) == FITS


def test_too_many_ranks_for_pairs(table: CallTable) -> None:
    page = table.page(table.take(100))
    for rank in range(2):
        assert page.exchange(1, rank, [rank] * 100, [0] * 100, range(100)) == -1


@pytest.mark.parametrize("ranks", [3, 300])
def test_messages_of_a_root(ranks: int, table: CallTable) -> None:
    """Each other rank says what it sends the root, or gets from it; the root says all."""
    page = table.page(table.take(ranks))
    every, root = range(ranks), 2
    nothing = [0] * ranks
    for number in range(1, 5000 if ranks == 3 else 50):
        own = [0, 0, 10 + number] + [0] * (ranks - 3)
        assert page.exchange(number, 0, own, nothing, every, root) == -1
        all_of = [10 + number] + [7 * place for place in every[1:]]
        assert page.exchange(number, root, nothing, all_of, every, root) == -1
        assert page.exchange(number, 1, [0, 0, *nothing[2:]], own, every, root) == root
    assert page.exchange(number, 1, [0, 0, 7, *nothing[3:]], nothing, every, root) == -1
    # From the root; who does not share its page compares nothing.
    assert page.exchange(number + 1, 0, nothing, [0, 0, 5, *nothing[3:]], every, root) == -1
    assert page.exchange(number + 1, 1, nothing, [0, 0, 5, *nothing[3:]], [0, 1], root) == -1
    assert page.exchange(number + 1, root, [6, 4, 0, *nothing[3:]], nothing, every, root) == 0


def test_only_ranks_of_the_node_are_compared(table: CallTable) -> None:
    page = table.page(table.take(2))
    assert page.exchange(1, 0, [0, 4, 8], [0, 5, 8], [0, 1]) == -1
    assert page.exchange(1, 1, [5, 0, 7], [4, 0, 9], [0, 1]) == -1
    assert page.exchange(2, 0, [0, 4, 8], [0, 5, 8], [0, 1]) == -1
    assert page.exchange(2, 1, [6, 0, 7], [4, 0, 9], [0, 1]) == 0


def test_balance() -> None:
    """The sum over all ranks is zero if both ends of each message agree."""
    sizes = [[3, 1, 4], [1, 5, 9], [2, 6, 5]]

    def total(seen: list[list[int]], size: int = 4) -> int:
        columns = list(zip(*seen, strict=True))
        return sum(balance(rank, size, sizes[rank], columns[rank]) for rank in range(3)) % 2**64

    assert total(sizes) == 0
    for rank in range(3):
        for other in range(3):
            wrong = [list(row) for row in sizes]
            wrong[rank][other] += 1
            assert total(wrong) != 0
    swapped = [list(row) for row in sizes]
    swapped[0][1], swapped[1][0] = swapped[0][0], swapped[0][1]
    assert total(swapped) != 0
