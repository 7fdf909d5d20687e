"""A signal that comes while Python imports torch, held back by the first lines of a script."""

import sys
from pathlib import Path

import mpirun
import pytest
from patience import enough

pytestmark = [pytest.mark.timeout(300), pytest.mark.once]

SCRIPT = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
if rank == 1:
    os.kill(os.getpid(), signal.SIGUSR1)

import sys, time
import mpiddp
from mpiddp import preemption

mpiddp.init_process_group()
preemption.install()
until = time.monotonic() + float(sys.argv[1])
while not preemption.requested() and time.monotonic() < until:
    time.sleep(0.01)
held = signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
print("requested" if preemption.requested() else "not", "held" if held else "let in", flush=True)
mpiddp.destroy_process_group()
"""


def test_it_counts_from_install_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [mpirun.find(), "-n", "2", sys.executable, str(script), str(enough(30))]
    done = mpirun.run_command(command, enough(80))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["requested let in"] * 2
