"""What GPU there is, and how gradients on it would travel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpiddp.findings import Finding
from mpiddp.gpu.runtime import runtime_of
from mpiddp.mpi.library import linked_version
from mpiddp.mpi.running_library import identify
from mpiddp.rendezvous.world import get_topology
from mpiddp.transports import gpu_choice, gpu_support

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["find_gpu", "report"]


def report(world: MPI.Comm) -> list[Finding]:
    """Say what GPU there is, and try MPI with its memory where that may work. Collective."""
    asked = gpu_choice.requested_gpu_transport()
    device = find_gpu()
    missing = [rank for rank, one in enumerate(world.allgather(device)) if one is None]
    if missing:
        none = Finding("ok", f"gradients on a GPU: none here; asked for: {asked!r}")
        return [_without_gpu(missing, world.Get_size()), none]
    assert device is not None
    runtime = runtime_of(device)
    assert runtime is not None
    library = identify(linked_version())
    answers = gpu_support.ask_library(runtime.prefix)
    said = ", ".join(f"{name}: {'yes' if yes else 'no'}" for name, yes in answers.items())
    found = [
        Finding(
            "ok",
            f"GPU: {_describe_gpu(device)}, {gpu_support.describe_runtime(runtime.prefix)}, "
            f"functions of {runtime.library}",
        ),
        Finding(
            "ok",
            f"GPU memory in MPI: {library}: {gpu_support.known_of(library).why}; "
            f"it says: {said or 'nothing'}",
        ),
    ]
    if world.Get_size() == 1:
        ways, why = gpu_choice.candidates(device, asked)
        names = " or ".join(ways) or gpu_choice.STAGING
        text = f"gradients on the GPU: nothing travels; in a larger world {names}: {why}"
    else:
        choice = gpu_choice.choose(world, device)
        text = f"gradients on the GPU: {choice.name}: {choice.reason}"
    return [*found, Finding("ok", text)]


def _without_gpu(missing: list[int], world_size: int) -> Finding:
    built = torch.version.cuda or torch.version.hip
    why = "finds none" if built else "is built without CUDA and ROCm"
    if len(missing) == world_size:
        return Finding("ok", f"GPU: torch {why}")
    return Finding(
        "warning",
        f"GPU: torch {why} on ranks {missing}",
        "ask for a GPU on every node, and install the same torch there",
    )


def find_gpu() -> torch.device | None:
    """Return the GPU that this rank would use, None without one. Not collective."""
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", get_topology().local_rank % torch.cuda.device_count())


def _describe_gpu(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name(device)}"
