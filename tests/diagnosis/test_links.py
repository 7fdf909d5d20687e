"""Which nodes measure with which, what is measured, and what is said of the figures."""

from dataclasses import replace
from pathlib import Path

import pytest
from pretended_nodes import NODES
from replicas import RANK, SIZE, together

from mpiddp.diagnosis import interfaces, links, messages
from mpiddp.diagnosis.interfaces import Interface
from mpiddp.diagnosis.links import Link
from mpiddp.findings import Finding
from mpiddp.rendezvous.world import get_topology

GIGABIT = 1e9 / 8
ETH = {"eth0": Interface(10 * GIGABIT, 0)}


@pytest.mark.once
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 101])
def test_each_node_measures_with_both_neighbours(nodes: int) -> None:
    found = links.rounds(nodes)
    assert len(found) == {1: 0, 2: 1}.get(nodes, 2 + nodes % 2)
    for pairs in found:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
    every = [frozenset(pair) for pairs in found for pair in pairs]
    assert len(every) == len(set(every))
    ring = {frozenset({node, (node + 1) % nodes}) for node in range(nodes)}
    assert set(every) == {pair for pair in ring if len(pair) == 2}


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes
@pytest.mark.parametrize("where", NODES)
def test_measured_here(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    place = NODES[where][:SIZE]
    numbers = list(dict.fromkeys(place))
    own = replace(get_topology(), node_rank=numbers.index(place[RANK]))
    monkeypatch.setattr(links, "get_topology", lambda: own)
    monkeypatch.setattr(links, "STREAM_SECONDS", 0.02)
    monkeypatch.setattr(links, "PING_SECONDS", 0.01)
    found = links.measure(MPI.COMM_WORLD)
    with together():
        if RANK > 0:
            assert found == []
        else:
            shared = sum(place.count(node) > 1 for node in numbers)
            pairs = sum(map(len, links.rounds(len(numbers))))
            assert [len(link.hosts) for link in found] == [1] * shared + [2] * pairs
            for link in found:
                assert 1e-8 < link.latency < 1
                assert 1e3 < link.rate < 1e12


def ring(rates: "list[float]", latency: float = 5e-5) -> list[Link]:
    """Return the links of nodes in a ring, of so many Gbit/s each, from the first node on."""
    hosts = [f"n{number}" for number in range(len(rates))]
    return [
        Link((host, after), latency, rate * GIGABIT, ("eth0", "eth0"), (ETH, ETH))
        for host, after, rate in zip(hosts, [*hosts[1:], hosts[0]], rates, strict=True)
    ]


def warnings(found: list[Finding]) -> list[str]:
    return [each.text for each in found if each.grade != "ok"]


@pytest.mark.once
class TestWhatIsSaid:
    def test_all_is_well(self) -> None:
        inside = [Link((f"n{n}",), 1e-6, rate * 1e9) for n, rate in enumerate([4.0, 5.0, 6.0])]
        found = messages.describe([*inside, *ring([9.0, 9.5, 8.0])])
        assert [(each.grade, each.text) for each in found] == [
            (
                "ok",
                "messages inside a node: 1 us, 5 GB/s each way (median of 3; least 4 GB/s in n0)",
            ),
            (
                "ok",
                "messages between nodes: 50 us, 9 Gbit/s each way (median of 3 pairs of "
                "neighbours), by eth0",
            ),
        ]

    def test_a_slow_host(self) -> None:
        (slow,) = warnings(messages.describe(ring([9.0, 9.0, 4.9, 4.8, 9.0])))[:1]
        assert "wire" in slow  # the half of 10 Gbit/s, and not of the others
        slow, wire = warnings(messages.describe(ring([9.0, 9.0, 4.0, 4.4, 9.0])))
        assert slow == (
            "slow link of host n3: its messages get 4.4 Gbit/s, the median of the other nodes is 9 "
            "Gbit/s"
        )
        assert wire.startswith("wire: eth0 of n2 says 10 Gbit/s, and messages between n2 and n3 ")
        assert wire.endswith(" get 4 Gbit/s (40%)")

    def test_a_slow_cable(self) -> None:
        slow, _ = warnings(messages.describe(ring([9.0, 9.0, 4.0, 9.0])))
        assert slow.startswith("slow link between n2 and n3: 4 Gbit/s, the median of the others")

    def test_a_late_one(self) -> None:
        measured = ring([9.0, 9.0, 9.0])
        late = [replace(measured[0], latency=2e-4), *measured[1:]]
        assert warnings(messages.describe(late)) == [
            "late link between n0 and n1: 200 us, the median of the others is 50 us"
        ]
        # What a process may wait for its core.
        quick = [replace(link, latency=2e-6) for link in measured]
        assert not warnings(messages.describe([replace(quick[0], latency=1e-5), *quick[1:]]))

    def test_two_hosts(self) -> None:
        """Nothing to compare with but the interface."""
        (only,) = ring([1.0, 1.0])[:1]
        (wire,) = warnings(messages.describe([only]))
        assert wire.startswith("wire: eth0 of n0 says 10 Gbit/s, and messages between n0 and n1 ")

    def test_a_faster_interface_is_idle(self) -> None:
        both = {"eth0": Interface(GIGABIT, 0), "mlx5_0:1": Interface(100 * GIGABIT, 0)}
        link = Link(("n0", "n1"), 5e-5, 0.9 * GIGABIT, ("eth0", "eth0"), (both, both))
        found = [each for each in messages.describe([link]) if each.grade != "ok"]
        assert [each.text for each in found] == [
            "interface: messages between n0 and n1 go by eth0 of n0, which says 1 Gbit/s; mlx5_0:1 "
            "is up and says 100 Gbit/s"
        ]
        assert "UCX_NET_DEVICES=mlx5_0:1" in found[0].remedy

    def test_an_interface_that_says_nothing(self) -> None:
        nothing = {"eth0": Interface(0.0, 0)}
        link = Link(("n0", "n1"), 5e-5, GIGABIT, ("eth0", ""), (nothing, {}))
        found = messages.describe([link])
        assert not warnings(found)
        assert found[0].text.endswith(", by an interface that is not seen and eth0")


def net(system: Path, name: str, **files: str) -> None:
    folder = system / "net" / name
    (folder / "statistics").mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / ("statistics/tx_bytes" if file == "sent" else file)).write_text(f"{text}\n")


@pytest.mark.once
class TestInterfaces:
    """As Linux tells of them."""

    def test_those_that_are_up(self, tmp_path: Path) -> None:
        net(tmp_path, "lo", carrier="1", sent="7")
        net(tmp_path, "eth0", carrier="1", speed="10000", sent="123")
        net(tmp_path, "eth1", carrier="0", speed="-1", sent="5")
        net(tmp_path, "tun0", carrier="1", speed="-1", sent="9")
        port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
        (port / "counters").mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
        (port / "counters" / "port_xmit_data").write_text("1000\n")
        assert interfaces.interfaces(tmp_path) == {
            "eth0": Interface(10 * GIGABIT, 123),
            "tun0": Interface(0.0, 9),
            "mlx5_0:1": Interface(100 * GIGABIT, 4000),
        }
        (port / "state").write_text("1: DOWN\n")
        assert "mlx5_0:1" not in interfaces.interfaces(tmp_path)

    def test_the_one_that_carries(self) -> None:
        def at(**sent: int) -> dict[str, Interface]:
            speeds = {"eth0": 1.0, "eth1": 1.0, "bond0": 2.0}
            return {name: Interface(speeds[name], each) for name, each in sent.items()}

        before = at(eth0=100, eth1=1000)
        assert interfaces.carrier(before, at(eth0=1100, eth1=1010), 1000) == "eth0"
        assert interfaces.carrier(before, at(eth0=110, eth1=1010), 1000) == ""
        assert interfaces.carrier({}, {}, 1000) == ""
        bonded = at(eth0=0, eth1=0, bond0=0)
        assert interfaces.carrier(bonded, at(eth0=1000, eth1=0, bond0=999), 1000) == "bond0"

    def test_here(self) -> None:
        for name, each in interfaces.interfaces().items():
            assert name != "lo"
            assert each.speed >= 0
            assert each.sent >= 0
