"""What a launcher tells a process about its rank, for before MPI does. A leaf: it imports nothing.

Nothing here is sure: a launcher that does not fit the MPI tells the same.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

__all__ = [
    "LOCAL_RANKS",
    "LOCAL_SIZES",
    "PROGRAMS",
    "RANKS",
    "SCHEDULER_RANK",
    "SCHEDULER_SIZES",
    "SIZES",
    "is_open_mpi",
    "own_step",
    "speaks_for_all",
    "step_of_pmi",
    "told_local",
    "told_rank",
]

# What launchers tell a process about its rank.
RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
# What launchers tell a process about the number of ranks they started.
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# And about the ranks of its node.
LOCAL_RANKS = (
    *("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
    "SLURM_LOCALID",
)
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")
# SLURM says this to every process of an allocation, whoever started it.
# The last one is submitit's, for the processes that it starts on this machine.
SCHEDULER_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SUBMITIT_LOCAL_NTASKS")
SCHEDULER_RANK = "SLURM_PROCID"

# How the names of processes of mpirun and its kin begin, as the system cuts them.
PROGRAMS = ("mpirun", "mpiexec", "mpispawn", "hydra_", "pmi_proxy", "prte", "orte")


def told_rank(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the rank that the launcher named, None without one. Not collective.

    Args:
        environment: the variables of the process that is asked about.
    """
    return next((environment[name] for name in RANKS if name in environment), None)


def told_local() -> tuple[int, int]:
    """Return the rank among those of this node, and how many these are; (0, 1) if nobody told.

    Not collective.
    """
    ranks, sizes = (
        [int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()]
        for names in (LOCAL_RANKS, LOCAL_SIZES)
    )
    rank = next(iter(ranks), 0)
    return rank, next(iter(sizes), rank + 1)


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


def own_step() -> str | None:
    """Return "JOB.STEP" of SLURM if its srun has started this process itself, else None.

    Not collective. A shell may stand between, but no launcher: what mpirun starts below srun's
    helper, or in a batch script, is mpirun's.
    """
    task = os.environ.get("SLURM_TASK_PID", "")
    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID", "")
    if job is None or not step.isdigit() or not task.isdigit():
        return None
    process = os.getpid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while process > 0:
            told = Path(f"/proc/{process}/stat").read_text(errors="replace")
            name, _, rest = told.partition("(")[2].rpartition(")")
            if name.startswith(PROGRAMS):
                return None
            if process == int(task):
                return f"{job}.{step}"
            process = int(rest.split()[1])
    return None


def step_of_pmi() -> str | None:
    """Return "JOB.STEP" of SLURM that PMI's variables are of, None without. Not collective."""
    if "SLURM_HET_SIZE" in os.environ:  # each of its parts has a number, PMI one of all
        return None
    found = re.fullmatch(r"slurm\.pmix\.(\d+\.\d+)", os.environ.get("PMIX_NAMESPACE", ""))
    if found is None:
        found = re.fullmatch(r"(\d+\.\d+)", os.environ.get("PMI_JOBID", ""))
    return None if found is None else found[1]
