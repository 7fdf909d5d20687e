"""Refuse to start where processes that belong together would be worlds apart.

Each would train a model of its own, with status 0. It comes of a launcher that does not fit the
MPI, of one that starts no MPI (torchrun), and of what an outer job has left in the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlparse

from mpiddp import launchers

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.mpi.nodes import Topology

__all__ = [
    "asks_environment",
    "in_url",
    "launchers_that_fit",
    "meets_by_mpi",
    "refuse_contradictions",
    "refuse_launchers",
    "refuse_separate_worlds",
]

# torchrun says this to its processes; `python -m mpiddp`, which sets others of its variables,
# does not.
_OF_TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"
_MEANT = "If a world of one is what you want, say so: init_process_group(comm=MPI.COMM_SELF)."


def launchers_that_fit() -> str:
    """Return in words how to start ranks. Not collective."""
    return (
        f"Use the mpirun of that MPI (with the PyPI wheels: the one beside {sys.executable}), or "
        f"srun with its plugin (Open MPI: srun --mpi=pmix; MPICH and Intel MPI: srun "
        f"--mpi=pmi2)."
    )


def refuse_launchers() -> None:
    """Raise in a process that MPI could not, or wrongly, join to the others. Not collective.

    Called before MPI begins where that is possible: two processes that begin MPI in one rank's name
    may hang there, crash, or make two worlds.

    Raises:
        RuntimeError: torchrun has started it, or the launcher's words are of another step.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if _OF_TORCHRUN in os.environ and (size != "1" or _told_sizes()):
        number = size if size.isdigit() and size != "1" else "N"
        raise RuntimeError(
            f"torchrun, or a launcher that uses it such as accelerate, has started this process "
            f"(RANK={os.environ.get('RANK')}, WORLD_SIZE={size}). It starts no MPI: its processes "
            f"would be worlds apart, each training a model of its own. Start the script itself in "
            f"torchrun's place: mpirun -n {number} python SCRIPT, or srun with MPI's plugin; "
            f"`python -m mpiddp SCRIPT` gives it torchrun's variables. If an mpirun below torchrun "
            f"has started it, start that without {_OF_TORCHRUN}, RANK and WORLD_SIZE. {_MEANT}"
        )
    step = launchers.own_step()
    told = launchers.step_of_pmi()
    if step is not None and told not in (None, step):
        raise RuntimeError(
            f"srun has started this process in step {step}, and the variables of PMI in its "
            f"environment are those of step {told}, an outer one: MPI would take it for a rank "
            f"there. This srun has set none of its own. {launchers_that_fit()} {_MEANT}"
        )


def refuse_separate_worlds(world_size: int) -> None:
    """Raise if a launcher started several ranks that do not see each other. Not collective.

    Raises:
        RuntimeError: MPI sees one process.
    """
    told = _told_sizes()
    if world_size > 1 or not told:
        return
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    raise RuntimeError(
        f"this process is rank 0 of 1, although {told}: each process would train a "
        f"model of its own. The launcher and the MPI library do not fit: mpi4py runs on "
        f"{vendor} {'.'.join(map(str, version))}. {launchers_that_fit()} {_MEANT}"
    )


def _told_sizes() -> str:
    """Return "NAME=SIZE" of what says that there are several ranks, "" if nothing does."""
    launched = [name for name in launchers.SIZES if name in os.environ][:1]
    # A launcher's own word counts more than the scheduler's; but what srun has started itself is
    # one of its tasks, whatever an outer job has left.
    if not launched or launchers.own_step() is not None:
        launched += [name for name in launchers.SCHEDULER_SIZES if name in os.environ][:1]
    for name in launched:
        value = os.environ[name]
        if value.isdigit() and int(value) > 1:
            return f"{name}={value}"
    return ""


def refuse_contradictions(
    communicator: MPI.Intracomm, topology: Topology, given: Mapping[str, Any]
) -> None:
    """Raise on all ranks if one was given a rank or world size that MPI contradicts.

    Collective over `communicator`: an error on one rank alone would hang the others.

    Args:
        communicator: of all ranks.
        topology: this process's place among them.
        given: the arguments of torch's init_process_group; where these name no other place, the
            environment's RANK and WORLD_SIZE count.

    Raises:
        ValueError: it names what was given and what MPI says.
    """
    problem = _contradiction(topology, given)
    told = [
        f"rank {rank}: {text}" for rank, text in enumerate(communicator.allgather(problem)) if text
    ]
    if told:
        raise ValueError(problem or told[0])


def _contradiction(topology: Topology, given: Mapping[str, Any]) -> str:
    by_mpi = {"rank": topology.rank, "world_size": topology.world_size}
    url = in_url(given)
    for name, right in by_mpi.items():
        told = [(f"{name}={given[name]}", given[name])] if given.get(name, -1) != -1 else []
        if name in url:
            told.append((f"{name}={url[name]} in init_method", url[name]))
        variable = name.upper()
        if asks_environment(given) and variable in os.environ:
            told.append(
                (f"{variable}={os.environ[variable]} in the environment", os.environ[variable])
            )
        for what, value in told:
            if str(value) != str(right):
                return (
                    f"{what}, but MPI says that this process is rank {topology.rank} of "
                    f"{topology.world_size}. Start with mpirun or srun (torchrun starts no MPI), "
                    f"and leave rank and world_size to MPI: unset what an outer job has left"
                )
    return ""


def meets_by_mpi(given: Mapping[str, Any]) -> bool:
    """Return whether the ranks, whom MPI knows, get the store that MPI's ranks share.

    Not collective. Else the user has named another one: a store of the program's, or a file.
    """
    if given.get("store") is not None:
        return False
    return asks_environment(given) or urlparse(str(given["init_method"])).scheme == "tcp"


def asks_environment(given: Mapping[str, Any]) -> bool:
    """Return whether torch would take ranks and address from the environment. Not collective."""
    method = given.get("init_method")
    if given.get("store") is not None:
        return False
    return method is None or urlparse(str(method)).scheme == "env"


def in_url(given: Mapping[str, Any]) -> dict[str, str]:
    """Return what an init_method such as "tcp://host:29500?rank=0" says. Not collective."""
    return dict(parse_qsl(urlparse(str(given.get("init_method") or "")).query))
