"""Room for the ranks of each node: shared memory, free memory, and limits on either.

MPI's messages inside a node and the workers of torch's DataLoader need /dev/shm. mpiddp's buckets
do not (they are anonymous files), but count to the limit of the container or job. Who gets past a
limit dies of a bus error or is killed, with no word of what it was.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpiddp import launchers
from mpiddp.findings import Finding
from mpiddp.rendezvous.world import get_topology

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Room", "before_start", "describe", "here", "memory_left", "report"]

_SHM = Path("/dev/shm")  # noqa: S108  # nothing is written there
# A batch of 32 images of 224 x 224 in float32 has 19 MB. Two workers of a DataLoader have two each
# under way. Docker's default is 64 MB for a whole container.
_SHM_A_RANK = 4 * 32 * 3 * 224 * 224 * 4
# Open MPI 5.0 asks for 16 MiB for each rank when it starts, and says so where they are not there.
# MPICH 5.0 takes 5 MiB, and ends with a bus error without.
_SHM_TO_START = 16 << 20
# What training of ResNet-50 with SGD and momentum takes beside its activations: parameters,
# gradients, momentum and buckets of 98 MiB each, and torch itself with 300 MiB.
_FREE_A_RANK = (4 * 98 + 300) << 20
# torch alone maps some GB that it never touches.
_ADDRESSES_LEFT = 4 << 30
# What limits a process (setrlimit), how much has to be left, and what it stops.
_LIMITS = {
    "ulimit -v": (resource.RLIMIT_AS, _ADDRESSES_LEFT, "addresses"),
    "ulimit -d": (resource.RLIMIT_DATA, _FREE_A_RANK, "data"),
    "ulimit -f": (resource.RLIMIT_FSIZE, _FREE_A_RANK, "a file, as shared memory is one,"),
    "ulimit -l": (resource.RLIMIT_MEMLOCK, _FREE_A_RANK, "memory that an adapter may read"),
}


@dataclass(frozen=True)
class Room:
    """What the ranks of one node have.

    Attributes:
        host: the node's name.
        ranks: how many they are.
        shm: free bytes in /dev/shm, and all of them.
        free: bytes that are free for all its ranks, by the machine or a limit.
        limited: whether it is a limit of a container or job.
        limits: those of a process that are low, as `ulimit` names them, in bytes.
    """

    host: str
    ranks: int
    shm: tuple[int, int]
    free: int
    limited: bool
    limits: dict[str, int]


def report(world: MPI.Comm) -> list[Finding]:
    """Return what there is to say of all nodes; on rank 0. Collective."""
    topology = get_topology()
    own = here(topology.local_world_size) if topology.local_rank == 0 else None
    everyone = world.gather(own)
    return describe([room for room in everyone if room is not None]) if everyone else []


def before_start() -> list[Finding]:
    """Say if MPI may not start on this node. Not collective; for the first process of each node."""
    room = here(launchers.told_local()[1])
    return [_shared([room])] if room.shm[0] < _SHM_TO_START * room.ranks else []


def here(ranks: int) -> Room:
    """Return what so many ranks have on this node. Not collective."""
    try:
        shm = os.statvfs(_SHM)
        shared = shm.f_bavail * shm.f_frsize, shm.f_blocks * shm.f_frsize
    except OSError:
        shared = 0, 0
    machine = _machine_free()
    left = memory_left()
    low = {}
    for name, (what, least, _) in _LIMITS.items():
        soft = resource.getrlimit(what)[0]
        if name == "ulimit -l" and not any(Path("/sys/class/infiniband").glob("*")):
            continue
        used = _used_addresses() if name == "ulimit -v" else 0
        if soft != resource.RLIM_INFINITY and soft < least + used:
            low[name] = soft
    return Room(
        socket.gethostname(),
        ranks,
        shared,
        machine if left is None else min(machine, left),
        left is not None and left < machine,
        low,
    )


def describe(rooms: Sequence[Room]) -> list[Finding]:
    """Return what there is to say of the nodes. Not collective."""
    least = min(rooms, key=lambda room: room.free / room.ranks)
    limit = "a limit of the container or job leaves" if least.limited else "there are"
    text = f"memory: {limit} {_size(least.free)} for {_ranks(least)}"
    found = [
        _grade(
            least.free < _FREE_A_RANK * least.ranks,
            text,
            "ask for more memory (srun --mem; docker run --memory), or start fewer ranks a node: "
            "who takes more is killed",
        )
    ]
    return [*found, _shared(rooms), *_limited(rooms)]


def _shared(rooms: Sequence[Room]) -> Finding:
    room = min(rooms, key=lambda each: each.shm[0] / each.ranks)
    return _grade(
        room.shm[0] < _SHM_A_RANK * room.ranks,
        f"{_SHM}: {_size(room.shm[0])} of {_size(room.shm[1])} free for {_ranks(room)}",
        "make it larger (docker run --shm-size=8g or --ipc=host; mount -o remount,size=50% "
        "/dev/shm), or remove what jobs have left there: MPI or a DataLoader ends with a bus "
        "error where it is full",
    )


def _limited(rooms: Sequence[Room]) -> Iterable[Finding]:
    for name, (_, _, what) in _LIMITS.items():
        hosts = [room for room in rooms if name in room.limits]
        if hosts:
            room = min(hosts, key=lambda each: each.limits[name])
            more = f" and {len(hosts) - 1} other nodes" if len(hosts) > 1 else ""
            yield Finding(
                "warning",
                f"limit: {name} of a rank on {room.host}{more} allows {what} "
                f"of {_size(room.limits[name])}",
                f"{name} unlimited before the job starts (/etc/security/limits.conf; SLURM hands "
                f"on those of the shell that submits, but for PropagateResourceLimits)",
            )


def memory_left(root: Path = Path("/sys/fs/cgroup"), groups: str | None = None) -> int | None:
    """Return how many bytes a control group leaves to its processes, None without a limit.

    Not collective.

    Args:
        root: where the groups are mounted.
        groups: what the system says of the groups of this process; by default it is asked.
    """
    if groups is None:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    left = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = top / path.lstrip("/")
        # In a container the path may be that of another root.
        for each in (folder, *folder.parents, top):
            if each.is_relative_to(top):
                left += _left_by(each, *names)
    return min(left, default=None)


def _left_by(folder: Path, limit: str, usage: str, cache: str) -> list[int]:
    """Return what one group leaves over; what it keeps of files it can give back."""
    try:
        most = int((folder / limit).read_text())  # "max" is none
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []
    # Without a limit version 1 says the largest number that there is.
    return [max(0, most - used + int(stat.get(cache, 0)))] if most < 1 << 60 else []


def _machine_free() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _used_addresses() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _grade(is_bad: bool, text: str, remedy: str) -> Finding:
    return Finding("warning", text, remedy) if is_bad else Finding("ok", text)


def _ranks(room: Room) -> str:
    return f"{room.ranks} rank{'s' if room.ranks != 1 else ''} on {room.host}"


def _size(size: int) -> str:
    return f"{size / (1 << 30):.3g} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.3g} MiB"
