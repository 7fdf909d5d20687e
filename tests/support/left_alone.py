"""Jobs of 3 ranks whose launcher is told to leave the others alone when a rank dies.

`srun` does so by default.
"""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import mpirun

__all__ = ["AT_ONCE", "run"]

# Seconds from the death to the end of the job: the ranks notice it within one, and leave the
# launcher some time; this machine is busy.
AT_ONCE = 12

PREAMBLE = """\
import os, sys, time
import torch
import torch.distributed as dist
import mpiddp
"""

START = """
mpiddp.init_process_group()
rank = dist.get_rank()
model = mpiddp.DistributedDataParallel(torch.nn.Linear(10, 1))
part = dist.new_group([0, 2])
dist.barrier()

def die(by_signal):
    open(__file__ + ".died", "w").write(f"{time.time()}")
    # After a signal MPICH's launcher may lose what the others print.
    os.kill(os.getpid(), 9) if by_signal and "Open MPI" in VERSION else os._exit(3)
"""


def run(
    folder: Path, source: str, before: str = ""
) -> "tuple[subprocess.CompletedProcess[str], float]":
    """Run a script on 3 ranks; return what came of it, and the seconds since die() was called.

    Args:
        folder: for the script.
        source: what it does.
        before: what it does before mpiddp begins.
    """
    script = folder / "script.py"
    launcher = mpirun.find()
    done = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False)
    version = "Open MPI" if "Open MPI" in done.stdout else "MPICH"
    leave_alone = "--continuous" if version == "Open MPI" else "-disable-auto-cleanup"
    parts = (PREAMBLE, textwrap.dedent(before), START, textwrap.dedent(source))
    script.write_text(f"VERSION = {version!r}\n{''.join(parts)}")
    command = [launcher, leave_alone, "-n", "3", sys.executable, os.fspath(script)]
    done = mpirun.run_command(command, timeout=60)
    print(done.stdout, done.stderr)
    died = folder / "script.py.died"
    return done, time.time() - float(died.read_text()) if died.exists() else 0.0
