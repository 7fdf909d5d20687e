"""Say where this rank stands, then end the last rank as the command line says, if it does."""

import os
import socket
import sys

import torch
import torch.distributed as dist

NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE")

dist.init_process_group("nccl")
total = torch.ones(())
dist.all_reduce(total)
places = " ".join(os.environ[name] for name in NAMES)
print(f"rank {os.environ['RANK']} on {socket.gethostname()}: {places}, sum {total:g}")
dist.barrier()
if dist.get_rank() == dist.get_world_size() - 1:
    if sys.argv[1] == "raise":
        raise ValueError("broken on purpose")
    if sys.argv[1] == "number":
        sys.exit(3)
if sys.argv[1] != "end":
    dist.barrier()
    print("still here")
