"""The last rank is killed while the others wait for its part of an all-reduce."""

import os
import signal
import time

import torch
import torch.distributed as dist

import mpiddp

mpiddp.init_process_group()
dist.barrier()
if dist.get_rank() == dist.get_world_size() - 1:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(10))
