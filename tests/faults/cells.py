"""The matrix: which fault at which moment, and what is to come of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import mpiddp

__all__ = ["Cell", "cells"]

RANKS = 3
_MPI = mpiddp.compiled_against()[0]
MOMENTS = (
    "import",
    "construction",
    "forward",
    "backward",
    "collective",
    "checkpoint",
    "finalisation",
)

# Seconds, on a machine that is busy: for what is noticed at once; and for what is noticed when the
# others have waited for the 6 s of the script's timeout, asked, and told.
_AT_ONCE, _TIMEOUT = 20, 40
_WAITED_FOR = re.compile(rf"[Rr]ank {RANKS - 1} (has not|does not answer)")
_NOTHING = re.compile("")


@dataclass(frozen=True)
class Cell:
    """One fault at one moment.

    Attributes:
        fault: what fault.py does.
        moment: when.
        limit: seconds until no process of the job is left.
        said: what the job prints.
        status: of the launcher; None: any but 0.
    """

    fault: str
    moment: str
    limit: float
    said: re.Pattern[str]
    status: int | None = None

    @property
    def name(self) -> str:
        return f"{self.fault}-{self.moment}"


def cells() -> list[Cell]:
    """Return all cells for which there is a bound on the MPI that runs.

    Without one is a rank that stays away, but lives, before the others have begun or after they
    have ended: they are in MPI_Init or MPI_Finalize. And one that has not begun itself is nobody's
    to end when its launcher is gone. MPICH's mpiexec also lets the others wait in MPI_Init for a
    rank that has ended before it, unless a signal ended it.
    """
    signals = ("kill", "segfault")
    return [
        cell
        for moment in MOMENTS
        for cell in _at(moment)
        if _MPI != "MPICH" or moment != "import" or cell.fault in signals
    ]


def _at(moment: str) -> list[Cell]:
    meets = moment not in ("import", "finalisation")
    broken = re.compile("ValueError: broken on purpose")
    full_memory = re.compile("MemoryError|not enough memory|can't allocate memory")
    found = [
        Cell("exception", moment, _AT_ONCE, broken),
        Cell("memory", moment, _AT_ONCE, full_memory),
        Cell("full-disk", moment, _AT_ONCE, _NOTHING),
        Cell("os-exit", moment, _AT_ONCE, _NOTHING),
        Cell("kill", moment, _AT_ONCE, _NOTHING),
        Cell("segfault", moment, _AT_ONCE, _NOTHING),
    ]
    if moment != "import":
        found.append(Cell("launcher-killed", moment, _AT_ONCE, _NOTHING))
    if meets:
        found += [
            Cell("sys-exit", moment, _TIMEOUT, _WAITED_FOR),
            Cell("exception-in-thread", moment, _TIMEOUT, _WAITED_FOR),
            Cell("stop", moment, _TIMEOUT, _WAITED_FOR),
        ]
    else:
        found.append(Cell("sys-exit", moment, _AT_ONCE, _NOTHING, status=3))
    return found
