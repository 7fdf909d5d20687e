"""The cost model at its limits, where the right answer is known. No MPI, no measurement."""

import importlib
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ALGORITHMS = ("flat", "hierarchical", "direct", "two-level", "ring")
POWERS = [2**k for k in range(15)]
MIB = 1 << 20


pytestmark = pytest.mark.once


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module("cost_model")
    for name in (
        "cost_model",
        "check_cost_model",
        "scaling",
        "between_hosts",
        "measuring",
        "names",
        "optimizer_cost",
    ):
        if name not in before:
            sys.modules.pop(name, None)


def wire_only(model: ModuleType, **changes: Any) -> Any:
    """Return a machine on which everything but the link's bandwidth is free."""
    nothing = {"latency_between": 0.0, "latency_inside": 0.0, "nap": 0.0}
    free = {"rank_copy": math.inf, "rank_sum": math.inf}
    return model.Machine(**{"link": 1e9, "headers": 1.0, **nothing, **free, **changes})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_rank_costs_nothing(model: ModuleType, algorithm: str) -> None:
    machine = model.Machine(link=1e9)
    assert model.bucket_cost(machine, algorithm, 25 * MIB, 1, 1, model.NAP).total == 0
    assert model.step_seconds(machine, algorithm, [MIB, 25 * MIB], 1, 1, 0.1, 0.2) == (
        pytest.approx(0.3)
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_bytes_cost_nothing(model: ModuleType, algorithm: str) -> None:
    machine = model.Machine(link=1e9)
    assert model.bucket_cost(machine, algorithm, 0, 4, 2, model.NAP).total == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("nap", [0.0, 1e-4])
def test_more_nodes_never_cost_less(
    model: ModuleType, algorithm: str, ranks: int, nap: float
) -> None:
    machine = model.Machine(link=1e9, overhead=1e-6, stack=2e9, cores=ranks)
    if algorithm in ("direct", "two-level"):
        # More nodes make shorter slices, which at some length need not ask any more.
        machine = replace(machine, eager_limit=1 << 40)
    for size in (1 << 10, MIB, 25 * MIB):
        costs = [
            model.bucket_cost(machine, algorithm, size, nodes, ranks, nap).total
            for nodes in POWERS[1:]
        ]
        assert all(more >= less * (1 - 1e-9) for less, more in pairwise(costs))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (4, 1), (3, 1), (2, 2), (64, 8), (1, 4)])
def test_more_bytes_never_cost_less(
    model: ModuleType, algorithm: str, nodes: int, ranks: int
) -> None:
    machine = model.Machine(link=1e9, rendezvous=5e-5)
    costs = [
        model.bucket_cost(machine, algorithm, size, nodes, ranks, model.NAP).total
        for size in (1 << 10, 1 << 16, MIB // 2, MIB, MIB + 4, 2 * MIB, 3 * MIB, 25 * MIB, 1 << 30)
    ]
    assert all(more >= less * (1 - 1e-9) for less, more in pairwise(costs))


@pytest.mark.parametrize("ranks", [2, 3, 4, 16, 16384])
def test_bandwidth_term_of_the_ring(model: ModuleType, ranks: int) -> None:
    # Patarasuk and Yuan: each rank sends 2 (p - 1) / p of the bytes.
    size = 100 * MIB
    expected = 2 * (ranks - 1) / ranks * size / 1e9
    assert model.ring(wire_only(model), size, ranks, 1).total == pytest.approx(expected)
    slow = wire_only(model, latency_between=1e-3)
    latency = model.ring(slow, size, ranks, 1).total - expected
    assert latency == pytest.approx(2 * (ranks - 1) * 1e-3)


@pytest.mark.parametrize("nodes", [4, 16, 2048])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_wire_of_chunks_is_that_of_the_ring_over_nodes(
    model: ModuleType, nodes: int, ranks: int
) -> None:
    machine = wire_only(model, headers=1.05)
    expected = 1.05 * 2 * (nodes - 1) / nodes * 64 * MIB / 1e9
    for algorithm in ALGORITHMS[:-1]:
        cost = model.bucket_cost(machine, algorithm, 64 * MIB, nodes, ranks, 0.0)
        assert cost.occupied == pytest.approx(expected)
        assert cost.total == pytest.approx(expected, rel=0.1)


def test_rabenseifner_latency_is_two_rounds_a_doubling(model: ModuleType) -> None:
    machine = wire_only(model, link=1e30, latency_between=1.0)
    for doublings in range(1, 15):
        assert model.flat(machine, 8, 2**doublings, 1).total == pytest.approx(2 * doublings)


def test_exchange_waits_for_two_messages_a_level_and_sends_to_all(model: ModuleType) -> None:
    machine = wire_only(model, link=1e30, latency_between=1.0)
    overhead = wire_only(model, link=1e30, overhead=1.0)
    for nodes, direct, two in ((16, 15, 6), (64, 63, 14), (60, 59, 6 - 1 + 10 - 1)):
        for algorithm, levels, messages in (("direct", 1, direct), ("two-level", 2, two)):
            waits, sent = (
                model.bucket_cost(one, algorithm, 8, nodes, 1, 0.0).total
                for one in (machine, overhead)
            )
            assert waits == pytest.approx(2 * levels)
            assert sent == pytest.approx(2 * messages)
    # Slices of 128 KB in groups of 8 ask their receiver; those of 16 KB across groups do not.
    asks = wire_only(model, link=1e30, rendezvous=1.0)
    for nodes, algorithm, expected in ((8, "direct", 2), (64, "direct", 0), (64, "two-level", 2)):
        cost = model.hierarchical(asks, MIB, nodes, 1, wire=algorithm, chunk=MIB, window=1)
        assert cost.total == pytest.approx(expected)
    # Without groups, two levels are one.
    assert model.bucket_cost(machine, "two-level", 8, 7, 1, 0.0).total == pytest.approx(2)


def test_16_bits_take_half_the_wire_but_not_by_iallreduce(model: ModuleType) -> None:
    machine = wire_only(model)
    for algorithm, share in (("flat", 1), ("hierarchical", 1), ("direct", 0.5), ("two-level", 0.5)):
        for ranks in (1, 8):
            whole = model.bucket_cost(machine, algorithm, 64 * MIB, 16, ranks, 0.0).occupied
            half = model.bucket_cost(
                machine, algorithm, 32 * MIB, 16, ranks, 0.0, element_bytes=2
            ).occupied
            assert half == pytest.approx(share * whole)


@pytest.mark.parametrize("element_bytes", [4, 2])
def test_the_chosen_wire_costs_little_more_than_the_best(
    model: ModuleType, element_bytes: int
) -> None:
    from mpiddp.transports.wire_choice import choose, groups_of

    scaling = importlib.import_module("scaling")
    taken = set()
    for machine in scaling.MACHINES.values():
        for nodes in {*range(2, 67), *range(67, 2048, 29), 127, 128, 2039, 2047, 2048}:
            for power in range(10, 21):
                costs = {
                    name: model.hierarchical(
                        machine,
                        1 << power,
                        nodes,
                        scaling.RANKS_OF_A_NODE,
                        wire=algorithm,
                        element_bytes=element_bytes,
                        chunk=2 * MIB,
                    ).total
                    for name, algorithm in scaling.WIRES.items()
                    if name != "two-level" or groups_of(nodes)
                }
                wire = choose(nodes, 1 << power, element_bytes, None)
                taken.add(wire.name)
                assert costs[wire.name] <= 1.1 * min(costs.values()), (nodes, power, wire)
    assert taken == {*scaling.WIRES}


def test_only_long_messages_ask_their_receiver(model: ModuleType) -> None:
    machine = wire_only(model, link=1e30, rendezvous=1.0)
    # Halves of 1 MB, and so on down to 128 KB, both ways; 64 KB goes without asking.
    assert model.flat(machine, MIB, 1024, 1, window=1).total == pytest.approx(2 * 3)
    # Inside the node the first three are exchanged, so that 64 KB are left.
    assert model.flat(machine, MIB, 1024, 8, window=1).total == pytest.approx(0)
    assert model.flat(machine, MIB, 2, 1, trees=True).total == pytest.approx(2)


def test_ranks_beyond_a_power_of_two_cost_two_rounds_more(model: ModuleType) -> None:
    machine = wire_only(model, link=1e30, latency_between=1.0)
    assert model.flat(machine, 8, 5, 1).total == pytest.approx(2 * 3 + 2)


def test_a_tree_idles_in_one_direction_unless_two_chunks_are_in_flight(model: ModuleType) -> None:
    machine = wire_only(model)
    size = 32 * MIB
    one, two = (
        model.flat(machine, size, 2, 1, trees=True, window=window).total for window in (1, 2)
    )
    assert one == pytest.approx(2 * size / 1e9)
    assert two == pytest.approx(size / 1e9, rel=0.05)


@pytest.mark.parametrize("nodes", [2, 4, 5, 1024])
@pytest.mark.parametrize("trees", [False, True])
def test_hierarchical_is_flat_at_one_rank_a_node(
    model: ModuleType, nodes: int, trees: bool
) -> None:
    machine = model.Machine(link=1e9, overhead=1e-6, rendezvous=1e-4)
    for nap in (0.0, model.NAP):
        for size in (64, MIB, 25 * MIB):
            flat = model.flat(machine, size, nodes, 1, nap=nap, trees=trees)
            assert model.hierarchical(machine, size, nodes, 1, nap=nap, trees=trees) == flat


def test_lanes_touch_less_memory_than_messages_inside_a_node(model: ModuleType) -> None:
    machine = wire_only(model, link=1e30, node_memory=1e10)
    size = 25 * MIB
    for nodes in (1, 2, 64):
        assert (
            model.hierarchical(machine, size, nodes, 8).occupied
            < 0.5 * model.flat(machine, size, nodes, 8).occupied
        )


def test_naps_cost_more_the_more_rounds_there_are(model: ModuleType) -> None:
    machine = wire_only(model, link=1e30)
    few, many = (model.flat(machine, 64, nodes, 1, nap=1e-4).total for nodes in (4, 1024))
    assert few == pytest.approx(4e-4)
    assert many == pytest.approx(20e-4)


def test_buckets_are_closed_by_the_gradient_that_reaches_the_limit(model: ModuleType) -> None:
    four = 4 * MIB
    assert model.bucket_sizes([four] * 12) == [four, 7 * four, 4 * four]
    assert model.bucket_sizes([100.0]) == [100.0]
    assert model.bucket_sizes([]) == []
    assert sum(model.bucket_sizes([1000.0] * 12345)) == 12345000


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (4, 1), (2, 2), (16, 8), (2048, 8), (1, 8)])
@pytest.mark.parametrize("backward", [0.0, 1e-3, 0.05, 0.3, 5.0])
def test_a_step_lies_between_full_overlap_and_none(
    model: ModuleType, algorithm: str, nodes: int, ranks: int, backward: float
) -> None:
    machine = model.Machine(link=1e9, overhead=1e-6, rendezvous=1e-4, stack=2e9, cores=ranks)
    for buckets in ([64.0], [MIB], [MIB, 25 * MIB, 25 * MIB, 7 * MIB], [100 * MIB, 64.0]):
        copies = sum(buckets) / machine.rank_copy
        wire = model.step_seconds(machine, algorithm, buckets, nodes, ranks, 0.0, -copies)
        compute = 0.1 + backward + copies
        step = model.step_seconds(machine, algorithm, buckets, nodes, ranks, 0.1, backward)
        assert step >= max(compute, wire) * (1 - 1e-9)
        assert step <= (compute + wire) * (1 + 1e-9)


def test_what_is_done_before_backward_ends_is_hidden(model: ModuleType) -> None:
    machine = wire_only(model)
    # All but the last bucket, which is ready when backward ends.
    buckets = [10 * MIB, 10 * MIB]
    last = model.ring(machine, 10 * MIB, 4, 1).total
    step = model.step_seconds(machine, "ring", buckets, 4, 1, 0.0, 1.0)
    assert step == pytest.approx(1.0 + last)


def test_time_that_naps_stretch_ends_with_backward(model: ModuleType) -> None:
    assert model.end_of(0.0, 2.0, 1.0, 5.0) == 2.0
    assert model.end_of(5.0, 2.0, 1.0, 5.0) == 6.0
    assert model.end_of(4.0, 2.0, 1.0, 5.0) == 5.5


def test_an_unknown_algorithm_is_an_error(model: ModuleType) -> None:
    with pytest.raises(ValueError, match="flat, hierarchical, direct, two-level, ring"):
        model.bucket_cost(model.Machine(link=1e9), "tree", 1.0, 2, 1, 0.0)


def test_predictions_to_16384_ranks(model: ModuleType) -> None:
    scaling = importlib.import_module("scaling")
    assert scaling.layout(16384) == (2048, 8)
    assert scaling.layout(4) == (1, 4)
    for machine in scaling.MACHINES.values():
        flat, ours, direct, two, ring = (scaling.predict(machine, each) for each in ALGORITHMS)
        alone = scaling.FORWARD + scaling.BACKWARD
        assert flat[0] == ours[0] == ring[0] == pytest.approx(alone)
        assert min(ours) >= alone * (1 - 1e-9)
        # A lane's messages between nodes are longer, so a few more of them ask first.
        assert all(mine <= 1.01 * theirs for mine, theirs in zip(ours, flat, strict=True))
        # Latency in proportion to the ranks is what ends a ring.
        assert ring[-1] > flat[-1] > ours[-1]
        # And a message to every node, sooner or later; groups of them do not.
        assert direct[-1] > 1.01 * ours[-1]
        assert two[-1] < 1.01 * ours[-1]
        # In 16 bits what is sent is half, for those that do not widen it.
        ours, two = (scaling.predict(machine, each, element_bytes=2) for each in ALGORITHMS[1:4:2])
        assert two[-1] < 1.01 * ours[-1]
    assert scaling.chosen(8, 4) == "-"
    assert scaling.chosen(16, 4) == "direct"
    assert scaling.chosen(1024, 2) == "two-level"
    assert "16384" in scaling.report()


def test_the_optimizer_is_predicted(model: ModuleType) -> None:
    """The table of scaling.md, and fused steps beside measured ones at one bandwidth."""
    cost = importlib.import_module("optimizer_cost")
    shown = (BENCHMARKS / "scaling.md").read_text(encoding="utf-8")
    for line in cost.report().splitlines()[1:]:
        figures = line.split()[-3:]
        assert f"| {' | '.join(figures)} |" in shown
    names = importlib.import_module("names")
    for mpi in ("openmpi", "mpich"):
        file = BENCHMARKS / "results" / f"optimizer-{mpi}.json"
        found = {
            (record["optimizer"], record["candidate"]): statistics.median(record["alone"])
            for record in json.loads(file.read_text(encoding="utf-8"))["optimizers"]
            if record["model"] == "3 x Linear(4096)" and record["ranks"] == 2
        }
        size = 4 * 3 * (4096 * 4096 + 4096)
        plain = found["SGD, momentum", names.OURS]
        memory = cost.PASSES["SGD, momentum"].each * size * 2 / plain
        for candidate, replicas in ((names.OURS, 2), (names.OURS_NODE, 1)):
            passes = cost.PASSES["AdamW"].once
            predicted = cost.optimizer_seconds(passes, size, replicas, memory)
            measured = found["AdamW, fused", candidate]
            assert 0.5 < measured / predicted < 2


def test_the_plot_is_drawn(model: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    importlib.import_module("scaling").draw(tmp_path / "scaling.svg")
    assert "<svg" in (tmp_path / "scaling.svg").read_text(encoding="utf-8")


def test_comparison_with_what_was_measured(
    model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MPIDDP_WIRE", raising=False)
    check = importlib.import_module("check_cost_model")
    measured = {"latency_between": 3e-5, "latency_inside": 2e-6, "rendezvous": 5e-5, "stack": 1e9}
    measured |= {"rank_copy": 5e9, "rank_sum": 5e9, "gloo_latency": 2e-4}
    records = [
        {"candidate": name, "synchronised": [1.0, 0.8, 1.2], "alone": [0.3, 0.3, 0.4]}
        for name in (check.OURS, check.OURS_MPI, check.GLOO)
    ]
    model_size = {"parameters": 12, "bytes": 48 * MIB}
    result = {
        **model_size,
        "nodes": 2,
        "gigabits": 1,
        "payload": 119e6,
        "mpi": "MPICH",
        "load": 0.0,
    }
    steps = [{**result, "ranks": ranks, "records": records} for ranks in (2, 4)]
    parameters = [{"hosts": 2, "ranks": ranks, **measured} for ranks in (1, 2)]
    file = tmp_path / "cost-model.json"
    file.write_text(json.dumps({"parameters": parameters, "steps": steps}), encoding="utf-8")
    cases = check.read([file])["cases"]
    assert [case["algorithm"] for case in cases] == 2 * ["direct", "flat", "ring"]
    for case in cases:
        assert case["measured"] == 1.0
        assert case["backward"] == 0.3
        # 46 MiB are on the wire when the second bucket is full at the latest.
        assert 0.4 < case["predicted"] < 0.9
        assert case["error"] == pytest.approx(case["predicted"] - 1)
    assert "2 hosts x 2" in check.report(cases)
    monkeypatch.setenv("MPIDDP_WIRE", "iallreduce")
    assert check.read([file])["cases"][0]["algorithm"] == "hierarchical"
