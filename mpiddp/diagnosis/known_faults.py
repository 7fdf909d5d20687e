"""How much of threads this MPI allows, and what is known to be wrong with its version.

docs/reference/mpis.md has the same faults, with links; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpiddp.findings import Finding
from mpiddp.mpi.library import linked_version
from mpiddp.mpi.running_library import Library, identify

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["FAULTS", "Fault", "describe", "report"]

_ANY = (0,)
_NEVER = (9999,)
# These have MPICH's code, of some version or other.
_MPICH = ("MPICH", "Intel MPI", "Cray MPICH", "MVAPICH", "MVAPICH2", "ParaStation MPI")


@dataclass(frozen=True)
class Fault:
    """A fault of an MPI.

    Attributes:
        vendors: which have it.
        since: the first version that has it.
        until: the first that has it no more.
        text: what is wrong.
        done: what mpiddp does, or the user can do.
    """

    vendors: tuple[str, ...]
    since: tuple[int, ...]
    until: tuple[int, ...]
    text: str
    done: str


# Not here: what the doctor says where it is so (launching.describe_slow_start).
FAULTS = (
    Fault(
        ("Open MPI",),
        (5, 0),
        (5, 1),
        "an error line for each shared window while it tries the component osc ucx",
        "mpiddp makes no windows; OMPI_MCA_osc=^ucx for those who do",
    ),
    Fault(
        ("Open MPI",),
        (5, 0),
        (5, 1),
        "has no PMI-2: srun --mpi=pmi2 starts N worlds of one, with exit status 0",
        "refused at the start; use srun --mpi=pmix",
    ),
    Fault(
        ("Open MPI",),
        (5, 0),
        (5, 1),
        "after a loss under ULFM, messages through shared memory are lost, MPI_Finalize waits for "
        "the dead, and the component han gives wrong sums",
        "only with mpirun --with-ft ulfm: docs/how-to/elastic.md has the options",
    ),
    Fault(
        ("Open MPI",),
        _ANY,
        _NEVER,
        "Iallreduce is slower in place than out of place",
        "never called in place",
    ),
    Fault(
        ("Open MPI", "MPICH"),
        _ANY,
        _NEVER,
        "says that it can take GPU memory, and crashes in reductions of it",
        "tried in a process of its own first",
    ),
    Fault(
        ("MPICH",),
        (5, 0),
        (5, 1),
        "over UCX some receives from MPI_ANY_SOURCE never end if the message comes from another "
        "node",
        "asked for, then received from the rank that it has come from",
    ),
    Fault(
        ("MPICH",),
        (5, 0),
        (5, 1),
        "over OFI it takes libfabric's deprecated provider sockets where there is no fast network, "
        "which keeps small messages",
        "FI_PROVIDER=^sockets, where it is unset",
    ),
    Fault(
        ("MPICH",),
        (5, 0),
        (5, 1),
        "under SLURM's pmi2 its ranks over UCX publish addresses that the plugin refuses",
        "MPIR_CVAR_CH4_NETMOD=ofi",
    ),
    Fault(
        ("MPICH",),
        (5, 0),
        (5, 1),
        "does not notice that ranks in user namespaces of their own cannot read each other's "
        "memory: Other MPI error in large messages",
        "one container for the ranks of a node, or MPIR_CVAR_CH4_CMA_ENABLE=0 and "
        "UCX_POSIX_USE_PROC_LINK=n",
    ),
    Fault(
        ("MPICH",),
        (3, 4, 3),
        (3, 4, 4),
        "MPIX_Query_cuda_support aborts the process",
        "not called there",
    ),
    Fault(
        _MPICH,
        _ANY,
        _NEVER,
        "MPI_MAX and MPI_MIN with a NaN differ between ranks",
        "operations of our own, in which a NaN wins",
    ),
    Fault(
        _MPICH,
        _ANY,
        _NEVER,
        "the number of a freed communicator goes to the next one, and a message that nobody took "
        "arrives there",
        "destroy a group after its last messages have arrived",
    ),
    Fault(
        ("Open MPI", "MPICH"),
        _ANY,
        _NEVER,
        "16-bit floats: MPI.BFLOAT16_T is null, sums of float16 are slower than of float32",
        "sent as bytes, added here",
    ),
)


def report(world: MPI.Comm) -> list[Finding]:
    """Return the level of threads, and known faults. Not collective."""
    from mpi4py import MPI

    return [_threads(MPI.Query_thread()), *describe(identify(linked_version()))]


def _threads(provided: int) -> Finding:
    """Return what the MPI gives. With less than mpiddp needs it would not have started."""
    from mpi4py import MPI

    if provided == MPI.THREAD_MULTIPLE:
        return Finding("ok", "thread level: MPI_THREAD_MULTIPLE, as mpiddp needs it")
    return Finding(
        "warning",
        "thread level: less than MPI_THREAD_MULTIPLE, so no thread makes progress during backward",
        "use an MPI that has MPI_THREAD_MULTIPLE, and let whoever initialises MPI ask for it; then "
        "unset MPIDDP_PROGRESS_THREAD",
    )


def describe(library: Library) -> list[Finding]:
    """Return the known faults of an MPI, with what is done about each. Not collective."""
    return [
        Finding("ok", f"known fault of {library}: {fault.text}; here: {fault.done}")
        for fault in FAULTS
        if library.vendor in fault.vendors and fault.since <= library.version < fault.until
    ]
