"""Say whether ranks may read each other's memory; then let the last one be another user, and again.

mpirun -n 2 python readable_ranks.py
"""

import os

from mpi4py import MPI

from mpiddp.collectives.node_memory import can_read_each_other

world = MPI.COMM_WORLD
answers = [can_read_each_other(world)]
if world.Get_rank() == world.Get_size() - 1:
    os.setresuid(65534, 65534, -1)
answers.append(can_read_each_other(world))
print(*answers, flush=True)
world.Barrier()
