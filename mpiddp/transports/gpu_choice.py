"""Choose how gradients on a GPU travel: by what is known of the MPI, and by trying it.

Note [The choice]
~~~~~~~~~~~~~~~~~
"staging" copies gradients through pinned host memory and works with every MPI. "device" gives the
GPU's memory to MPI_Iallreduce, and "ring" sends it around and adds on the GPU. Both can crash the
job if the MPI cannot do that, whatever it says. So one of them is only chosen if

1. the MPI is known to support it, or says so (`gpu_support`); a name in the environment
   stands in for that,
2. on every node, a small job beside this one has computed correct sums that way (`gpu_trial`).

Both need the BLAS library that torch loads for a GPU: "ring" for its sums, "device" for 16-bit
elements, which MPI cannot add.
"""

from __future__ import annotations

import logging
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpiddp import settings
from mpiddp.gpu.blas import Adder
from mpiddp.gpu.runtime import runtime_of
from mpiddp.mpi import nodes
from mpiddp.mpi.library import linked_version
from mpiddp.transports import gpu_support, gpu_trial
from mpiddp.transports.gpu_iallreduce import GpuIallreduceTransport
from mpiddp.transports.gpu_ring import GpuRingTransport
from mpiddp.transports.gpu_support import DEVICE, RING

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.gpu.runtime import Runtime

STAGING = "staging"
AUTO = "auto"
GPU_TRANSPORTS = (AUTO, STAGING, DEVICE, RING)

# Results of the trials on this rank's node, by way and device.
_tried: dict[tuple[str, torch.device], tuple[int, str]] = {}
_logged: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Choice:
    """How gradients on a GPU travel.

    Attributes:
        name: "staging", "device" or "ring".
        reason: a sentence that says why.
    """

    name: str
    reason: str


def requested_gpu_transport(argument: str | None = None) -> str:
    """Return the transport that the argument names, else the environment. Not collective.

    Raises:
        ValueError: there is no transport of this name.
    """
    if argument is None:
        return settings.DEVICE_TRANSPORT.read()
    if argument not in GPU_TRANSPORTS:
        names = ", ".join(GPU_TRANSPORTS)
        raise ValueError(f"transport must be one of {names}, not {argument!r}")
    return argument


def make_transport(
    name: str, communicator: MPI.Comm, device: torch.device
) -> GpuIallreduceTransport | GpuRingTransport:
    """Return a transport that gives GPU memory to MPI. Not collective.

    Args:
        name: "device" or "ring".
        communicator: used by nothing else from now on.
        device: of the gradients.
    """
    kind = GpuIallreduceTransport if name == DEVICE else GpuRingTransport
    return kind(communicator, device)


def choose(
    communicator: MPI.Comm,
    device: torch.device,
    request: str | None = None,
) -> Choice:
    """Return how gradients on a device travel, and log it once on rank 0.

    Collective. It may take half a minute, once for each GPU of a process.

    Args:
        communicator: of all ranks whose gradients are averaged.
        device: this rank's GPU.
        request: one of `GPU_TRANSPORTS`; None is what the environment says.

    Raises:
        ValueError: there is no transport of this name.
        RuntimeError: the ranks ask for different ones.
    """
    asked = requested_gpu_transport(request)
    requests = communicator.allgather(asked)
    if len(set(requests)) > 1:
        other = next(rank for rank, name in enumerate(requests) if name != requests[0])
        raise RuntimeError(
            f"{settings.DEVICE_TRANSPORT.name} is {requests[0]} on rank 0 and {requests[other]} on "
            f"rank {other}: it must be the same on all ranks"
        )
    choice = _agree(communicator, device, asked)
    if communicator.Get_rank() == 0:
        _tell(choice, asked)
    return choice


def _agree(communicator: MPI.Comm, device: torch.device, asked: str) -> Choice:
    if asked == STAGING:
        return Choice(STAGING, "asked for")
    ways, why = candidates(device, asked)
    everywhere = communicator.allgather((ways, why))
    shared = [way for way in ways if all(way in of_rank for of_rank, _ in everywhere)]
    if not shared:
        # The reason of the rank with the fewest ways.
        return Choice(STAGING, min(everywhere, key=lambda one: len(one[0]))[1])

    node = nodes.ranks_of_node(communicator)
    leads = node.Get_rank() == 0
    node.Free()
    failures = []
    for way in shared:
        outcome = _try_once(way, device) if leads else None
        wait_napping(communicator)
        outcomes = [one for one in communicator.allgather(outcome) if one is not None]
        problems = [problem for _, problem in outcomes if problem]
        if not problems:
            ranks = min(ranks for ranks, _ in outcomes)
            tried = f"a trial on {ranks} rank{'s' if ranks > 1 else ''} of each node worked"
            return Choice(way, f"{why}; {tried}")
        failures.append(f"the trial of {way!r} failed: {problems[0]}")
    return Choice(STAGING, f"{why}, but {'; '.join(failures)}")


def wait_napping(communicator: MPI.Comm) -> None:
    """Wait for all ranks, mostly asleep: a trial on this node needs the cores. Collective."""
    request = communicator.Ibarrier()
    while not request.Test():
        time.sleep(0.01)


def candidates(device: torch.device, asked: str = AUTO) -> tuple[tuple[str, ...], str]:
    """Return the ways that are worth a trial on this rank, and why. Not collective.

    Args:
        device: the GPU.
        asked: one of `GPU_TRANSPORTS`.
    """
    runtime = runtime_of(device)
    if runtime is None:
        return (), f"{device} is no GPU"
    if asked == AUTO:
        library = gpu_support.identify(linked_version())
        answers = gpu_support.ask_library(runtime.prefix)
        ways, why = gpu_support.worth_trying(library, runtime.prefix, answers)
    else:
        ways, why = (asked,), "asked for"
    if ways and (problem := _blas_problem(runtime, device)):
        return (), f"{why}, but {problem}"
    return ways, why


def _blas_problem(runtime: Runtime, device: torch.device) -> str:
    try:
        Adder(runtime, runtime.index_of(device))
    except (OSError, RuntimeError) as error:
        return f"nothing adds on the GPU: {error}"
    return ""


def _try_once(way: str, device: torch.device) -> tuple[int, str]:
    if (way, device) not in _tried:
        runtime = runtime_of(device)
        stands_in = device.type != "cuda" and runtime is not None
        described = (runtime.library, runtime.prefix) if stands_in and runtime else None
        _tried[way, device] = gpu_trial.trial(way, device, runtime=described)
    return _tried[way, device]


def _tell(choice: Choice, asked: str) -> None:
    if (choice.name, choice.reason) in _logged:
        return
    _logged.add((choice.name, choice.reason))
    text = f"gradients on the GPU travel by {choice.name!r}: {choice.reason}"
    logging.getLogger("mpiddp").info(text)
    if asked not in (AUTO, choice.name):
        warnings.warn(f"{asked!r} was asked for, but {text}", stacklevel=4)
