"""Memory, arithmetic and progress: measured here, and what is said of the figures."""

import pytest
from replicas import RANK, SIZE, together

from mpiddp.diagnosis import host_speed, progress
from mpiddp.diagnosis.host_speed import Speed, describe
from mpiddp.diagnosis.measuring import slow_ones
from mpiddp.diagnosis.progress import Progress


def speeds(*nodes: "list[tuple[float, float]]") -> list[Speed]:
    """Return the ranks of nodes, each with GB/s and GFLOP/s."""
    places = [(node, pair) for node, ranks in enumerate(nodes) for pair in ranks]
    return [
        Speed(rank, node, f"n{node}", memory * 1e9, arithmetic * 1e9)
        for rank, (node, (memory, arithmetic)) in enumerate(places)
    ]


def warnings(*nodes: "list[tuple[float, float]]") -> list[str]:
    return [each.text for each in describe(speeds(*nodes)) if each.grade != "ok"]


@pytest.mark.once
def test_slow_beside_the_others() -> None:
    assert slow_ones({"a": 10.0}) == {}
    assert slow_ones({"a": 10.0, "b": 4.0}) == {"b": 10.0}
    assert slow_ones({"a": 10.0, "b": 5.0}) == {}
    assert slow_ones({"a": 10.0, "b": 4.0, "c": 12.0, "d": 9.0}) == {"b": 10.0}


@pytest.mark.once
class TestWhatIsSaid:
    def test_all_is_well(self) -> None:
        (found,) = describe(speeds([(5, 50), (6, 60)], [(5, 55), (6, 55)]))
        assert (found.grade, found.text) == (
            "ok",
            "speed: 2 ranks of a node together: memory 11 GB/s, read and written; arithmetic 110 "
            "GFLOP/s (median of 2 nodes)",
        )

    def test_a_slow_host(self) -> None:
        assert warnings([(5, 50)] * 2, [(5, 20)] * 2, [(5, 50)] * 2) == [
            "slow host n1: its ranks compute at 40 GFLOP/s, the median of the other nodes is 100 "
            "GFLOP/s"
        ]
        assert warnings([(5, 50)] * 2, [(2, 50)] * 2, [(5, 50)] * 2) == [
            "slow host n1: its ranks copy memory at 4 GB/s, the median of the other nodes is 10 "
            "GB/s"
        ]

    def test_hosts_with_fewer_ranks_are_not_compared(self) -> None:
        assert warnings([(5, 50)] * 4, [(9, 50)]) == []

    def test_a_slow_rank(self) -> None:
        assert warnings([(5, 50), (5, 50)], [(5, 50), (5, 20)]) == [
            "slow rank 3 on n1: it computes at 20 GFLOP/s, the median of the others is 50 GFLOP/s"
        ]

    def test_no_memory_to_measure(self) -> None:
        assert "speed: rank 1 on n0 has not the memory to measure" in warnings([(5, 50), (0, 50)])


@pytest.mark.once
@pytest.mark.parametrize(
    ("seen", "start"),
    [
        (
            Progress(16 << 20, 0.1, 0.001),
            "progress: by itself: 99% of an MPI_Iallreduce of 16.8 MB",
        ),
        (Progress(16 << 20, 0.1, 0.11), "progress: not by itself: 0% of "),
        (Progress(16 << 20, 0.1, 0.05), "progress: by itself in part: 50% of "),
        (Progress(1 << 20, 0.1, 0.01), "progress: not known: 90% of an MPI_Iallreduce of 1.05 MB"),
        (Progress(1 << 20, 0.1, 0.1), "progress: not by itself: 0% of "),
    ],
)
def test_words_of_progress(seen: Progress, start: str) -> None:
    assert progress.describe(seen).text.startswith(start)


@pytest.mark.mpi
def test_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    monkeypatch.setattr(host_speed, "COPY_SECONDS", 0.05)
    monkeypatch.setattr(host_speed, "MULTIPLY_SECONDS", 0.05)
    speed = host_speed.measure(MPI.COMM_WORLD)
    seen = progress.measure(MPI.COMM_WORLD) if SIZE > 1 else None
    with together():
        assert speed.rank == RANK
        assert 1e6 < speed.memory < 1e13
        assert 1e6 < speed.arithmetic < 1e14
        if seen is not None:
            assert 0 < seen.whole < 10
            assert seen.left > 0
