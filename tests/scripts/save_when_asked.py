"""Train until asked to end, save, and ask SLURM to start the job again.

    save_when_asked.py NAME SECONDS [STEP]

Saving takes so many seconds. At STEP, if it is given, the process signals itself, as SLURM does
before the time limit. A job that SLURM has started again says so and ends.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import mpiddp
from mpiddp import preemption

name, seconds = sys.argv[1], float(sys.argv[2])
signal_at = int(sys.argv[3]) if len(sys.argv) > 3 else -1
mpiddp.init_process_group()
preemption.install()
rank = dist.get_rank()


def say(*words: object) -> None:
    if rank == 0:
        print(name, *words, flush=True)


start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
say("started", start, "on", dist.get_world_size())
for step in range(1200):
    if start:
        break
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
    if step == signal_at:
        os.kill(os.getpid(), signal.SIGUSR1)
    if preemption.requested():
        time.sleep(seconds)
        say("saved")
        say("requeue()", preemption.requeue())
        break
mpiddp.destroy_process_group()
say("ended")
