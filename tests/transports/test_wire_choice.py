"""How a chunk travels between nodes: groups, the choice, and its table of sizes."""

import pytest

from mpiddp.transports.wire_choice import WAYS, choose, groups_of, thresholds

pytestmark = pytest.mark.once


def test_groups_divide_the_nodes() -> None:
    expected = {4: 2, 6: 2, 9: 3, 12: 3, 14: 2, 35: 5, 64: 8, 128: 8, 2048: 32}
    assert {nodes: groups_of(nodes) for nodes in expected} == expected
    for nodes in (1, 2, 3, 5, 7, 13, 127, 2039):
        assert groups_of(nodes) is None


@pytest.mark.parametrize(
    ("nodes", "chunk_bytes", "element_bytes", "name"),
    [
        (2, 1 << 19, 4, "direct"),
        (8, 1 << 19, 2, "direct"),
        (64, 1 << 19, 4, "two-level"),
        (1024, 1 << 19, 2, "two-level"),
        # No groups, and a small chunk: few messages are best, even of twice the bytes.
        (127, 1 << 10, 2, "iallreduce"),
        (127, 1 << 20, 2, "direct"),
        (2048, 1 << 10, 4, "iallreduce"),
    ],
)
def test_what_costs_least_is_taken(
    nodes: int, chunk_bytes: int, element_bytes: int, name: str
) -> None:
    wire = choose(nodes, chunk_bytes, element_bytes, None)
    assert wire == choose(nodes, chunk_bytes, element_bytes, "auto")
    assert wire.name == name
    assert wire.group == (groups_of(nodes) if name == "two-level" else nodes)
    assert all(other in wire.reason for other in {"direct", "iallreduce"} - {name})
    assert ("16 bits travel as 32" in wire.reason) == (name == "iallreduce" and element_bytes == 2)


def test_16_bits_leave_iallreduce_for_smaller_chunks() -> None:
    (_, _), (wide, _) = thresholds(127, 4, 1 << 20, None)
    (_, _), (narrow, _) = thresholds(127, 2, 1 << 20, None)
    assert narrow < wide


def test_the_table_says_what_the_choice_says() -> None:
    for nodes in (2, 8, 13, 16, 127, 128, 2048):
        for element_bytes in (2, 4, 8):
            table = thresholds(nodes, element_bytes, 1 << 20, None)
            assert table[0][0] == 0
            for size in [1 << power for power in range(21)]:
                wire = [each for begin, each in table if begin <= size][-1]
                assert wire.name == choose(nodes, size, element_bytes, None).name


def test_what_is_asked_for_is_taken() -> None:
    for name in WAYS:
        ((begin, wire),) = thresholds(12, 2, 1 << 20, name)
        assert (begin, wire.name, wire.reason) == (0, name, "asked for")
        assert wire.group == (3 if name == "two-level" else 12)
    for nodes in (2, 3, 13):
        with pytest.raises(ValueError, match=f"^MPIDDP_WIRE is two-level, but {nodes} nodes make"):
            choose(nodes, 1 << 19, 4, "two-level")
