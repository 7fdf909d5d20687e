"""Run examples/train.py once whole, and stopped at each batch of its first two epochs and resumed.

    stop_at_each_batch.py TRAIN.PY FOLDER

Rank 0 prints a line of each, with what that training said of its epochs and its end. Instead of a
signal, whose step nobody can choose, `preemption.requested` says where to stop.
"""

import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path

import mpi4py.MPI as MPI

from mpiddp import preemption

SAID = re.compile(r"^(?:epoch .*|all \d+ replicas .*)$", re.M)
# Three batches an epoch.
ARGUMENTS = ["--epochs", "3", "--batch-size", "400"]
BATCHES = 3

path, folder = sys.argv[1], Path(sys.argv[2])
spec = importlib.util.spec_from_file_location("train", path)
assert spec
assert spec.loader
train = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)
stop_at = calls = 0


def requested() -> bool:
    global calls
    calls += 1
    return calls == stop_at


def run(where: Path, stop: int) -> list[str]:
    """Train in `where` until batch `stop`, 0: to the end; return what was said of epochs."""
    global stop_at, calls
    stop_at, calls = stop, 0
    sys.argv = [path, *ARGUMENTS, "--checkpoint", str(where), "--resume"]
    MPI.COMM_WORLD.Barrier()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train.main()
    return SAID.findall(said.getvalue())


preemption.requested = requested
whole = run(folder / "whole", 0)
if MPI.COMM_WORLD.rank == 0:
    print("whole", *whole, sep="|", flush=True)
for stop in range(1, 2 * BATCHES + 1):
    where = folder / str(stop)
    said = run(where, stop) + run(where, 0)
    if MPI.COMM_WORLD.rank == 0:
        print(f"stopped at {stop}", *said, sep="|", flush=True)
