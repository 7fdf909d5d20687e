"""How gradients in the CPU's memory would travel here, and whether the nodes watch each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpiddp import settings
from mpiddp.collectives import way_table
from mpiddp.findings import Finding
from mpiddp.mpi import nodes
from mpiddp.rendezvous.world import get_topology, heartbeat_problem
from mpiddp.transports import choice as transport_choice
from mpiddp.transports import wire_choice

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "describe_heartbeat",
    "describe_wire",
    "report_heartbeat",
    "report_memory",
    "report_wire",
]


def report_memory(world: MPI.Comm) -> list[Finding]:
    """Say whether the ranks of a node share memory, and which transport is used. Collective."""
    name = transport_choice.requested_transport(None)
    if world.Get_size() == 1:
        text = f"gradients on the CPU: nothing travels in a world of one; asked for: {name}"
        return [Finding("ok", text)]
    from mpiddp.collectives.measured_ways import measured_alone
    from mpiddp.transports import shared_memory

    node = nodes.ranks_of_node(world)
    problem = ""
    try:
        if node.Get_size() > 1:
            shared_memory.allocate(node, 4096)
    except OSError as error:
        problem = str(error)
    sizes = world.allgather(node.Get_size())
    of_first = node.Get_size() if node.Get_rank() == 0 else 0
    node_sizes = [size for size in world.allgather(of_first) if size]
    direct = measured_alone(node)
    is_readable = all(world.allgather(direct is not None))
    problems = [text for text in world.allgather(problem) if text]
    node.Free()
    what = "memory that the ranks of a node share:"
    if max(sizes) == 1:
        memory = Finding("ok", f"{what} every rank has its node for itself")
    elif problems:
        memory = Finding(
            "warning",
            f"{what} not possible: {problems[0]}",
            "start one container a node instead of one a rank, and let ranks open each other's "
            "files in /proc; without, gradients go through MPI, which is slower",
        )
    else:
        memory = Finding("ok", f"{what} possible")
    if name == "mpi":
        used = "MPI_Iallreduce"
    elif name == "exchange" or (name == "auto" and (max(sizes) == 1 or problems)):
        used = "exchange among all ranks"
    else:
        used = "shared memory" if min(sizes) == world.Get_size() else "lanes between the nodes"
    gradients = Finding("ok", f"gradients on the CPU: {used} (transport {name!r})")
    ways = direct if is_readable else None
    return [memory, gradients, *_collectives(node_sizes, bool(problems), ways)]


def _collectives(
    sizes: list[int], is_impossible: bool, direct: way_table.DirectFrom | None
) -> list[Finding]:
    """Return how the collectives of torch.distributed travel.

    Args:
        sizes: how many ranks each node has.
        is_impossible: whether those of a node share no memory.
        direct: when those of a node read each other's memory; None: they may not.
    """
    asked = settings.COLLECTIVES.read()
    alone = asked == "messages" or is_impossible
    table = way_table.rows([1] * len(sizes) if alone else sizes, direct)
    variable = f"({settings.COLLECTIVES.name}={asked})"
    found = [
        Finding("ok", f"collectives on the CPU, {row.collectives}: {row.way} {variable}")
        for row in table
    ]
    if not alone and max(sizes) > 1 and way_table.tries_to_read() and direct is None:
        found.append(
            Finding(
                "warning",
                "collectives on the CPU: ranks of a node may not read each other's memory",
                "allow it for processes of one user (kernel.yama.ptrace_scope=0; in a container "
                "the system call process_vm_readv); without, large ones are copied twice",
            )
        )
    return found


def report_wire(world: MPI.Comm) -> list[Finding]:
    """Say how gradients would travel between nodes. Not collective."""
    return describe_wire(get_topology().node_count)


def describe_wire(node_count: int) -> list[Finding]:
    """Return how a bucket of float32 and one of 16 bits travel between so many nodes, and why."""
    if node_count == 1:
        return []
    found = []
    way = settings.WIRE.read()
    _, chunk_bytes = transport_choice.chunks_in_flight(node_count, way)
    for text, element_bytes in (("float32", 4), ("16 bits", 2)):
        what = f"between the nodes, 4 MB of {text} in chunks:"
        try:
            wire = wire_choice.choose(node_count, chunk_bytes, element_bytes, way)
        except ValueError as error:
            found.append(
                Finding("error", f"{what} not possible: {error}", f"unset {settings.WIRE.name}")
            )
        else:
            found.append(Finding("ok", f"{what} {wire.name}: {wire.reason}"))
    return found


def report_heartbeat(world: MPI.Comm) -> list[Finding]:
    """Say whether the nodes notice each other's end. Not collective."""
    return describe_heartbeat(get_topology().node_count, heartbeat_problem())


def describe_heartbeat(node_count: int, problem: str) -> list[Finding]:
    """Return whether so many nodes watch each other, or why they do not."""
    if node_count == 1:
        return []
    if problem:
        return [
            Finding(
                "warning",
                f"heartbeat between the nodes: none: {problem}",
                "let the nodes reach each other by TCP, else a job may hang when a node is lost",
            )
        ]
    seconds, name = settings.HEARTBEAT_SECONDS.read(), settings.HEARTBEAT_SECONDS.name
    text = f"heartbeat between the nodes: one may be silent for {seconds:g} s ({name})"
    return [Finding("ok", text)]
