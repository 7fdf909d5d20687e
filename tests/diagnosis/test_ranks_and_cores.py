"""Cores, threads and binding: what is said of each arrangement of ranks."""

from collections.abc import Sequence

import pytest

from mpiddp.diagnosis.placement import Place, describe
from mpiddp.findings import Finding

pytestmark = pytest.mark.once


def ranks(
    cores: Sequence[set[int]],
    threads: int = 1,
    main: Sequence[set[int]] | None = None,
    asked: str | None = "1",
    node: int = 0,
) -> list[Place]:
    """Return the ranks of a node, of which each has these cores."""
    return [
        Place(
            rank=10 * node + rank,
            node=node,
            host=f"host{node}",
            given=frozenset(given),
            main=frozenset(given if main is None else main[rank]),
            threads=threads,
            asked=asked,
        )
        for rank, given in enumerate(cores)
    ]


def found(places: list[Place], start: str) -> Finding:
    (one,) = (finding for finding in describe(places) if finding.text.startswith(start))
    return one


@pytest.mark.smoke
def test_one_rank_a_core() -> None:
    places = ranks([{0}, {1}, {2}, {3}])
    assert [finding.grade for finding in describe(places)] == ["ok"] * 3
    assert [finding.text for finding in describe(places)] == [
        "ranks: 4 on 1 node (host0); 4 on this one, with 4 cores",
        "cores: each rank is bound to 1 core of its own",
        "threads: 1 a rank (OMP_NUM_THREADS=1)",
    ]


@pytest.mark.essential
@pytest.mark.parametrize(
    ("cores", "text"),
    [
        ([{0, 1}], "a rank has 2 cores and its node for itself"),
        ([{0, 1}, {0, 1}], "no rank has any of its own, all 2 share 2 cores"),
        ([{0, 1}, {2}], "each rank is bound to 1 to 2 cores of its own"),
        ([{0, 1}, {1, 2}], "each rank is bound to 2 cores, some of them to the same"),
    ],
)
def test_binding(cores: list[set[int]], text: str) -> None:
    assert found(ranks(cores), "cores: ").text == f"cores: {text}"


def test_binding_that_differs_between_nodes() -> None:
    places = ranks([{0}, {1}]) + ranks([{0, 1}, {0, 1}], node=1)
    assert found(places, "ranks: ").text.startswith("ranks: 4 on 2 nodes (host0, host1); 2 on")
    assert found(places, "cores: ").text == (
        "cores: each rank is bound to 1 core of its own; on other nodes no rank has any of its "
        "own, all 2 share 2 cores"
    )


class TestTooManyThreads:
    def test_the_most_common_fault(self) -> None:
        finding = found(ranks([{0, 1}] * 4, threads=8, asked="8"), "threads: ")
        assert finding.grade == "warning"
        assert finding.text == (
            "threads: 8 a rank (OMP_NUM_THREADS=8): 4 ranks x 8 threads on 2 cores of host0 take "
            "turns, which makes every step slow"
        )
        assert finding.remedy.startswith("export OMP_NUM_THREADS=1 ")
        assert "start 2 ranks a node at most" in finding.remedy

    def test_unset(self) -> None:
        """As many as there are cores, in each rank."""
        finding = found(ranks([set(range(16))] * 4, threads=16, asked=None), "threads: ")
        assert finding.grade == "warning"
        assert finding.text.startswith("threads: 16 a rank (OMP_NUM_THREADS is unset): 4 ranks x")
        assert finding.remedy.startswith("export OMP_NUM_THREADS=4 ")
        assert "at most" not in finding.remedy

    def test_more_ranks_than_cores(self) -> None:
        finding = found(ranks([{0, 1}] * 4), "threads: ")
        assert finding.grade == "warning"
        assert "export" not in finding.remedy
        assert finding.remedy.startswith("start 2 ranks a node at most")

    def test_on_the_second_node_only(self) -> None:
        places = ranks([{0, 1}] * 2) + ranks([{0}] * 2, node=1)
        finding = found(places, "threads: ")
        assert finding.grade == "warning"
        assert "2 ranks x 1 thread on 1 core of host1 take turns" in finding.text

    def test_exactly_as_many_as_cores(self) -> None:
        assert found(ranks([set(range(8))] * 2, threads=4), "threads: ").grade == "ok"

    def test_bound_to_fewer_than_threads(self) -> None:
        """The node has enough, but the launcher has bound the rank to one: 2 + 6 cores."""
        finding = found(ranks([{0, 1}, set(range(2, 8))], threads=4, asked="4"), "threads: ")
        assert finding.grade == "warning"
        assert "those of rank 0 share the 2 cores that it is bound to" in finding.text
        assert "slot:PE=4" in finding.remedy
        assert "export OMP_NUM_THREADS=2" in finding.remedy


class TestTiedByOpenMP:
    """OMP_PROC_BIND ties the main thread to one core, whatever the rank was given."""

    def test_all_to_the_same(self) -> None:
        finding = found(ranks([{0, 1}] * 2, main=[{0}, {0}]), "binding: ")
        assert finding.grade == "warning"
        assert finding.text == (
            "binding: OMP_PROC_BIND or OMP_PLACES ties the main threads of ranks 0, 1 on host0 to "
            "1 core"
        )
        assert finding.remedy == "bind each rank to cores of its own, or unset both"

    def test_each_to_its_own(self) -> None:
        places = ranks([{0, 1}, {2, 3}], main=[{0}, {2}])
        assert all(not finding.text.startswith("binding: ") for finding in describe(places))
