"""Which ranks are meant in a job of several programs, such as `mpirun -n 2 A : -n 2 B`.

Note [Jobs of several programs]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All programs of a job share MPI.COMM_WORLD. They may be one training, of which some ranks have other
options or lie on other machines, or a simulation beside a training, which never calls mpiddp. Both
look the same. A wrong guess waits for ranks that never come, or trains several models without a
word. So the user says which, by MPIDDP_PROGRAMS or by `comm`, and is asked to where that is known
to be needed.

MPI_APPNUM is the number of a process's own program (MPI-4.0, section 11.10.3). Open MPI's mpirun
also tells how many ranks each has; their numbers follow each other. MPICH and its kin tell nothing
else: there the ranks of the first program do not know that there are others. The communicator of a
program's ranks is made by MPI_Comm_create_group, which nobody else needs to call.

SLURM's heterogeneous jobs are one world, as before: their parts are machines, not programs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mpiddp import settings
from mpiddp.mpi import communicators

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["communicator_of_program", "sizes_told"]

_HOW = (
    "Where only some programs call mpiddp, pass comm=MPI.COMM_WORLD.Split("
    "MPI.COMM_WORLD.Get_attr(MPI.APPNUM)), which all programs call"
)
_TAG = 0

_made: MPI.Intracomm | None = None


def communicator_of_program(world: MPI.Intracomm) -> MPI.Intracomm:
    """Return the communicator of the ranks that are meant without `comm`.

    Collective over these ranks the first time, if the job has several programs.

    Raises:
        RuntimeError: it has, and the user has not said which ranks are meant; or the launcher does
            not say which are of this program.
    """
    meant = settings.PROGRAMS.read_before_init()
    if meant == "all" or world.Get_size() == 1 or "SLURM_HET_SIZE" in os.environ:
        return world
    sizes = sizes_told(world.Get_size())
    own = _own_number(world)
    if meant is None:
        if sizes is None and own == 0:
            return world
        raise RuntimeError(_ask(sizes, own))
    if sizes is None:
        raise RuntimeError(
            f"{settings.PROGRAMS.name}=own: this launcher does not say which ranks are of which "
            f"program (Open MPI's mpirun does). {_HOW}"
        )
    return _made_for(world, sizes, own)


def sizes_told(world_size: int) -> list[int] | None:
    """Return how many ranks each of several programs has, None if the launcher tells nothing.

    Not collective.
    """
    told = os.environ.get("OMPI_APP_CTX_NUM_PROCS", "").split()
    if "PMI_SIZE" in os.environ or not all(size.isdecimal() for size in told):
        return None  # what an outer job has left in the environment
    sizes = [int(size) for size in told]
    return sizes if len(sizes) > 1 and sum(sizes) == world_size else None


def _own_number(world: MPI.Intracomm) -> int:
    from mpi4py import MPI

    return int(world.Get_attr(MPI.APPNUM) or 0)  # None where it is not known


def _ask(sizes: list[int] | None, own: int) -> str:
    if sizes is None:
        job = f"this rank is of program {own} of the job (MPI_APPNUM), so there are several"
    else:
        ranks = ", ".join(map(str, sizes[:-1]))
        job = f"this job has {len(sizes)} programs, of {ranks} and {sizes[-1]} ranks"
        job += f"; this rank is of number {own}"
    name = settings.PROGRAMS.name
    own_way = "" if sizes is None else f"{name}=own: those of this program. "
    return (
        f"{job}. Say which ranks train together. {own_way}{name}=all: all of them, as one "
        f"training. {_HOW}"
    )


def _made_for(world: MPI.Intracomm, sizes: list[int], own: int) -> MPI.Intracomm:
    global _made
    if _made is None:
        first = sum(sizes[:own])
        everyone = world.Get_group()
        program = everyone.Range_incl([(first, first + sizes[own] - 1, 1)])
        try:
            _made = world.Create_group(program, _TAG)
        finally:
            program.Free()
            everyone.Free()
        _made.Set_name(f"program {own}")
        communicators.note(_made)
    return _made
