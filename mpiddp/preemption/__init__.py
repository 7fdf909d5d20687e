"""End in time: when SLURM announces the end of a job, all ranks learn it at the same step.

    preemption.install()
    for ...:
        ...  # a training step
        if preemption.requested():
            ...  # save a checkpoint
            preemption.requeue()
            break

May import: the leaves, system, mpi, engine, watch and rendezvous. Must never cost a message
in a step in which nothing happened.
"""

from mpiddp.preemption.notice import install, requested, uninstall
from mpiddp.preemption.slurm import requeue

__all__ = ["install", "requested", "requeue", "uninstall"]
