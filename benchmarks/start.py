"""Measure a start: from the launcher to the end of the first step, beside torchrun with Gloo.

    python benchmarks/start.py [--ranks 2 8] [--rounds 5] [--json FILE]

Each rank imports torch, joins, wraps a small model and steps once with AdamW. The candidates take
turns, as jobs of their own. Seconds are those of the slowest rank since the launcher was started;
processor time is a rank's own. System calls that name a file are counted by strace, in one more
job of two ranks of each: on a shared filesystem they are what a start of many ranks waits for.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import Record, describe_machine, ratio, show_ratio, table
from names import GLOO, OURS

CANDIDATES = (OURS, GLOO)

RANK = """
import json, sys, time
import torch
import torch.distributed as dist
if {ours}:
    import mpiddp
    from mpiddp import DistributedDataParallel
    mpiddp.init_process_group()
else:
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
found = {{"seconds": time.time() - {began}, "processor": time.process_time()}}
sys.stdout.write(json.dumps(found | {{"modules": len(sys.modules)}}) + "\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""
# A rank that writes what it asks the filesystem for into a file of its own.
COUNTED = 'exec strace -f -c -e trace=%file -o "$COUNTS/$$" "$0" "$@"'


def command_of(candidate: str, ranks: int, rank: Sequence[str]) -> list[str]:
    """Return the command of a job whose ranks run `rank`."""
    if candidate == OURS:
        beside = Path(sys.executable).parent
        return [shutil.which("mpirun", path=str(beside)) or "mpirun", "-n", str(ranks), *rank]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--nproc-per-node", str(ranks), "--master-port", str(port), "--no-python"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *rank]


def start(candidate: str, ranks: int, counts: Path | None = None) -> list[Record]:
    """Run a job; return what each rank has said.

    Raises:
        RuntimeError: the job failed.
    """
    env = os.environ | {"OMP_NUM_THREADS": "1", "COUNTS": str(counts)}
    if candidate != OURS:
        env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    program = RANK.format(ours=candidate == OURS, began=time.time())
    rank = [sys.executable, "-c", program]
    if counts is not None:
        rank = ["sh", "-c", COUNTED, *rank]
    done = subprocess.run(
        command_of(candidate, ranks, rank),
        env=env,
        cwd=tempfile.gettempdir(),  # where no folder of sources hides a package
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60 + 20 * ranks,
        check=False,
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or len(said) != ranks:
        raise RuntimeError(f"{candidate} on {ranks} ranks failed:\n{done.stderr[-3000:]}")
    return said


def calls_of(candidate: str) -> dict[str, int]:
    """Return how many system calls a rank makes that name a file, by their names."""
    with tempfile.TemporaryDirectory() as name:
        start(candidate, 2, Path(name))
        found: dict[str, int] = {}
        files = list(Path(name).iterdir())
        for file in files:
            for line in file.read_text(encoding="utf-8").splitlines():
                cells = line.split()
                if len(cells) >= 5 and cells[3].isdigit() and cells[-1] != "total":
                    found[cells[-1]] = found.get(cells[-1], 0) + int(cells[3])
    return {call: count // len(files) for call, count in found.items()}


def measure(ranks: int, rounds: int) -> Record:
    """Let the candidates start in turn; return samples, one for each round."""
    samples: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for candidate in CANDIDATES:
            said = start(candidate, ranks)
            record = samples.setdefault(candidate, {"seconds": [], "processor": [], "modules": []})
            record["seconds"].append(max(each["seconds"] for each in said))
            record["processor"].append(statistics.mean(each["processor"] for each in said))
            record["modules"].append(said[0]["modules"])
    return {"ranks": ranks, "records": samples}


def show(record: Record) -> str:
    """Return a table of what was measured on a number of ranks."""
    rows = [["ranks", "candidate", "until the first step, s", "processor time a rank, s", "over"]]
    records = record["records"]
    for candidate, samples in records.items():
        over = ratio(records[OURS]["processor"], samples["processor"])
        rows.append(
            [
                str(record["ranks"]),
                candidate,
                f"{statistics.median(samples['seconds']):.2f}",
                f"{statistics.median(samples['processor']):.2f}",
                "-" if candidate == OURS else show_ratio(over),
            ]
        )
    return table(rows)


def library_version() -> str:
    """Return what the MPI says of itself, without starting it here."""
    from mpiddp.mpi.library import linked_version

    return str(linked_version())


def main() -> None:
    """Measure, print, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="2 8")
    parser.add_argument("--rounds", type=int, default=5, help="for each number of ranks (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write samples and machine")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": describe_machine(library_version()), "start": []}
    for ranks in options.ranks:
        found["start"].append(measure(ranks, options.rounds))
        print(show(found["start"][-1]), flush=True)
    if shutil.which("strace"):
        found["calls"] = {candidate: calls_of(candidate) for candidate in CANDIDATES}
        totals = {candidate: sum(calls.values()) for candidate, calls in found["calls"].items()}
        print(f"calls that name a file, a rank: {totals}")
        print(f"ratio: {totals[OURS] / totals[GLOO]:.3f}")
    else:
        print("There is no strace here: system calls were not counted.")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
