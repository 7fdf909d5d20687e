"""Whether all hosts see the same folder: proved before the first save, and asked by each load.

Note [Folders that are not shared]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A host's own disk has the same name on all hosts. A sharded checkpoint there would be in parts that
nobody can put together, so the first rank makes a file that all others must see. A state that the
first rank writes alone is whole there, and found again as long as a rank runs on that host: it is
saved with a warning, and `load` asks a rank of each host what it sees. Numbers of checkpoints go on
from what any host has, so the newest is the newest of all.
"""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
import warnings
from pathlib import Path
from typing import NamedTuple

from mpiddp.checkpoint import folders
from mpiddp.checkpoint.ranks import Ranks, raise_together

__all__ = ["Sighting", "is_proved", "look", "prove"]

# How long the name of a new file may take to be seen on another host.
_SECONDS = 5.0

# Folders that all ranks that save there have seen, or were told about.
_proved: set[Path] = set()


def is_proved(root: Path) -> bool:
    """Return whether this rank has been through `prove` with this folder. Not collective."""
    return root in _proved


def prove(ranks: Ranks, root: Path, sharded: bool) -> None:
    """See that all ranks have the same folder under this name. Collective.

    Args:
        ranks: who saves there.
        root: the folder, made where it is missing; the first rank's holds.
        sharded: whether all of them write.

    Raises:
        RuntimeError: they do not, and all of them write; raised on all ranks.
    """
    root = ranks.from_first(root)
    _proved.add(root)
    if ranks.count == 1:
        return
    # Named as what killed jobs leave, so that it goes with that.
    file = root / f".000000-step-0.{uuid.uuid4().hex}.writing"
    if ranks.rank == 0:
        try:
            root.mkdir(parents=True, exist_ok=True)
            file.touch(exist_ok=False)
        except OSError:
            file = Path()  # what is wrong with the folder, the save itself says best
    file = ranks.from_first(file)
    seen = file == Path() or _sees(file)
    told = ranks.gather((socket.gethostname(), seen))
    if ranks.rank == 0:
        with contextlib.suppress(OSError):
            file.unlink()
    blind: dict[str, list[int]] = {}
    for rank, (host, sees) in enumerate(told):
        if not sees:
            blind.setdefault(host, []).append(rank)
    if not blind:
        return
    where = ", ".join(f"{ranks.name(*numbers)} on {host}" for host, numbers in blind.items())
    message = (
        f"{root} is not one folder for all hosts: what {ranks.name(0)} on {told[0][0]} writes "
        f"there is not seen by {where}"
    )
    if sharded:
        _proved.discard(root)
        raise RuntimeError(
            f"{ranks.name(ranks.rank)} cannot save a checkpoint: {message}. A state of which each "
            f"rank writes a part needs a folder on a file system that all hosts share"
        )
    if ranks.rank == 0:
        warnings.warn(
            f"mpiddp: {message}. A job without {told[0][0]} will not find its checkpoints: save "
            f"into a file system that all hosts share",
            RuntimeWarning,
            stacklevel=5,
        )


def _sees(file: Path) -> bool:
    """Return whether this rank sees a file that is there, or a folder in which it cannot be."""
    with contextlib.suppress(OSError):
        # Unlike a look, it asks the server of a file system that remembers what is not there.
        made = not file.parent.exists()
        file.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + _SECONDS
    while not file.exists():
        if time.monotonic() > until:
            if made:
                with contextlib.suppress(OSError):
                    file.parent.rmdir()
            return False
        time.sleep(0.05)
    return True


class Sighting(NamedTuple):
    """A checkpoint, and who sees it.

    Attributes:
        entry: of the first of them.
        sums: the text of its sums, "" if they cannot be read.
        ranks: the first rank of each host that sees it.
    """

    entry: folders.Entry
    sums: str
    ranks: list[int]


def look(ranks: Ranks, root: Path) -> tuple[list[str], list[Sighting]]:
    """Return each rank's host, and what hosts see in the first rank's `root`, the newest first.

    Collective.

    Raises:
        OSError: this rank cannot look.
        RuntimeError: another one cannot.
    """
    root, hosts = ranks.from_first(root), ranks.gather(socket.gethostname())
    seen: list[tuple[folders.Entry, str]] = []
    error = None
    if hosts.index(hosts[ranks.rank]) == ranks.rank:
        try:
            seen = [(entry, folders.sums_of(entry.path)) for entry in folders.entries(root)]
        except Exception as failure:
            error = failure
    raise_together(ranks, error, "look for checkpoints")
    found: dict[tuple[folders.Entry, str], Sighting] = {}
    for rank, entries in enumerate(ranks.gather(seen)):
        for entry, sums in entries:
            found.setdefault((entry, sums), Sighting(entry, sums, [])).ranks.append(rank)
    sightings = sorted(found.values(), key=lambda each: each.ranks[0])
    if sightings:
        folders.go_on_from(root, max(each.entry.number for each in sightings))
    return hosts, sorted(sightings, key=lambda each: each.entry, reverse=True)
