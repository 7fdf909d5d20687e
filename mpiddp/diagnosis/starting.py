"""Where the environment lies: what each rank asks a filesystem for before it can train."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpiddp.findings import Finding

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Mount", "calls_of_a_start", "describe", "measure", "mount_of", "report"]

# As /proc/self/mountinfo names filesystems that many nodes share.
_SHARED = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "fhgfs", "gfs2", "gpfs", "lustre", "nfs", "nfs4"),
    *("ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "wekafs"),
    *("fuse.ceph-fuse", "fuse.dfuse", "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs"),
}
# With fewer ranks a shared filesystem answers all of them in some seconds: each makes about 20,000
# calls, and a server answers some ten thousand a second.
FROM_RANKS = 64
_MOUNTS = Path("/proc/self/mountinfo")

# What a rank imports, and the calls of Python on the way that name a file. The loader of shared
# libraries makes some more, which strace sees (benchmarks/start.py): a hundredth.
_COUNTS_CALLS = """\
import os, posix
calls = 0
def counted(function):
    def call(*arguments, **named):
        global calls
        calls += 1
        return function(*arguments, **named)
    return call
for name in ("stat", "lstat", "listdir", "scandir", "readlink", "access"):
    for module in (posix, os):  # the import system keeps to the first one
        setattr(module, name, counted(getattr(module, name)))
import sys
def hear(event, arguments):  # of open, in any form
    global calls
    calls += event == "open"
sys.addaudithook(hear)
import torch, mpiddp
print(calls)
"""
# Seconds that it may take.
_LIMIT = 60


class Mount(NamedTuple):
    """A filesystem.

    Attributes:
        folder: where it is mounted.
        kind: as the system names it, such as nfs4.
    """

    folder: str
    kind: str


def report(world: MPI.Comm) -> list[Finding]:
    """Return what there is to say of this rank's environment. Collective over `world`."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = [Path(file) for file in files if isinstance(file, str)]
    table = _MOUNTS.read_text(encoding="utf-8", errors="replace")
    kinds = {mount_of(folder, table).kind for folder in {path.parent for path in paths}}
    return describe(Path(sys.prefix), kinds, len(paths), world.Get_size())


def measure(world: MPI.Comm) -> list[Finding]:
    """Return how many calls for files a start makes. Collective over `world`."""
    calls = calls_of_a_start() if world.Get_rank() == 0 else None  # only its finding is printed
    if calls is None:
        return []
    ranks = world.Get_size()
    text = f"imports: for torch and mpiddp a rank asks {calls:,} times for a file or folder"
    if ranks > 1:
        text += f", {ranks} ranks {calls * ranks:,} times"
    return [Finding("ok", text)]


def calls_of_a_start() -> int | None:
    """Return how many calls that name a file a rank makes to import torch and mpiddp.

    A process of its own imports them once more, which takes seconds. None: it did not work. Not
    collective.
    """
    command = [sys.executable, "-c", _COUNTS_CALLS]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_LIMIT,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return int(done.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def describe(folder: Path, kinds: Iterable[str], files: int, ranks: int) -> list[Finding]:
    """Return the finding. Not collective.

    Args:
        folder: the environment.
        kinds: the filesystems that modules were imported from.
        files: how many modules a rank has imported.
        ranks: in the job.
    """
    lies = f"environment: {folder}; a rank imports {files} files, from {', '.join(sorted(kinds))}"
    shared = sorted(_SHARED.intersection(kinds))
    if not shared or ranks < FROM_RANKS:
        return [Finding("ok", lies)]
    return [
        Finding(
            "warning",
            f"{lies}: all {ranks} ranks ask {' and '.join(shared)} for them at once, and wait",
            "copy the environment to each node first: slurm/train_packed.sbatch "
            "(docs/how-to/many-ranks.md)",
        )
    ]


def mount_of(path: Path, table: str | None = None) -> Mount:
    """Return the filesystem that a path lies on. Not collective.

    Args:
        path: of a file or folder.
        table: what the system says of mounts, by default /proc/self/mountinfo.
    """
    if table is None:
        table = _MOUNTS.read_text(encoding="utf-8", errors="replace")
    resolved = path.resolve()
    found = Mount("/", "unknown")
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        folder = before.split()[4].encode().decode("unicode_escape")  # \040 is a space
        # A later mount hides an earlier one on the same folder.
        if len(folder) >= len(found.folder) and resolved.is_relative_to(folder):
            found = Mount(folder, after.split()[0])
    return found
