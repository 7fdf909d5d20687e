"""What the coordinator decides, without MPI: fusion, stalls, ranks that leave."""

import pytest

from mpiddp.horovod.coordinator import (
    ENDED,
    FAIL,
    JOINED,
    LEFT,
    RUN,
    Coordinator,
    Decision,
    Request,
)
from mpiddp.horovod.environment import Settings
from mpiddp.horovod.reduce_ops import Adasum, Average, Sum

pytestmark = [pytest.mark.once, pytest.mark.timeout(30)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def reduce_of(name: str, count: int = 10, dtype: str = "float32", **others: object) -> Request:
    fields = {"op": int(Sum), **others}
    return Request(f"allreduce.{name}", "allreduce", ((dtype, (count,)),), **fields)


def decide(requests: list[Request], fusion: int = 1 << 20) -> list[Decision]:
    """Return what two ranks are told that submit these, the second in reverse."""
    coordinator = Coordinator([0, 1], Settings(fusion_bytes=fusion))
    for request in requests:
        coordinator.submit(0, request)
    assert coordinator.decide() == []
    for request in reversed(requests):
        coordinator.submit(1, request)
    decisions = coordinator.decide()
    assert coordinator.decide() == []
    return decisions


def keys(decisions: list[Decision]) -> list[tuple[str, ...]]:
    assert all(decision.what == RUN for decision in decisions)
    return [tuple(key.removeprefix("allreduce.") for key in each.keys) for each in decisions]


@pytest.mark.essential
def test_all_reduces_of_a_kind_are_one():
    wanted = [reduce_of("a"), reduce_of("b", dtype="float64"), reduce_of("c")]
    assert keys(decide(wanted)) == [("c", "a"), ("b",)]


@pytest.mark.parametrize(
    "other", [{"op": int(Average)}, {"prescale": 2.0}, {"postscale": 2.0}, {"device": "GPU"}]
)
def test_different_all_reduces_stay_apart(other):
    assert keys(decide([reduce_of("a"), reduce_of("b", **other)])) == [("b",), ("a",)]


def test_adasum_is_never_fused():
    """Its dot products are of single tensors."""
    assert len(decide([reduce_of(name, op=int(Adasum)) for name in "ab"])) == 2


@pytest.mark.parametrize(("fusion", "expected"), [(0, 4), (79, 4), (80, 2), (120, 2), (160, 1)])
def test_fusion_threshold(fusion, expected):
    decisions = decide([reduce_of(name) for name in "abcd"], fusion)
    assert len(decisions) == expected
    assert sorted(key for each in keys(decisions) for key in each) == list("abcd")


def test_a_joined_rank_is_told_what_it_contributes():
    coordinator = Coordinator([0, 1], Settings())
    coordinator.submit(1, Request("join", "join"))
    coordinator.submit(0, reduce_of("a"))
    (decision,) = coordinator.decide()
    assert decision.requests == (reduce_of("a"),)
    coordinator.submit(0, Request("join", "join"))
    assert coordinator.decide() == [Decision(JOINED, rank=0)]
    coordinator.submit(0, reduce_of("a"))
    assert coordinator.decide() == []  # nobody has joined any more


def test_stalls_are_named_once():
    clock = Clock()
    settings = Settings(stall_seconds=10, stall_error_seconds=30)
    coordinator = Coordinator([0, 3, 4], settings, clock)
    coordinator.submit(1, reduce_of("a"))
    coordinator.submit(0, reduce_of("a"))
    clock.now = 9
    coordinator.submit(2, reduce_of("b"))
    assert coordinator.stalls() == ("", [])
    clock.now = 11
    warning, failures = coordinator.stalls()
    assert "allreduce.a: ranks 0, 3 waited 11 s, rank 4 did not come" in warning
    assert "allreduce.b" not in warning
    assert not failures
    assert coordinator.stalls() == ("", [])
    clock.now = 31
    warning, (failure,) = coordinator.stalls()
    assert "allreduce.b: rank 4 waited 22 s, ranks 0, 3 did not come" in warning
    assert (failure.what, failure.keys) == (FAIL, ("allreduce.a",))


def test_leaving():
    """What can be done still is; then nothing can."""
    coordinator = Coordinator([0, 1], Settings())
    for rank in (0, 1):
        coordinator.submit(rank, reduce_of("a"))
    coordinator.submit(0, reduce_of("b"))
    coordinator.submit(1, Request("leave", "leave"))
    done, left = coordinator.decide()
    assert (done.what, done.keys) == (RUN, ("allreduce.a",))
    assert (left.what, left.text) == (LEFT, "Horovod has been shut down on rank 1")
    coordinator.submit(0, reduce_of("c"))
    assert coordinator.decide() == []
    coordinator.submit(0, Request("leave", "leave"))
    assert [decision.what for decision in coordinator.decide()] == [LEFT, ENDED]
    assert coordinator.decide() == []
