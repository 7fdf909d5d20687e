"""At which address a node listens: one that the others reach, and no more than that."""

import ipaddress
import socket

import pytest

from mpiddp.mpi import addresses
from mpiddp.mpi.addresses import Node, meeting_points
from mpiddp.system.listening import listen

pytestmark = pytest.mark.once


def node(place: str, *found: str, sure: bool = False) -> Node:
    """Return a node that has addresses such as 10.0.0.1/24."""
    each = [ipaddress.ip_interface(text) for text in found]
    return Node(place, tuple((str(one.network), str(one.ip)) for one in each), sure)


BRIDGE = "172.17.0.1/16"


@pytest.mark.essential
@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node("a", "10.0.0.1/24")] * 3, ["127.0.0.1"] * 3),
        ([node("a", "10.0.0.1/24"), node("b", "10.0.0.2/24")], ["10.0.0.1", "10.0.0.2"]),
        # what the first node prefers, if all have it
        (
            [
                node("a", "10.0.0.1/24", "10.9.0.1/16"),
                node("b", "10.9.0.2/16", "10.0.0.2/24"),
            ],
            ["10.0.0.1", "10.0.0.2"],
        ),
        (
            [node("a", "203.0.113.5/24", "10.9.0.1/16"), node("b", "10.9.0.2/16")],
            ["10.9.0.1", "10.9.0.2"],
        ),
        # each machine has the bridge for itself
        (
            [node("a", BRIDGE, "10.0.0.1/24"), node("b", BRIDGE, "10.0.0.2/24")],
            ["10.0.0.1", "10.0.0.2"],
        ),
        # several ranks of a node, and two addresses in one network
        (
            [
                node("a", "10.0.0.1/24"),
                node("b", "10.0.0.2/24", "10.0.0.3/24"),
                node("b", "10.0.0.2/24", "10.0.0.3/24"),
            ],
            ["10.0.0.1", "10.0.0.2", "10.0.0.2"],
        ),
        (
            [node("a", "2001:db8::1/64"), node("b", "2001:db8::2/64")],
            ["2001:db8::1", "2001:db8::2"],
        ),
        # a routed network: each has its own, and knows by which it goes out, or does not
        (
            [node("a", "10.1.0.1/24", sure=True), node("b", "10.2.0.1/24", sure=True)],
            ["10.1.0.1", "10.2.0.1"],
        ),
        (
            [node("a", "10.1.0.1/24", "10.5.0.1/24"), node("b", "10.2.0.1/24", sure=True)],
            ["", "10.2.0.1"],
        ),
        ([node("a"), node("b")], ["", ""]),
    ],
)
def test_where_nodes_meet(nodes: list[Node], expected: list[str]) -> None:
    assert meeting_points(nodes) == expected


def test_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can listen at whatever it offers; a variable chooses among that."""
    for name in addresses._OF_OTHERS:
        monkeypatch.delenv(name, raising=False)
    found = addresses.here()
    assert meeting_points([found, found]) == ["127.0.0.1"] * 2
    for _, address in found.networks:
        listen(address).close()
    there = list(addresses._interfaces())
    names = {name for name, _ in there}
    assert names <= {name for _, name in socket.if_nameindex()}
    for name, address in there:
        if address.is_loopback:
            continue
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        assert addresses.here().sure
        of_name = [each for other, each in there if other == name]
        assert addresses.here().networks[0][1] in {str(each.ip) for each in of_name}
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        for word in (name, str(address.ip), str(address.network)):
            monkeypatch.setenv("MPIDDP_INTERFACE", word)
            addresses.check()
            assert str(address.ip) in {ip for _, ip in addresses.here().networks}
        monkeypatch.delenv("MPIDDP_INTERFACE")


def test_the_loopback_is_for_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "127.0.0.0/8")
    assert not any(ip.startswith("127.") for _, ip in addresses.here().networks)
    monkeypatch.setenv("MPIDDP_INTERFACE", "lo")
    assert addresses.here() == Node(addresses._place(), (("127.0.0.0/8", "127.0.0.1"),), True)
    assert addresses.outward() == "127.0.0.1"


def test_words_that_name_nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in addresses._OF_OTHERS:
        monkeypatch.delenv(name, raising=False)
    before = addresses.here()
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1,all")
    assert addresses.here() == before
    monkeypatch.setenv("MPIDDP_INTERFACE", "ib7,203.0.113.0/24")
    has_none = "has no such interface or address, but .*127.0.0.1/8"
    with pytest.raises(ValueError, match=f"ib7,203.0.113.0/24, and .* {has_none}"):
        addresses.check()
    monkeypatch.setenv("MPIDDP_INTERFACE", "eth0,,eth1")
    with pytest.raises(ValueError, match="MPIDDP_INTERFACE must be names of interfaces"):
        addresses.check()
