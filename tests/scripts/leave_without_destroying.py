"""A rank ends without destroy_process_group before another one is asked to end.

    mpirun -n 3 python leave_without_destroying.py RANK

The rank that leaves. The next one gets SIGUSR1 after that, and all others go on for a while.
"""

import os
import signal
import sys
import time

import torch.distributed as dist

import mpiddp
from mpiddp import preemption

mpiddp.init_process_group()
preemption.install()
rank, size = dist.get_rank(), dist.get_world_size()
leaving = int(sys.argv[1])
dist.barrier()
if rank == leaving:
    print(f"rank {rank} leaves", flush=True)
    sys.exit()
time.sleep(1)
if rank == (leaving + 1) % size:
    os.kill(os.getpid(), signal.SIGUSR1)
for _check in range(100):
    stop = preemption.requested()
    time.sleep(0.03)
    if stop:
        break
print(f"rank {rank} was {'asked' if stop else 'not asked'} to end", flush=True)
