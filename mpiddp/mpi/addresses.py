"""At which address a node listens, so that the other nodes reach it and nobody else need to.

Note [At which address a node listens]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
What listens on all addresses can be reached from every network that the machine is in. Ranks of one
node need the loopback only. Between nodes the user's word decides (MPIDDP_INTERFACE), then what
MPI, or else Gloo, was told to use. Where nobody has said anything, it is a network in which every
node has an address, first that of the default route. A bridge that each machine has for itself, as
of containers, is none: the nodes have the same address there. In a routed network, where each node
has another one, it is the address of the default route. Only a node that has several addresses and
none of these listens on all of them.
No name is looked up, which may take seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mpiddp import settings

__all__ = ["Node", "check", "here", "meeting_points", "outward"]

LOOPBACK = "127.0.0.1"

# What MPI was told to use for TCP, and Gloo: names of interfaces, or networks. Other words in them,
# such as those of devices of InfiniBand, name no interface and say nothing here.
_OF_OTHERS = (
    "OMPI_MCA_btl_tcp_if_include",
    "FI_TCP_IFACE",
    "UCX_NET_DEVICES",
    "GLOO_SOCKET_IFNAME",
)

# Requests of Linux's netdevice(7), and where their answers lie.
_FLAGS, _ADDRESS, _MASK = 0x8913, 0x8915, 0x891B
_NAME_BYTES, _REQUEST_BYTES = 16, 256
_UP = 1

# Addresses for documentation: nothing is sent to them, the system only says from where it would be.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}

_Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface


class Node(NamedTuple):
    """What a node tells the others.

    Attributes:
        place: the same where 127.0.0.1 is the same.
        networks: its networks, with its address in each; those that it prefers come first.
        sure: whether it would listen at the first of these, if the nodes have none in common.
    """

    place: str
    networks: tuple[tuple[str, str], ...]
    sure: bool


def here() -> Node:
    """Return what this node tells the others. Not collective."""
    chosen, named = _chosen(list(_interfaces()))
    outside = [_default_address(family) for family in (socket.AF_INET, socket.AF_INET6)]

    def order(address: _Address) -> tuple[bool, bool]:
        return address.version != 4, str(address.ip) not in outside

    preferred = sorted(chosen, key=order)
    sure = named or len(preferred) == 1 or any(str(each.ip) in outside for each in preferred[:1])
    networks = tuple((str(each.network), str(each.ip)) for each in preferred)
    return Node(_place(), networks, sure)


def meeting_points(nodes: Sequence[Node]) -> list[str]:
    """Return for each node the address at which it listens; "" for all of its addresses.

    Not collective.

    Args:
        nodes: what they have told, those of one place several times perhaps.
    """
    places = {node.place: dict(reversed(node.networks)) for node in nodes}
    if len(places) == 1:
        return [LOOPBACK] * len(nodes)
    for network, _ in nodes[0].networks:
        found = {place: networks.get(network, "") for place, networks in places.items()}
        if all(found.values()) and len(set(found.values())) == len(found):
            return [found[node.place] for node in nodes]
    return [node.networks[0][1] if node.sure and node.networks else "" for node in nodes]


def outward() -> str:
    """Return the address at which this node listens for whoever comes; "" for all of them.

    Not collective.
    """
    node = here()
    if not node.networks:
        return LOOPBACK
    return node.networks[0][1] if node.sure else ""


def check() -> None:
    """Raise ValueError if MPIDDP_INTERFACE names nothing that there is here. Not collective."""
    wanted = settings.INTERFACE.read()
    if wanted is None:
        return
    there = list(_interfaces())
    if not _matching(there, wanted):
        listed = ", ".join(f"{name} {address}" for name, address in there)
        raise ValueError(
            f"{settings.INTERFACE.name} is {','.join(wanted)}, and {socket.gethostname()} has "
            f"no such interface or address, but {listed or 'none at all'}"
        )


def _chosen(there: list[tuple[str, _Address]]) -> tuple[list[_Address], bool]:
    """Return the addresses that may be used, and whether somebody has named them."""
    outside = [(name, address) for name, address in there if not address.is_loopback]
    said = [(there, settings.INTERFACE.read() or ())]
    said += [(outside, tuple(os.environ.get(name, "").split(","))) for name in _OF_OTHERS]
    for among, words in said:
        found = _matching(among, words)
        if found:
            return found, True
    return [address for _, address in outside], False


def _matching(there: list[tuple[str, _Address]], words: Iterable[str]) -> list[_Address]:
    """Return the addresses of interfaces and networks, in the order of `words`."""
    found: dict[_Address, None] = {}
    for word in words:
        network = None
        with contextlib.suppress(ValueError):
            network = ipaddress.ip_network(word.strip(), strict=False)
        for name, address in there:
            if name == word.strip() or (network is not None and address.ip in network):
                found[address] = None
    return list(found)


def _interfaces() -> Iterator[tuple[str, _Address]]:
    """Yield the names of interfaces that are up, and their addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_REQUEST_BYTES}s", name.encode())
            with contextlib.suppress(OSError):  # it has no address of IPv4
                answers = [fcntl.ioctl(asked, what, request) for what in (_FLAGS, _ADDRESS, _MASK)]
                (flags,) = struct.unpack_from("H", answers[0], _NAME_BYTES)
                ip, mask = (
                    socket.inet_ntoa(each[_NAME_BYTES + 4 : _NAME_BYTES + 8])
                    for each in answers[1:]
                )
                address = ipaddress.IPv4Interface(f"{ip}/{mask}")
                if flags & _UP and not address.is_link_local:
                    yield name, address
    with contextlib.suppress(OSError):  # without IPv6 there is no such file
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, prefix, scope, _, name = line.split()
            if int(scope, 16) == 0:  # not the link's
                number = ipaddress.IPv6Address(int(digits, 16))
                yield name, ipaddress.IPv6Interface(f"{number}/{int(prefix, 16)}")


def _default_address(family: socket.AddressFamily) -> str:
    """Return the address from which packets to elsewhere would come, "" if none would."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((_ELSEWHERE[family], 9))
            address: str = asked.getsockname()[0]
            return address
    except OSError:
        return ""


def _place() -> str:
    """Return what is the same for all processes that share a loopback, and for no others."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{started} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
