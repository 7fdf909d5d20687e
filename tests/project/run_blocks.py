"""Run code blocks of a page one after another, as programs of their own. Under mpirun.

mpirun -n 2 python run_blocks.py BLOCK.py ...
"""

import sys

import torch.distributed as dist
from mpi4py import MPI

import mpiddp  # as a user's environment has it

for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as file:
        code = compile(file.read(), path, "exec")
    if MPI.COMM_WORLD.rank == 0:
        print(f"== {path}", flush=True)
    exec(code, {"__name__": "__main__", "__file__": path})
    # Not all end what they have begun.
    if dist.is_initialized():
        mpiddp.destroy_process_group()
    MPI.COMM_WORLD.Barrier()
