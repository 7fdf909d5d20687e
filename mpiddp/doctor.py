"""Report what mpiddp finds on this machine, how gradients would travel here, and why.

    python -m mpiddp.doctor
    mpirun -n 2 python -m mpiddp.doctor

Under mpirun, rank 0 prints for all. If this MPI may take GPU memory, it tries that, which may take
some minutes.
"""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

import torch

import mpiddp
from mpiddp import settings
from mpiddp.gpu.runtime import runtime_of
from mpiddp.mpi import nodes
from mpiddp.mpi.library import compiled_against, linked_version
from mpiddp.rendezvous.world import heartbeat_problem
from mpiddp.transports import choice as transport_choice
from mpiddp.transports import gpu_choice, gpu_support, wire_choice

if TYPE_CHECKING:
    from mpi4py import MPI


def main(arguments: Sequence[str]) -> int:
    """Print the report on rank 0; return the exit status. Collective."""
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    mpiddp.init_process_group()
    lines = report()
    if mpiddp.get_topology().rank == 0:
        print("\n".join(lines), flush=True)
    mpiddp.destroy_process_group()
    return 0


def report() -> list[str]:
    """Return the lines of the report. Collective over the world."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return [line for part in REPORTS for line in part(world)]


def _software(world: MPI.Comm) -> list[str]:
    vendor, version = compiled_against()
    return [
        f"mpiddp {metadata.version('mpiddp')}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        f"MPI: compiled against {vendor} {version}, runs on "
        f"{linked_version().splitlines()[0].strip()}",
    ]


def _ranks(world: MPI.Comm) -> list[str]:
    topology = mpiddp.get_topology()
    hosts = list(dict.fromkeys(world.allgather(socket.gethostname())))
    shown = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
    cores = topology.local_core_count
    return [
        f"ranks: {topology.world_size} on {topology.node_count} "
        f"node{'s' if topology.node_count > 1 else ''} ({shown}); "
        f"{topology.local_world_size} on this one, with {cores} core{'s' if cores > 1 else ''}"
    ]


def _shared_memory(world: MPI.Comm) -> list[str]:
    """Say how gradients in CPU memory travel."""
    name = transport_choice.requested_transport(None)
    if world.Get_size() == 1:
        return [f"gradients on the CPU: nothing travels in a world of one; asked for: {name}"]
    from mpiddp.transports import shared_memory

    node = nodes.ranks_of_node(world)
    problem = ""
    try:
        if node.Get_size() > 1:
            shared_memory.allocate(node, 4096)
    except OSError as error:
        problem = str(error)
    sizes = world.allgather(node.Get_size())
    problems = [text for text in world.allgather(problem) if text]
    node.Free()
    if max(sizes) == 1:
        possible = "every rank has its node for itself"
    elif problems:
        possible = f"not possible: {problems[0]}"
    else:
        possible = "possible"
    if name == "mpi":
        used = "MPI_Iallreduce"
    elif name == "exchange" or (name == "auto" and (max(sizes) == 1 or problems)):
        used = "exchange among all ranks"
    else:
        used = "shared memory" if min(sizes) == world.Get_size() else "lanes between the nodes"
    return [
        f"memory that the ranks of a node share: {possible}",
        f"gradients on the CPU: {used} (transport {name!r})",
    ]


def _wire(world: MPI.Comm) -> list[str]:
    """Say how gradients would travel between nodes."""
    return describe_wire(mpiddp.get_topology().node_count)


def describe_wire(node_count: int) -> list[str]:
    """Return how a bucket of float32 and one of 16 bits travel between so many nodes, and why."""
    if node_count == 1:
        return []
    lines = []
    way = settings.WIRE.read()
    _, chunk_bytes = transport_choice.chunks_in_flight(node_count, way)
    for text, element_bytes in (("float32", 4), ("16 bits", 2)):
        try:
            wire = wire_choice.choose(node_count, chunk_bytes, element_bytes, way)
            said = f"{wire.name}: {wire.reason}"
        except ValueError as error:
            said = f"not possible: {error}"
        lines.append(f"between the nodes, 4 MB of {text} in chunks: {said}")
    return lines


def _heartbeat(world: MPI.Comm) -> list[str]:
    """Say whether the nodes notice each other's end."""
    return describe_heartbeat(mpiddp.get_topology().node_count, heartbeat_problem())


def describe_heartbeat(node_count: int, problem: str) -> list[str]:
    """Return whether so many nodes watch each other, or why they do not."""
    if node_count == 1:
        return []
    if problem:
        return [f"heartbeat between the nodes: none: {problem}"]
    seconds, name = settings.HEARTBEAT_SECONDS.read(), settings.HEARTBEAT_SECONDS.name
    return [f"heartbeat between the nodes: one may be silent for {seconds:g} s ({name})"]


def _gpu(world: MPI.Comm) -> list[str]:
    """Say what GPU there is and how gradients on it travel."""
    asked = gpu_choice.requested_gpu_transport()
    device = find_gpu()
    missing = [rank for rank, one in enumerate(world.allgather(device)) if one is None]
    if missing:
        built = torch.version.cuda or torch.version.hip
        why = "finds none" if built else "is built without CUDA and ROCm"
        where = "" if len(missing) == world.Get_size() else f" on ranks {missing}"
        return [f"GPU: torch {why}{where}", f"gradients on a GPU: none here; asked for: {asked!r}"]
    assert device is not None
    runtime = runtime_of(device)
    assert runtime is not None
    library = gpu_support.identify(linked_version())
    answers = gpu_support.ask_library(runtime.prefix)
    said = ", ".join(f"{name}: {'yes' if yes else 'no'}" for name, yes in answers.items())
    lines = [
        f"GPU: {_describe_gpu(device)}, {gpu_support.describe_runtime(runtime.prefix)}, "
        f"functions of {runtime.library}",
        f"GPU memory in MPI: {library}: {gpu_support.known_of(library).why}; "
        f"it says: {said or 'nothing'}",
    ]
    if world.Get_size() == 1:
        ways, why = gpu_choice.candidates(device, asked)
        names = " or ".join(ways) or gpu_choice.STAGING
        return [*lines, f"gradients on the GPU: nothing travels; in a larger world {names}: {why}"]
    choice = gpu_choice.choose(world, device)
    return [*lines, f"gradients on the GPU: {choice.name}: {choice.reason}"]


def find_gpu() -> torch.device | None:
    """Return the GPU that this rank would use, None without one. Not collective."""
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", mpiddp.get_topology().local_rank % torch.cuda.device_count())


def _describe_gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name(device)}"


# The parts of the report, in order: each runs on every rank, and rank 0 prints its lines. A new
# diagnosis gets its line here.
REPORTS: list[Callable[[MPI.Comm], list[str]]] = [
    _software,
    _ranks,
    _shared_memory,
    _wire,
    _heartbeat,
    _gpu,
]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
