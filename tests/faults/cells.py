"""The matrix: which fault at which moment of a job that is started how, and what is to come of it.

It is made of rules: `expected` says what comes of a fault, `UNBOUNDED` which cells are left out
because nothing bounds them, or nothing is left to tell.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "FAULTS",
    "HOST_FAULTS",
    "MOMENTS",
    "STARTS",
    "UNBOUNDED",
    "Cell",
    "cells",
    "expected",
    "sample",
]

# Of a rank, of the launcher, and of the host of the last rank.
RANK_FAULTS = (
    "exception", "exception-in-thread", "sys-exit", "os-exit", "kill", "segfault", "stop", "memory",
    "full-disk",
)  # fmt: skip
HOST_FAULTS = ("link-cut", "node-frozen", "node-off")
FAULTS = (*RANK_FAULTS, "launcher-killed", *HOST_FAULTS)
MOMENTS = (
    "import", "construction", "forward", "backward", "collective", "checkpoint", "finalisation",
)  # fmt: skip
# See fault_starts.py.
STARTS = ("mpirun", "mpirun-hosts", "srun", "srun-node", "srun-kill")
_SLURM = ("srun", "srun-node", "srun-kill")

# Seconds, on a machine that is busy: for what is noticed at once; and for what is noticed when the
# others have waited for the 6 s of the script's timeout, asked, and told.
_AT_ONCE, _TIMEOUT = 20, 40
# And for what SLURM does about a node that does not answer for 15 s (tests/lab).
_SLURM_NOTICES = 60
# With MPICH other ranks may be silent as well, while they try to reach this one for the first time.
_WAITED_FOR = re.compile(r"[Rr]anks? ([01] and )?2 (has not|does not answer|do not answer)")
_HAS_ENDED = re.compile(r"rank 2 \(process \d+ on \w+\) (was ended by|has ended)")
# Alone on its host, it is named by the first rank of a neighbouring node; or else by the launcher,
# which may end that rank before it has spoken. Open MPI's then names the one that it has noticed.
_ENDED_ALONE = re.compile(
    rf"{_HAS_ENDED.pattern}|process rank 2 with PID|@1,2\]|PID \d+ RUNNING AT node2"
)
_WAITED_FOR_OR_LOST = re.compile(
    rf"{_WAITED_FOR.pattern}|{_HAS_ENDED.pattern}|Node failure on node2|has not answered"
)
# By its own node, or by the connection between the first ranks of nodes; or else by the time limit.
# Or MPICH ends the others at once because their connections to it have closed, and srun names it.
_ENDED_OR_WAITED_FOR = re.compile(rf"{_HAS_ENDED.pattern}|{_WAITED_FOR.pattern}|task 2: ")
# The script's limit for MPI_Init, MPIDDP_START_SECONDS (fault_job.py), is over.
_IN_INIT = re.compile(r"has waited in MPI_Init for \d+ s, and its time limit is over")
_EXITED = re.compile("mpiddp: rank 2 exited with status 3 while other ranks are in the job")
_BROKEN = re.compile("ValueError: broken on purpose")
_FULL_MEMORY = re.compile("MemoryError|not enough memory|can't allocate memory")
_NOTHING = re.compile("")


@dataclass(frozen=True)
class Cell:
    """One fault at one moment of a job.

    Attributes:
        fault: what fault.py does.
        moment: when.
        start: how the job is started.
        limit: seconds until no process of the job is left, except on a host that is lost.
        said: what the job prints.
        status: of the launcher, "not 0", or "any".
        launcher_ends: whether the launcher ends as well, or only the ranks.
    """

    fault: str
    moment: str
    start: str
    limit: float
    said: re.Pattern[str]
    status: str = "not 0"
    launcher_ends: bool = True

    @property
    def name(self) -> str:
        return f"{self.fault}-{self.moment}-{self.start}"


@dataclass(frozen=True)
class _Unbounded:
    """Cells of which nothing is expected, and why, for the documentation. None stands for all."""

    why: str
    mpi: str | None = None
    starts: Sequence[str] | None = None
    faults: Sequence[str] | None = None
    moments: Sequence[str] | None = None

    def has(self, mpi: str, start: str, fault: str, moment: str) -> bool:
        return (
            self.mpi in (None, mpi)
            and (self.starts is None or start in self.starts)
            and (self.faults is None or fault in self.faults)
            and (self.moments is None or moment in self.moments)
        )


_LIVING = ("exception-in-thread", "stop")
_ENDING = ("exception", "memory", "full-disk", "os-exit", "sys-exit")
_MPIRUN = ("mpirun", "mpirun-hosts")
# These leave the other ranks alone when one has ended.
_SRUN = ("srun", "srun-node")
UNBOUNDED = (
    _Unbounded(
        "A rank that lives but stays away when the others have ended: those wait in MPI_Finalize.",
        faults=_LIVING,
        moments=("finalisation",),
    ),
    _Unbounded(
        "A host that is cut off or frozen then. SLURM ends such a job when the node has not "
        "answered for a time (`SlurmdTimeout`); `mpirun` waits.",
        starts=_MPIRUN,
        faults=("link-cut", "node-frozen"),
        moments=("finalisation",),
    ),
    _Unbounded(
        "A rank that ends by `os._exit` while the others are in MPI_Finalize, on another host than "
        "theirs under MPICH's `mpiexec`.",
        mpi="MPICH",
        starts=("mpirun-hosts",),
        faults=("os-exit",),
        moments=("finalisation",),
    ),
    _Unbounded(
        "A rank that lives but stays away before the others have begun, under `srun` without "
        "`--kill-on-bad-exit`: those end when `MPIDDP_START_SECONDS` are over, and nobody ends it.",
        starts=_SRUN,
        faults=_LIVING,
        moments=("import",),
    ),
    _Unbounded(
        "A rank that has not begun when `mpirun` is killed: nobody ends it. `srun` has a second "
        "process for that.",
        starts=_MPIRUN,
        faults=("launcher-killed",),
        moments=("import",),
    ),
)


def cells(mpi: str) -> list[Cell]:
    """Return all cells of an MPI for which there is a bound.

    Without one are those of `UNBOUNDED`.
    """
    return [
        expected(mpi, fault, moment, start)
        for start in STARTS
        for fault in FAULTS
        for moment in MOMENTS
        if (fault not in HOST_FAULTS or start in ("mpirun-hosts", "srun"))
        and not any(each.has(mpi, start, fault, moment) for each in UNBOUNDED)
    ]


def sample(mpi: str, size: int = 40) -> list[Cell]:
    """Return some quick cells, the same each time: all starts, faults and moments in turn."""
    found: list[Cell] = []
    left = [cell for cell in cells(mpi) if cell.limit < _SLURM_NOTICES]
    while left and len(found) < size:
        seen = Counter(part for cell in found for part in (cell.fault, cell.moment, cell.start))

        def rank(cell: Cell, seen: Counter[str] = seen) -> tuple[int, int, int, int]:
            shuffled = zlib.crc32(cell.name.encode())
            return seen[cell.start], seen[cell.fault], seen[cell.moment], shuffled

        found.append(min(left, key=rank))
        left.remove(found[-1])
    return found


def expected(mpi: str, fault: str, moment: str, start: str) -> Cell:
    """Return a cell, bounded or not, with what is to come of the fault."""
    meets = moment not in ("import", "finalisation")
    limit, said, status = _AT_ONCE, _NOTHING, "not 0"
    launcher_ends = True
    if fault == "exception":
        said = _BROKEN
    elif fault == "memory":
        said = _FULL_MEMORY
    elif fault in HOST_FAULTS and start in _SLURM:
        limit, said = _TIMEOUT, _WAITED_FOR_OR_LOST
        if not meets:
            # By finalisation the others may have ended well.
            limit, said = _SLURM_NOTICES, _NOTHING
            status = "any" if moment == "finalisation" else status
        elif mpi == "Open MPI" and fault == "node-off":
            # Its ranks hear that the connection has closed, and end without another word.
            said = _NOTHING
    elif fault in HOST_FAULTS:
        limit, said = _TIMEOUT, _WAITED_FOR_OR_LOST
        # It waits for its daemon, or its agent, on a host that does not answer.
        launcher_ends = mpi == "MPICH" and fault == "link-cut"
        if fault == "node-off":
            # In the lab its launch agent ends with it. Open MPI's mpirun says 0 then.
            limit, said, status, launcher_ends = _AT_ONCE, _NOTHING, "any", True
    elif meets and fault in _LIVING:
        limit, said = _TIMEOUT, _WAITED_FOR
    elif meets and fault == "sys-exit":
        said = _EXITED
    elif fault == "sys-exit" and start == "mpirun":
        status = "3"
    elif meets and start == "mpirun-hosts" and fault in ("os-exit", "kill", "segfault"):
        said = _ENDED_ALONE
    elif meets and mpi == "MPICH" and fault in ("os-exit", "kill", "segfault"):
        # SLURM's plugin for Open MPI ends a job that has lost a rank, MPICH's does not.
        if start == "srun":
            limit, said = _TIMEOUT, _ENDED_OR_WAITED_FOR
        elif start == "srun-node":
            said = _HAS_ENDED
    if moment == "import" and _others_wait_in_init(mpi, fault, start):
        limit = _TIMEOUT
        if fault not in ("exception", "memory"):
            said, status = _IN_INIT, "not 0"
    return Cell(fault, moment, start, limit, said, status, launcher_ends)


def _others_wait_in_init(mpi: str, fault: str, start: str) -> bool:
    """Return whether a fault before MPI_Init leaves the others there until their limit is over."""
    if fault in _LIVING:
        return True
    if start in _MPIRUN:
        # MPICH's mpiexec ends a job only if a signal ended the rank.
        return fault in ("link-cut", "node-frozen") or (mpi == "MPICH" and fault in _ENDING)
    return start in _SRUN and fault in RANK_FAULTS
