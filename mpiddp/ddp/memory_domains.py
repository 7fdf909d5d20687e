"""Which ranks of a node share parameters: all of them, or those that lie beside the same memory.

Note [Domains]
~~~~~~~~~~~~~~
A model that lies once in a node is spread over the memory of all its sockets, and most of it is far
from each rank. In a domain are the ranks of one socket, or of one NUMA node; each domain has a copy
of the model, as nodes have. So a machine of two sockets takes the memory twice, and half as many
ranks step each copy.

A rank belongs to a socket only if it is bound to cores of it: Linux moves others while they run.
If any rank is not, all ranks of a node are one domain. By default it is measured how long the ranks
read memory that is spread over a domain, all at once as in a forward, beside memory of their own.
The largest domains are taken that are hardly slower. Where Linux shows one NUMA node and one socket
nothing is measured.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

import numpy
import torch

from mpiddp import settings
from mpiddp.mpi import communicators, nodes
from mpiddp.system import cores, near_memory
from mpiddp.transports import shared_memory

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.process_group.group import ProcessGroup

__all__ = ["find", "normalized", "ranks_of_domain"]

AUTO, NODE = "1", "node"

# Reading from a domain may take so many times as long as from a rank's own memory.
_HARDLY_SLOWER = 1.25
# What each rank has of the memory that is read: more than its part of a cache. And how often.
_SAMPLE_BYTES = 1 << 25
_REPEATS = 3


def normalized(value: object) -> str:
    """Return in one form which ranks are to share; "" for none. Not collective.

    Args:
        value: False, True, "node", "socket", "numa", or a number of ranks from 2 on.

    Raises:
        ValueError: it is something else.
    """
    text = str(int(value)) if isinstance(value, int | numpy.bool_) else str(value)
    try:
        return settings.SHARED_PARAMETERS.parse(text)
    except ValueError:
        raise ValueError(
            f"shared_parameters must be True, False, 'node', 'socket', 'numa' or a number of "
            f"ranks, not {value!r}"
        ) from None


def ranks_of_domain(communicator: MPI.Comm, domain: int) -> MPI.Comm:
    """Return a communicator of the ranks of this node in the same domain. Collective."""
    node = nodes.ranks_of_node(communicator)
    try:
        return communicators.note(node.Split(domain, node.Get_rank()))
    finally:
        node.Free()


def find(group: ProcessGroup, wanted: str, system: str | None = None) -> int:
    """Return the number of this rank's domain in its node. Collective.

    Args:
        group: all ranks.
        wanted: what `normalized` returns, the same on all ranks.
        system: a folder as Linux's /sys/devices/system; None: that one.
    """
    if wanted == NODE:
        return 0
    node = nodes.ranks_of_node(group.communicator)
    try:
        if wanted != AUTO and wanted.isdecimal():
            return int(node.Get_rank() // int(wanted))
        kinds = near_memory.KINDS if wanted == AUTO else (wanted,)
        own = cores.available()
        places = [_place(own, kind, system) for kind in kinds]
        # Of each rank, by kind: its number there, -1 if it is bound to none; and its node.
        table = group.allgather_objects((places, node.bcast(group.rank())))
        if wanted != AUTO:
            _explain_unbound(
                group, wanted, [rank for rank, ([at], _) in enumerate(table) if at < 0]
            )
        known = [
            kind
            for kind in range(len(kinds))
            if all(of_rank[kind] >= 0 for of_rank, _ in table)
            # Somewhere it divides a node.
            and len({(of_rank[kind], at) for of_rank, at in table}) > len({at for _, at in table})
        ]
        if not known:
            return 0
        if wanted == AUTO:
            domains = [0, *(places[kind] for kind in known)]
            return domains[_choose(group, node, domains)]
        return places[0]
    finally:
        node.Free()


def _place(own: Set[int], kind: str, system: str | None) -> int:
    """Return which socket or NUMA node has all these cores; -1 for none."""
    groups = near_memory.groups_of_cores(kind, *([system] if system else []))
    return next((number for number, group in enumerate(groups) if own <= group), -1)


def _explain_unbound(group: ProcessGroup, wanted: str, unbound: Sequence[int]) -> None:
    if unbound and group.rank() == 0:
        some = ", ".join(map(str, unbound[:5])) + (", ..." if len(unbound) > 5 else "")
        kind = "NUMA node" if wanted == "numa" else wanted
        warnings.warn(
            f"shared_parameters={wanted!r} does not divide nodes, since ranks are not bound to the "
            f"cores of one {kind} (rank {some}): start them with `mpirun --bind-to {wanted}`, or "
            f"with `srun --cpu-bind=verbose,"
            f"{'ldoms' if wanted == 'numa' else 'sockets'}`",
            stacklevel=2,
        )


def _choose(group: ProcessGroup, node: MPI.Comm, domains: Sequence[int]) -> int:
    """Return by number the first of some divisions that is hardly slower than own memory.

    Collective.

    Args:
        group: all ranks.
        node: those of this node.
        domains: this rank's, by division; from the largest domains to the smallest.
    """
    slower = group.allgather_objects(_slowness(node, domains))
    medians = [statistics.median(each) for each in zip(*slower, strict=True)]
    return next(
        (at for at, times in enumerate(medians) if times <= _HARDLY_SLOWER), len(domains) - 1
    )


def _slowness(node: MPI.Comm, domains: Sequence[int]) -> list[float]:
    """Return by division how many times as long as own memory it takes to read a domain's.

    Collective over `node`.
    """
    try:
        allocated = shared_memory.allocate(node, _SAMPLE_BYTES)
    except OSError:  # on all ranks of the node
        return [1.0] * len(domains)
    pieces = [torch.frombuffer(piece, dtype=torch.float32) for piece in allocated]
    own = node.Get_rank()
    pieces[own].fill_(1)
    alone = _seconds_to_read(node, [pieces[own]])
    slower = []
    for of_rank in domains:
        members = [rank for rank, at in enumerate(node.allgather(of_rank)) if at == of_rank]
        spread = [pieces[rank].chunk(len(members))[0] for rank in members]
        slower.append(_seconds_to_read(node, spread) / alone)
    return slower


def _seconds_to_read(node: MPI.Comm, parts: Sequence[torch.Tensor]) -> float:
    """Return how long it takes to read these while the other ranks read theirs. Collective."""
    least = math.inf
    for _ in range(_REPEATS):
        node.Barrier()
        began = time.perf_counter()
        for part in parts:
            part.sum()
        least = min(least, time.perf_counter() - began)
    return least
