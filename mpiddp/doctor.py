"""Say what mpiddp finds on this machine, and how gradients would travel here, and why.

    python -m mpiddp.doctor
    mpirun -n 2 python -m mpiddp.doctor

Under mpirun, rank 0 prints for all. Where GPU memory may be given to MPI, it tries that, which
takes up to some minutes.
"""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING

import torch

import mpiddp
from mpiddp import device_support, device_transports, transport
from mpiddp.device_runtime import runtime_of
from mpiddp.library import compiled_against, linked_version

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

    vendor, version = compiled_against()
    world = MPI.COMM_WORLD
    lines = [
        f"mpiddp {metadata.version('mpiddp')}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        f"MPI: compiled against {vendor} {version}, runs on "
        f"{linked_version().splitlines()[0].strip()}",
        _ranks(world),
    ]
    lines += _shared_memory(world)
    lines += _gpu(world)
    return lines


def _ranks(world: MPI.Comm) -> str:
    topology = mpiddp.get_topology()
    hosts = list(dict.fromkeys(world.allgather(socket.gethostname())))
    shown = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
    cores = topology.local_core_count
    return (
        f"ranks: {topology.world_size} on {topology.node_count} "
        f"node{'s' if topology.node_count > 1 else ''} ({shown}); "
        f"{topology.local_world_size} on this one, with {cores} core{'s' if cores > 1 else ''}"
    )


def _shared_memory(world: MPI.Comm) -> list[str]:
    """Say how gradients in CPU memory travel."""
    name = transport.requested_transport(None)
    if world.Get_size() == 1:
        return [f"gradients on the CPU: nothing travels in a world of one; asked for: {name}"]
    from mpiddp import shared_memory

    node = transport.ranks_of_node(world)
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
    alone = name == "mpi" or (name == "auto" and (max(sizes) == 1 or bool(problems)))
    used = "MPI_Iallreduce"
    if not alone:
        used = "shared memory" if min(sizes) == world.Get_size() else "lanes between the nodes"
    return [
        f"memory that the ranks of a node share: {possible}",
        f"gradients on the CPU: {used} (transport {name!r})",
    ]


def _gpu(world: MPI.Comm) -> list[str]:
    """Say what GPU there is and how gradients on it travel."""
    asked = device_transports.requested_device_transport()
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
    library = device_support.identify(linked_version())
    answers = device_support.ask_library(runtime.prefix)
    said = ", ".join(f"{name}: {'yes' if yes else 'no'}" for name, yes in answers.items())
    lines = [
        f"GPU: {_describe_gpu(device)}, {device_support.describe_runtime(runtime.prefix)}, "
        f"functions of {runtime.library}",
        f"GPU memory in MPI: {library}: {device_support.known_of(library).why}; "
        f"it says: {said or 'nothing'}",
    ]
    if world.Get_size() == 1:
        ways, why = device_transports.candidates(device, asked)
        names = " or ".join(ways) or device_transports.STAGING
        return [*lines, f"gradients on the GPU: nothing travels; in a larger world {names}: {why}"]
    choice = device_transports.choose(world, device)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
