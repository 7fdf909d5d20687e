"""Meet each fault of tests/faults at each moment, with mpiddp and with torch's DDP on Gloo.

    python benchmarks/faults.py OUTPUT.json [--moments backward collective]

Gloo's ranks are started by torchrun. Of each job: the seconds from the fault until no process was
left, or null if some had to be killed; its exit status; and what it said of the fault.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import mpi4py

mpi4py.rc.initialize = False  # this process starts jobs, and is in none
from mpi4py import MPI  # noqa: E402

HERE = Path(__file__).resolve().parent
for folder in ("support", "faults"):
    sys.path.append(str(HERE.parent / "tests" / folder))

from cells import MOMENTS, RANKS, cells  # noqa: E402
from fault_job import run  # noqa: E402
from measuring import describe_machine  # noqa: E402
from names import GLOO, OURS  # noqa: E402

# Seconds after a fault in which a job has to end.
LIMIT = 60


def main() -> None:
    """Run all jobs, and write the file after each, so that a run may be cut short."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--moments", nargs="+", default=list(MOMENTS))
    arguments = parser.parse_args()
    records: list[dict[str, Any]] = []
    results = {
        "machine": describe_machine(MPI.Get_library_version()),
        "ranks": RANKS,
        "faults": records,
    }
    for cell in cells():
        if cell.moment not in arguments.moments:
            continue
        for candidate in (OURS, GLOO):
            with tempfile.TemporaryDirectory() as folder:
                outcome = run(
                    cell.fault, cell.moment, Path(folder), LIMIT, RANKS, gloo=candidate == GLOO
                )
            records.append(
                {
                    "fault": cell.fault,
                    "moment": cell.moment,
                    "candidate": candidate,
                    "seconds": outcome.seconds,
                    "status": outcome.status,
                    "told": bool(cell.said.search(outcome.said)),
                }
            )
            print(json.dumps(records[-1]), flush=True)
            arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
