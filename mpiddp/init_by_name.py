"""torch.distributed.init_process_group("mpiddp"), with rank, size and store from MPI.

torch looks for ranks and addresses before it asks a backend for anything, and for
"env://", its default, it wants MASTER_ADDR. So a call that names our backend is completed
here before torch sees it. Calls for other backends pass unchanged.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed as dist

from mpiddp import rendezvous, uncaught
from mpiddp.replacement import replace_function

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["install", "names_mpiddp"]


def install() -> None:
    """Complete each call of torch.distributed.init_process_group that names mpiddp.

    Not collective. The completed call is collective over MPI.COMM_WORLD.
    """
    replace_function(dist.init_process_group, _completing)


def names_mpiddp(backend: object) -> bool:
    """Return whether `backend`, as in "cpu:gloo,cuda:mpiddp", names ours. Not collective."""
    if not isinstance(backend, str):
        return False
    parts = (part.rpartition(":")[2].strip() for part in backend.lower().split(","))
    return rendezvous.BACKEND in parts


def _completing(torchs: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(torchs)

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        if names_mpiddp(given.get("backend")):
            uncaught.watch_if_initialised()
        if (
            not names_mpiddp(given.get("backend"))
            or rendezvous.is_starting()
            # Torch has its own words for these.
            or dist.is_initialized()
            or None not in (given.get("store"), given.get("init_method"))
        ):
            torchs(*args, **kwargs)
            return

        def start(communicator: MPI.Intracomm, topology: rendezvous.Topology) -> None:
            _refuse_contradictions(communicator, topology, given)
            torchs(**_completed(communicator, topology, given))
            _bind_device(given.get("device_id"))

        rendezvous.begin_world(None, start)

    return init_process_group


def _completed(
    communicator: MPI.Intracomm, topology: rendezvous.Topology, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments with those that MPI knows. Collective over `communicator`."""
    arguments = dict(given)
    in_url = _in_url(given)
    if "rank" not in in_url:
        arguments["rank"] = topology.rank
    if "world_size" not in in_url:
        arguments["world_size"] = topology.world_size
    if _asks_environment(given):
        arguments["init_method"] = None
        timeout = given.get("timeout")
        if not isinstance(timeout, timedelta):
            timeout = rendezvous.DEFAULT_TIMEOUT  # torch refuses what is neither None nor a time
        arguments["store"] = rendezvous.shared_store(communicator, topology, timeout)
    return arguments


def _bind_device(device: torch.device | int | None) -> None:
    """Let the world know its GPU: torch tells it to a group that ours replaces."""
    if device is not None:
        accelerator = torch.accelerator.current_accelerator()
        if isinstance(device, int) and accelerator is not None:
            device = torch.device(accelerator.type, device)
        world: Any = dist.group.WORLD
        world.bound_device_id = device


def _refuse_contradictions(
    communicator: MPI.Intracomm, topology: rendezvous.Topology, given: Mapping[str, Any]
) -> None:
    """Raise on all ranks where one was told something else than MPI says.

    Collective over `communicator`: with the other ranks waiting, an error on one would hang them.

    Raises:
        ValueError: it names what was given and what MPI says.
    """
    problem = _contradiction(topology, given)
    told = [
        f"rank {rank}: {text}" for rank, text in enumerate(communicator.allgather(problem)) if text
    ]
    if told:
        raise ValueError(problem or told[0])


def _contradiction(topology: rendezvous.Topology, given: Mapping[str, Any]) -> str:
    by_mpi = {"rank": topology.rank, "world_size": topology.world_size}
    in_url = _in_url(given)
    for name, right in by_mpi.items():
        told = [(f"{name}={given[name]}", given[name])] if given.get(name, -1) != -1 else []
        if name in in_url:
            told.append((f"{name}={in_url[name]} in init_method", in_url[name]))
        variable = name.upper()
        if _asks_environment(given) and variable in os.environ:
            told.append(
                (f"{variable}={os.environ[variable]} in the environment", os.environ[variable])
            )
        for what, value in told:
            if str(value) != str(right):
                return (
                    f"{what}, but MPI says that this process is rank {topology.rank} of "
                    f"{topology.world_size}. Start with mpirun or srun (torchrun starts no MPI), "
                    f"and leave rank and world_size to MPI"
                )
    return ""


def _asks_environment(given: Mapping[str, Any]) -> bool:
    """Return whether torch would take ranks and address from the environment."""
    method = given.get("init_method")
    if given.get("store") is not None:
        return False
    return method is None or urlparse(str(method)).scheme == "env"


def _in_url(given: Mapping[str, Any]) -> dict[str, str]:
    """Return what an init_method such as "tcp://host:29500?rank=0" says."""
    return dict(parse_qsl(urlparse(str(given.get("init_method") or "")).query))
