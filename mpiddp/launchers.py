"""What a launcher tells a process about its rank, for before MPI does. A leaf: it imports nothing.

Nothing here is sure: a launcher that does not fit the MPI tells the same.
"""

from __future__ import annotations

import os

__all__ = [
    "RANKS",
    "SCHEDULER_RANK",
    "SCHEDULER_SIZES",
    "SIZES",
    "is_open_mpi",
    "speaks_for_all",
    "told_rank",
]

# What launchers tell a process about its rank.
RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
# What launchers tell a process about the number of ranks they started.
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# SLURM says this to every process of an allocation, whoever started it.
SCHEDULER_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
SCHEDULER_RANK = "SLURM_PROCID"


def told_rank() -> str | None:
    """Return the rank that the launcher named, None without one. Not collective."""
    return next((os.environ[name] for name in RANKS if name in os.environ), None)


def is_open_mpi() -> bool:
    """Return whether the mpirun of Open MPI has started this process. Not collective."""
    # That of MPICH hands on what it finds in its environment, and sets its own.
    return "PMI_SIZE" not in os.environ and all(
        name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE")
    )


def speaks_for_all() -> bool:
    """Return whether this process is the one to say what all would say. Not collective."""
    rank = told_rank() or os.environ.get(SCHEDULER_RANK, "0")
    return rank == "0"
