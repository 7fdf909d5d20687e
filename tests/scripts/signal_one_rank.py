"""Run a program; one rank gets SIGUSR1 from itself after some steps.

mpirun -n 3 python signal_one_rank.py RANK STEPS train.py --epochs 4
"""

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

from mpi4py import MPI

from mpiddp.preemption import notice


def signal_after(steps: int) -> None:
    while notice._notice is None or notice._notice._agreement._checks < steps:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGUSR1)


rank, steps = int(sys.argv[1]), int(sys.argv[2])
del sys.argv[:3]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
if MPI.COMM_WORLD.Get_rank() == rank:
    threading.Thread(target=signal_after, args=[steps], daemon=True).start()
runpy.run_path(sys.argv[0], run_name="__main__")
