"""The network interfaces of this node: how fast they say they are, and which one carries messages.

No variable tells which interface an MPI takes: it may fall back to another one without a word. The
counters of the kernel do, also for MPIs that nobody knows. Messages of RDMA are not among those of
the network interface, the adapter has counters of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Interface", "carrier", "interfaces"]

_SYSTEM = Path("/sys/class")
# In bytes a second.
_MEGABIT, _GIGABIT = 1e6 / 8, 1e9 / 8
# In which unit an adapter counts what it has sent (sysfs-class-infiniband of Linux).
_WORD = 4


class Interface(NamedTuple):
    """An interface that is up.

    Attributes:
        speed: what it says, in bytes a second, 0 where it says nothing.
        sent: bytes since it is there.
    """

    speed: float
    sent: int


def interfaces(system: Path = _SYSTEM) -> dict[str, Interface]:
    """Return the interfaces that lead out of this node, by their names. Not collective.

    Args:
        system: the folder in which the kernel tells of devices.
    """
    found = {}
    for folder in sorted(system.glob("net/*")):
        if folder.name != "lo" and _text(folder / "carrier") == "1":
            speed = _number(folder / "speed") * _MEGABIT  # -1 where nobody knows
            found[folder.name] = Interface(
                max(0.0, speed), _number(folder / "statistics" / "tx_bytes")
            )
    for folder in sorted(system.glob("infiniband/*/ports/*")):
        if "ACTIVE" in _text(folder / "state"):
            rate = re.match(r"([\d.]+) Gb/sec", _text(folder / "rate"))
            name = f"{folder.parents[1].name}:{folder.name}"  # as UCX_NET_DEVICES has it
            found[name] = Interface(
                float(rate[1]) * _GIGABIT if rate else 0.0,
                _number(folder / "counters" / "port_xmit_data") * _WORD,
            )
    return found


def carrier(
    before: Mapping[str, Interface], after: Mapping[str, Interface], least_bytes: float
) -> str:
    """Return the interface that has carried messages, "" if none is seen to. Not collective.

    Args:
        before: the interfaces before the messages.
        after: those after them.
        least_bytes: how much has been sent at least.
    """
    sent = {name: each.sent - before[name].sent for name, each in after.items() if name in before}
    most = max(sent.values(), default=0)
    if most < least_bytes / 2:
        return ""
    # A bond has sent what its parts have.
    alike = [name for name, each in sent.items() if each > 0.9 * most]
    return max(alike, key=lambda name: after[name].speed)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # of an interface that is down
        return ""


def _number(file: Path) -> int:
    text = _text(file)
    return int(text) if re.fullmatch(r"-?\d+", text) else 0
