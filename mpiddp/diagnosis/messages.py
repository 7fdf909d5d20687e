"""What is said of the links: what messages get, which node or cable is slow, what the wire gives.

A slow one is slow beside the median of the others. So of two nodes nothing is said but what their
interfaces promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from mpiddp.diagnosis import links
from mpiddp.diagnosis.links import Link
from mpiddp.diagnosis.measuring import SLOW, slow_ones
from mpiddp.findings import Finding

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["describe", "report"]

_GIGABIT = 1e9 / 8
# A latency is high if it is so many times that of the others, and so much more: what a process may
# wait for its core.
_HIGH, _HIGH_SECONDS = 3, 2e-5
# An interface is another kind of network if it says so many times the speed.
_FASTER = 2
_CHOOSE = (
    "Open MPI: OMPI_MCA_btl_tcp_if_include={0}; MPICH: FI_TCP_IFACE={0}; UCX: UCX_NET_DEVICES={0}"
)
_LINE = "look at its cable, its port and what else sends there (ethtool {}; ip -s link)"


def report(world: MPI.Comm) -> list[Finding]:
    """Measure the links and say what is slow; on rank 0. Collective."""
    return describe(links.measure(world))


def describe(measured: Sequence[Link]) -> list[Finding]:
    """Return what there is to say of links. Not collective."""
    inside = [link for link in measured if len(link.hosts) == 1]
    between = [link for link in measured if len(link.hosts) == 2]
    return [*_inside(inside), *_between(between), *_promises(between)]


def _inside(inside: Sequence[Link]) -> list[Finding]:
    """Say what the first two ranks of each node get; a slow host is found by what it computes."""
    if not inside:
        return []
    what = f"messages inside {'a node' if len(inside) > 1 else inside[0].hosts[0]}"
    text = f"{what}: {_seconds(_latency(inside))}, {_bytes(_rate(inside))} each way"
    if len(inside) > 1:
        least = min(inside, key=lambda link: link.rate)
        text += f" (median of {len(inside)}; least {_bytes(least.rate)} in {least.hosts[0]})"
    return [Finding("ok", text)]


def _between(between: Sequence[Link]) -> list[Finding]:
    if not between:
        return []
    text = f"{_seconds(_latency(between))}, {_bits(_rate(between))} each way"
    carriers = sorted({name for link in between for name in link.carriers})
    by = f", by {' and '.join(name or 'an interface that is not seen' for name in carriers)}"
    found = [Finding("ok", f"messages between nodes: {text}{_of(len(between))}{by}")]
    slow_hosts = _slow_hosts(between)
    for host, (own, others) in slow_hosts.items():
        found.append(
            Finding(
                "warning",
                f"slow link of host {host}: its messages get {_bits(own)}, the median of the "
                f"other nodes is {_bits(others)}",
                _LINE.format("INTERFACE") + ", or leave the host out",
            )
        )
    rest = {link.hosts: link.rate for link in between if not slow_hosts.keys() & {*link.hosts}}
    for hosts, others in slow_ones(rest).items():
        found.append(
            Finding(
                "warning",
                f"slow link between {' and '.join(hosts)}: {_bits(rest[hosts])}, the median of the "
                f"others is {_bits(others)}",
                "look at the switches and cables between them",
            )
        )
    for link in between:
        rest_ = [other.latency for other in between if other is not link]
        if rest_ and link.latency > max(_HIGH * median(rest_), median(rest_) + _HIGH_SECONDS):
            found.append(
                Finding(
                    "warning",
                    f"late link between {' and '.join(link.hosts)}: {_seconds(link.latency)}, the "
                    f"median of the others is {_seconds(median(rest_))}",
                    "look at what lies between them, and which interface is used there",
                )
            )
    return found


def _slow_hosts(between: Sequence[Link]) -> dict[str, tuple[float, float]]:
    """Return hosts all of whose pairs are slow, with the best of these and what others get."""
    found = {}
    for host in {host: None for link in between for host in link.hosts}:
        own = [link.rate for link in between if host in link.hosts]
        others = [link.rate for link in between if host not in link.hosts]
        if len(own) > 1 and others and max(own) < SLOW * median(others):
            found[host] = (max(own), median(others))
    return found


def _promises(between: Sequence[Link]) -> list[Finding]:
    """Say where the wire gives less than its interface says, or a faster one is idle."""
    found: dict[str, Finding] = {}
    for link in sorted(between, key=lambda each: each.rate):
        for host, name, there in zip(link.hosts, link.carriers, link.interfaces, strict=True):
            if name not in there:
                continue
            speed = there[name].speed
            faster = [
                other
                for other, each in there.items()
                if other != name and each.speed >= _FASTER * max(speed, link.rate)
            ]
            others = [other for other in there if other != name]
            pair = " and ".join(link.hosts)
            if faster and speed:
                best = max(faster, key=lambda other: there[other].speed)
                found.setdefault(
                    "interface",
                    Finding(
                        "warning",
                        f"interface: messages between {pair} go by {name} of {host}, which says "
                        f"{_bits(speed)}; {best} is up and says {_bits(there[best].speed)}",
                        f"let MPI take the faster one: {_CHOOSE.format(best)}",
                    ),
                )
            elif speed and link.rate < SLOW * speed:
                hint = f"; or take {others[0]}: {_CHOOSE.format(others[0])}" if others else ""
                found.setdefault(
                    "wire",
                    Finding(
                        "warning",
                        f"wire: {name} of {host} says {_bits(speed)}, and messages between {pair} "
                        f"get {_bits(link.rate)} ({link.rate / speed:.0%})",
                        f"{_LINE.format(name)}; if the link is shared or the ranks have few cores, "
                        f"that may be all{hint}",
                    ),
                )
    return list(found.values())


def _latency(measured: Sequence[Link]) -> float:
    return median(link.latency for link in measured)


def _rate(measured: Sequence[Link]) -> float:
    return median(link.rate for link in measured)


def _of(number: int) -> str:
    return f" (median of {number} pairs of neighbours)" if number > 1 else ""


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _bytes(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"


def _bits(rate: float) -> str:
    return f"{rate / _GIGABIT:.3g} Gbit/s"
