"""Which cores lie beside the same memory: those of a NUMA node, or of a socket."""

from __future__ import annotations

from pathlib import Path

__all__ = ["KINDS", "groups_of_cores"]

# From the largest group of cores to the smallest.
KINDS = ("socket", "numa")

_SYSTEM = "/sys/devices/system"


def groups_of_cores(kind: str, system: str = _SYSTEM) -> list[set[int]]:
    """Return the numbers of the cores of each socket or NUMA node, as Linux tells them.

    Not collective.

    Args:
        kind: "socket" or "numa".
        system: a folder as Linux's /sys/devices/system.

    Returns:
        none where it does not tell.
    """
    root = Path(system)
    try:
        if kind == "numa":
            lists = [file.read_text() for file in root.glob("node/node[0-9]*/cpulist")]
            groups = [_numbers(text) for text in lists]
        else:
            of_package: dict[int, set[int]] = {}
            for file in root.glob("cpu/cpu[0-9]*/topology/physical_package_id"):
                core = int(file.parent.parent.name.removeprefix("cpu"))
                of_package.setdefault(int(file.read_text()), set()).add(core)
            groups = list(of_package.values())
    except (OSError, ValueError):
        return []
    # A NUMA node may have memory only.
    return sorted((group for group in groups if group), key=min)


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list as "0-3,8"."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
