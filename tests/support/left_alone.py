"""Jobs of 3 ranks whose launcher is told to leave the others alone when a rank dies.

`srun` does so by default.
"""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
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
    with _ended_after_its_ranks(script):
        done = mpirun.run_command(command, timeout=60)
    print(done.stdout, done.stderr)
    died = folder / "script.py.died"
    return done, time.time() - float(died.read_text()) if died.exists() else 0.0


# Note [A launcher that outlives its ranks]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# With --continuous, Open MPI's launcher (PRRTE 3) locks itself out where two ranks call MPI_Abort
# at a time, also for a program of plain MPI: 12 of 30 runs. Its ranks have all ended by then, which
# is what these tests are about.


@contextlib.contextmanager
def _ended_after_its_ranks(script: Path) -> Iterator[None]:
    """Within, kill a launcher of `script` whose ranks ended a few seconds ago."""
    is_over = threading.Event()
    watch = threading.Thread(target=_end_launcher, args=(os.fspath(script), is_over))
    watch.start()
    try:
        yield
    finally:
        is_over.set()
        watch.join()


def _end_launcher(script: str, is_over: threading.Event) -> None:
    gone_at = None
    while not is_over.wait(0.5):
        ranks, others = _processes(script)
        if ranks or not Path(f"{script}.died").exists():
            gone_at = None
        elif gone_at is None:
            gone_at = time.monotonic()
        elif time.monotonic() > gone_at + 3:
            for process in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def _processes(script: str) -> tuple[list[int], list[int]]:
    """Return the processes that run `script`, and those that only have it among their arguments."""
    ranks, others = [], []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            if script.encode() in arguments:
                (ranks if arguments[1] == script.encode() else others).append(int(folder.name))
    return ranks, others
