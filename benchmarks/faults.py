"""Meet each fault of tests/faults at each moment, with mpiddp and with torch's DDP on Gloo.

    python benchmarks/faults.py OUTPUT.json [--moments backward collective] [--at-once 3]

mpiddp's ranks are started by mpirun and by SLURM's srun, Gloo's by torchrun (in a run on Open MPI:
it is the same on both). Faults of a rank and of the launcher are met on one machine, and under srun
on two hosts; those of a host on two hosts. Needs root, for the hosts of tests/lab.

Of each job: the seconds from the fault until no rank was left, and until no process was, or null if
some had to be killed; its exit status; and whether it told of the fault. The file is written after
each job, and what it has already is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mpi4py

mpi4py.rc.initialize = False  # this process starts jobs, and is in none
from mpi4py import MPI  # noqa: E402

HERE = Path(__file__).resolve().parent
for folder in ("support", "faults"):
    sys.path.append(str(HERE.parent / "tests" / folder))

from cells import FAULTS, HOST_FAULTS, MOMENTS, expected  # noqa: E402
from fault_hosts import Labs  # noqa: E402
from fault_job import run  # noqa: E402
from fault_starts import ON_HOSTS, RANKS  # noqa: E402
from measuring import describe_machine  # noqa: E402

# Seconds after a fault in which a job has to end.
LIMIT = 60
# How somebody tells of the end of a process, where nothing else can be expected: mpiddp, the MPI, a
# launcher.
_ENDED = re.compile(
    rf"[Rr]ank +:? *{RANKS - 1} |task {RANKS - 1}:|Killed|Segmentation|signal|EXIT CODE|SIG[A-Z]+"
)


def main() -> None:
    """Run all jobs, and write the file after each, so that a run may be cut short."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--moments", nargs="+", default=list(MOMENTS))
    parser.add_argument("--faults", nargs="+", default=list(FAULTS))
    parser.add_argument("--starts", nargs="+", default=["mpirun", "srun", "torchrun"])
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="a folder for what each job says")
    arguments = parser.parse_args()
    records: list[dict[str, Any]] = []
    if arguments.output.exists():
        records = json.loads(arguments.output.read_text(encoding="utf-8"))["faults"]
    results = {
        "machine": describe_machine(MPI.Get_library_version()),
        "ranks": RANKS,
        "limit": LIMIT,
        "faults": records,
    }
    known = {(each["start"], each["fault"], each["moment"]) for each in records}
    jobs = [
        (start, fault, moment)
        for moment in arguments.moments
        for start, fault in _jobs()
        if start.partition("-")[0] in arguments.starts
        and fault in arguments.faults
        and (start, fault, moment) not in known
    ]
    lock, labs = threading.Lock(), Labs()

    def measure(job: tuple[str, str, str]) -> None:
        record = _measure(*job, labs, arguments.keep)
        with lock:
            print(json.dumps(record), flush=True)
            if not record["met"]:
                return  # the machine was too busy, and another run will try again
            records.append(record)
            text = json.dumps(results, indent=1) + "\n"
            arguments.output.write_text(text, encoding="utf-8")

    try:
        with ThreadPoolExecutor(arguments.at_once) as threads:
            list(threads.map(measure, jobs))
    finally:
        labs.close()


def _jobs() -> Iterator[tuple[str, str]]:
    """Return the start and the fault of each job."""
    starts = ["mpirun", "srun"]
    if MPI.get_vendor()[0] == "Open MPI":
        starts.append("torchrun")
    for start in starts:
        for fault in FAULTS:
            on_hosts = fault in HOST_FAULTS and start != "srun"
            yield f"{start}-hosts" if on_hosts else start, fault


def _measure(start: str, fault: str, moment: str, labs: Labs, keep: Path | None) -> dict[str, Any]:
    with contextlib.ExitStack() as until_done:
        lab = None
        if fault in HOST_FAULTS:
            lab = until_done.enter_context(labs.own(start == "srun"))
        elif start in ON_HOSTS:
            lab = labs.shared()
        if keep is None:
            # In /tmp whatever TMPDIR is: the hosts have it in common.
            temporary = tempfile.TemporaryDirectory(prefix="mpiddp-faults-", dir="/tmp")
            folder = Path(until_done.enter_context(temporary))
        else:
            folder = keep / f"{fault}-{moment}-{start}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        cell = expected(MPI.get_vendor()[0], fault, moment, start)
        outcome = run(fault, moment, start, folder, LIMIT, lab, cell.launcher_ends)
        if keep is not None:
            (folder / "left").write_text(f"{outcome}\n")
    told = cell.said.search(outcome.said)
    if not cell.said.pattern or start.startswith("torchrun"):
        told = _ENDED.search(outcome.said)
    return {
        "fault": fault,
        "moment": moment,
        "start": start,
        "met": outcome.met,
        "seconds": outcome.seconds,
        "over": outcome.over,
        "status": outcome.status,
        "told": bool(told),
        "left": outcome.left,
    }


if __name__ == "__main__":
    main()
