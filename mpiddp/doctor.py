"""Report what mpiddp finds on this machine, how gradients would travel here, and what is wrong.

    mpiddp doctor [--json] [--quick]
    mpirun -n 4 mpiddp doctor
    mpirun -n 4 python -m mpiddp.doctor

Start it as you start the training: rank 0 prints for all. Each finding is ok, a warning or an
error, with what to do about it; an error makes the exit status 1. At the end it measures memory,
arithmetic and messages for some seconds, unless --quick. If this MPI may take GPU memory, it tries
that, which may take some minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import mpiddp
from mpiddp import launchers
from mpiddp.diagnosis import (
    gpus,
    host_speed,
    known_faults,
    launching,
    memory_room,
    messages,
    mpi_settings,
    placement,
    progress,
    software,
    starting,
    travelling,
)
from mpiddp.findings import Finding, worst

if TYPE_CHECKING:
    from mpi4py import MPI

# The width of the longest grade.
_WIDTH = len("warning") + 1


def main(arguments: Sequence[str], name: str = "python -m mpiddp.doctor") -> int:
    """Print the report on rank 0; return the exit status. Collective.

    Args:
        arguments: the command line, after the name.
        name: what the user has typed for this command.
    """
    parser = argparse.ArgumentParser(
        prog=name,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON instead")
    parser.add_argument("--quick", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    speaks = launchers.speaks_for_all()
    before = [finding for part in BEFORE_START for finding in part()] if speaks else []
    if not speaks and launchers.told_local()[0] == 0:
        # Where MPI does not start on a node, no other one can say why.
        for finding in memory_room.before_start():
            text = f"mpiddp doctor: {finding.text}\n-> {finding.remedy}"
            print(text, file=sys.stderr, flush=True)
    if not options.json:
        _print(before)  # now: MPI may end this process
    try:
        mpiddp.init_process_group()
    except (ImportError, RuntimeError, ValueError) as error:
        # Each process raises it: the settings are compared, and in a world of one it is alone.
        found = [launching.describe_failed_start(error)]
    else:
        found = [finding for finding in report(options.quick) if finding not in before]
        speaks = mpiddp.get_topology().rank == 0
        mpiddp.destroy_process_group()
    if speaks and options.json:
        findings = [asdict(finding) for finding in [*before, *found]]
        print(json.dumps({"grade": worst([*before, *found]), "findings": findings}, indent=1))
    elif speaks:
        _print(found)
    return int(worst(found) == "error")


def report(quick: bool = False) -> list[Finding]:
    """Return what the parts of REPORTS and MEASUREMENTS find, as rank 0 sees it.

    Collective over the world.

    Args:
        quick: leaves out MEASUREMENTS, which take up to 10 s.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    parts = REPORTS if quick else [*REPORTS, *MEASUREMENTS]
    found = [finding for part in parts for finding in part(world)]
    return list(world.bcast(found if world.Get_rank() == 0 else None))


def _print(found: Sequence[Finding]) -> None:
    for finding in found:
        print(f"{finding.grade:{_WIDTH}}{finding.text}")
        if finding.remedy:
            print(f"{'':{_WIDTH}}-> {finding.remedy}")
    sys.stdout.flush()


# What needs no MPI, in order: one process says it, also where MPI does not start. There is no error
# among it, since the others would not know.
BEFORE_START: list[Callable[[], list[Finding]]] = [
    software.report,
    launching.report,
    mpi_settings.report_here,
    memory_room.before_start,
]

# The other parts of the report, in order: each runs on every rank, and rank 0 prints what it finds
# there. A new diagnosis gets its line here.
REPORTS: list[Callable[[MPI.Comm], list[Finding]]] = [
    known_faults.report,
    mpi_settings.report,
    placement.report,
    memory_room.report,
    starting.report,
    travelling.report_memory,
    travelling.report_wire,
    travelling.report_heartbeat,
    gpus.report,
]

# What takes some seconds, in order: as REPORTS, and left out by --quick.
MEASUREMENTS: list[Callable[[MPI.Comm], list[Finding]]] = [
    starting.measure,
    host_speed.report,
    messages.report,
    progress.report,
]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
