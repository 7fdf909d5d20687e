"""How much memory the caches hold for one process."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["share_of_cache"]

_UNITS = {"K": 1 << 10, "M": 1 << 20}
# Where Linux does not tell: what a core has at least on the machines of today.
_UNKNOWN = 1 << 20


def share_of_cache(threads: int, folder: str | None = None) -> int:
    """Return how many bytes of a last-level cache this process may count on. Not collective.

    Args:
        threads: of this process; each core that shares the cache has as much of it.
        folder: what Linux tells about the caches of a core; None: of one that this process may use.
    """
    if folder is None:
        folder = f"/sys/devices/system/cpu/cpu{min(os.sched_getaffinity(0))}/cache"
    try:
        last = max(Path(folder).glob("index*"), key=lambda cache: _read(cache, "level"))
        size = _read(last, "size")
        sharing = sum(
            int(cores[-1]) - int(cores[0]) + 1
            for part in (last / "shared_cpu_list").read_text().strip().split(",")
            for cores in [part.split("-")]
        )
    except (OSError, ValueError):
        return _UNKNOWN * threads
    return size * min(threads, sharing) // sharing


def _read(cache: Path, name: str) -> int:
    text = (cache / name).read_text().strip()
    return int(text.rstrip("KM")) * _UNITS.get(text[-1:], 1)
