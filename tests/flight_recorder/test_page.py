"""The page of memory that tells a node's other ranks what this process did last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest

from mpiddp.flight_recorder import page, ring, sources
from mpiddp.watch import node_states
from mpiddp.watch.forming_group import FormingGroup, NamedWait

pytestmark = pytest.mark.once


@pytest.fixture
def descriptor() -> Iterator[int]:
    ring.allocate(4)
    yield page.share()
    ring.allocate(2000)


def words(descriptor: int) -> str:
    """Return what another process of the node would say."""
    return node_states._last(os.pread(descriptor, page.BYTES, 0))


def test_a_wait_has_its_own_name(descriptor: int) -> None:
    wait = NamedWait("a test of names", 2, 0, timedelta(seconds=1))
    wait.enter()
    with wait.recorded():
        told = "the last it began was a test of names, #1 (not ended, begun 0 s ago)"
        assert words(descriptor) == told
    assert "(ended 0 s ago)" in words(descriptor)


def test_a_group_whose_place_another_has(descriptor: int) -> None:
    """There are places for 48."""
    group = FormingGroup("7", range(2), 0, timedelta(seconds=1))
    with group.recorded():
        assert "new_group, #0 of group '7, being made' (not ended" in words(descriptor)
        for _ in range(48):
            sources.add(sources.Source("later", range(2)))
        assert words(descriptor).startswith("the last it began was new_group (not ended")


def test_an_operation_that_is_given_up(descriptor: int) -> None:
    group = FormingGroup("8", range(2), 0, timedelta(seconds=1))
    ring.begin(group.source.number, 0, group.last)
    ring.fail_source(group.source.number)
    assert "new_group, #0 of group '8, being made' (given up, begun 0 s ago)" in words(descriptor)
