"""Where the environment lies: what each rank asks a filesystem for before it can train."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpiddp.findings import Finding

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Mount", "describe", "mount_of", "report"]

# As /proc/self/mountinfo names filesystems that many nodes share.
_SHARED = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "fhgfs", "gfs2", "gpfs", "lustre", "nfs", "nfs4"),
    *("ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "wekafs"),
    *("fuse.ceph-fuse", "fuse.dfuse", "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs"),
}
# With fewer ranks a shared filesystem answers all of them in some seconds: each makes 20,000 calls
# (benchmarks/start.py), and a server answers some ten thousand a second.
FROM_RANKS = 64
_MOUNTS = Path("/proc/self/mountinfo")


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
