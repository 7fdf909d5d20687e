"""Variables of MPI that make it slow or wrong, and those in which ranks differ.

They stay in a shell or a module file long after the reason for them has gone.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpiddp.findings import Finding

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["chosen", "compare", "describe", "report", "report_here"]

# All that MPIs and their networks read, but for what launchers give to each rank.
_PREFIXES = ("OMPI_MCA_", "PRTE_MCA_", "MPIR_CVAR_", "MPICH_", "I_MPI_", "FI_", "UCX_", "PSM2_")
_OF_A_RANK = re.compile(
    r"OMPI_MCA_(PREFIXES|cpu_type|initial_wdir|num_procs|(ess|orte|pmix|prte)_)|"
    r"I_MPI_(HYDRA|MPIRUN|INTERNAL)_"
)
# Names of interfaces of TCP; networks such as 10.0.0.0/8 may stand there as well.
_INTERFACES = ("OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE", "UCX_NET_DEVICES")
_SHOWN = 4


@dataclass(frozen=True)
class _Harm:
    """A value that hurts.

    Attributes:
        name: of the variable, as a pattern.
        value: as a pattern for all of it.
        why: what it does.
        remedy: instead of unsetting it.
    """

    name: str
    value: str
    why: str
    remedy: str = ""


_ON = "1|true|yes|on|enable|enabled"
_HARMS = (
    _Harm(
        "MPIR_CVAR_ASYNC_PROGRESS|MPICH_ASYNC_PROGRESS|I_MPI_ASYNC_PROGRESS",
        _ON,
        "a thread of MPI spins in every rank, and takes a core from the computation",
    ),
    _Harm(
        "OMPI_MCA_btl",
        r"(?!\^)(?!.*\b(sm|vader)\b).*|\^.*\b(sm|vader)\b.*",
        "messages inside a node do not go through shared memory",
        "leave sm in it, such as OMPI_MCA_btl=^ofi",
    ),
    _Harm(
        "MPIR_CVAR_NOLOCAL|MPIR_CVAR_ODD_EVEN_CLIQUES",
        _ON,
        "MPI takes ranks of a node for ranks of different ones, so they share no memory",
    ),
    _Harm(
        "I_MPI_FABRICS",
        "(?!.*shm).*",
        "messages inside a node do not go through shared memory",
        "I_MPI_FABRICS=shm:ofi",
    ),
    _Harm(
        "FI_PROVIDER",
        r"(?!\^)(.*,)?sockets(,.*)?",
        "libfabric's provider sockets is deprecated and slow, and keeps small messages until the "
        "sender calls MPI again",
        "FI_PROVIDER=^sockets, or the provider of the network (verbs, psm3, cxi, efa, tcp)",
    ),
    _Harm(
        "UCX_TLS",
        r"(?!\^)(?!.*\b(all|shm|sm|posix|sysv|mm|cma|xpmem|knem)\b).*",
        "messages inside a node do not go through shared memory, if MPI takes UCX for them",
        "add shm to it, such as UCX_TLS=tcp,self,shm",
    ),
    _Harm(
        "OMPI_MCA_pml_base_verbose|OMPI_MCA_btl_base_verbose",
        r"[1-9]\d+",
        "MPI prints what it does with messages",
    ),
    _Harm("UCX_LOG_LEVEL", "debug|trace.*|data|async|func|poll", "UCX prints what it does"),
    _Harm("FI_LOG_LEVEL", "info|debug|trace", "libfabric prints what it does"),
)


def report_here() -> list[Finding]:
    """Return which settings of MPI hurt in this process, for before MPI starts. Not collective."""
    return [*describe(chosen()), *_no_interfaces(socket.gethostname(), _unknown_interfaces())]


def report(world: MPI.Comm) -> list[Finding]:
    """Return what `report_here` does of other ranks than 0, and where ranks differ. Collective.

    Rank 0 returns it.
    """
    everyone = world.gather((socket.gethostname(), chosen(), report_here()))
    if everyone is None:
        return []
    known = {finding.text for finding in everyone[0][2]}
    found = {each.text: each for _, _, own in everyone for each in own if each.text not in known}
    return [*found.values(), *compare([(host, variables) for host, variables, _ in everyone])]


def chosen(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that choose how MPI works. Not collective."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_PREFIXES) and not _OF_A_RANK.match(name)
    }


def describe(variables: Mapping[str, str]) -> list[Finding]:
    """Return which of a rank's variables hurt. Not collective."""
    return [
        Finding("warning", f"setting: {name}={value}: {harm.why}", harm.remedy or f"unset {name}")
        for harm in _HARMS
        for name, value in variables.items()
        if re.fullmatch(harm.name, name) and re.fullmatch(harm.value, value, re.IGNORECASE)
    ]


def compare(ranks: Sequence[tuple[str, Mapping[str, str]]]) -> list[Finding]:
    """Return which variables are not the same on all ranks. Not collective.

    Args:
        ranks: host and variables of each rank, in their order.
    """
    host, first = ranks[0]
    differing: dict[str, str] = {}
    for other, variables in ranks[1:]:
        for name in sorted({*first, *variables}):
            here, there = first.get(name, "unset"), variables.get(name, "unset")
            if here != there:
                differing.setdefault(name, f"{name} ({here} on {host}, {there} on {other})")
    if not differing:
        return []
    shown = ", ".join(list(differing.values())[:_SHOWN])
    more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return [
        Finding(
            "warning",
            f"setting: ranks differ in variables of MPI: {shown}{more}",
            "set the same on all nodes, and let the launcher pass it on (Open MPI: mpirun -x NAME; "
            "MPICH: mpiexec -genv NAME VALUE): with some of them messages are lost",
        )
    ]


def _unknown_interfaces() -> list[tuple[str, str]]:
    """Return variables that name interfaces, and each name that this node does not have."""
    there = {name for _, name in socket.if_nameindex()}
    found = []
    for name in _INTERFACES:
        for word in filter(None, map(str.strip, os.environ.get(name, "").split(","))):
            is_name = re.fullmatch(r"[A-Za-z][\w.-]*", word) and word != "all"
            if is_name and word not in there:
                found.append((name, word))
    return found


def _no_interfaces(host: str, unknown: Sequence[tuple[str, str]]) -> list[Finding]:
    return [
        Finding(
            "warning",
            f"setting: {name} names {word}, and {host} has no such interface",
            f"set {name} to an interface that all nodes have (ip -br address), or unset it",
        )
        for name, word in unknown
    ]
