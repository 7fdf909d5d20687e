"""Go on without ranks that are lost.

    state = elastic.State(model=model, optimizer=optimizer, step=0)

    @elastic.run
    def train(state):
        ddp = DistributedDataParallel(state.model, init_sync=False)
        while state.step < 1000:
            ...
            state.step += 1
            state.commit()

    train(state)

Where the MPI can (Open MPI 5, `mpirun --with-ft ulfm`), the ranks that are left make a new world
and call the function again, with the last commit. Elsewhere a lost
rank ends the job, and the job that is started again goes on from what `State` has saved.

May import: the leaves, mpi, rendezvous and checkpoint. Must never hide an error that is none of a
lost rank.
"""

from mpiddp.elastic.running import admit, grow, run
from mpiddp.elastic.sampler import Sampler
from mpiddp.elastic.state import State

__all__ = ["Sampler", "State", "admit", "grow", "run"]
