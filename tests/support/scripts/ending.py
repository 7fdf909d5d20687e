"""End rank 1 in the way that the command line names, while rank 0 waits for it."""

import atexit
import os
import signal
import sys
import time

import torch.distributed as dist

how = sys.argv[1]


def end():
    if how.startswith("raise"):
        raise ValueError("broken on purpose")
    if how == "number":
        sys.exit(3)
    if how == "words":
        sys.exit("some last words")
    signals = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}
    if how in signals:
        os.kill(os.getpid(), signals[how])
    # The main thread waits inside of MPI, where it learns of no signal.
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()


rank = int(os.environ["RANK"])
if how == "raise before init" and rank == 1:
    end()
dist.init_process_group("gloo")
if rank == 1:
    atexit.register(print, "atexit of rank 1")
    print("before the end")
    time.sleep(0.5)
    with open(sys.argv[2], "w") as file:
        file.write(str(time.monotonic()))
    end()
dist.barrier()
print("still here")
