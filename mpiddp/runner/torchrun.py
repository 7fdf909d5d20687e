"""Give scripts written for torchrun what they expect when MPI starts them.

That is torchrun's environment variables, and our backend and DistributedDataParallel in place of
torch's.
"""

from __future__ import annotations

import inspect
import os
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed as dist

import mpiddp_children
from mpiddp.data_parallel.wrapper import DataParallel
from mpiddp.ddp.sync_batch_norm import SyncBatchNorm
from mpiddp.ddp.wrapper import DistributedDataParallel
from mpiddp.mpi.nodes import Topology
from mpiddp.process_group import asked_backend
from mpiddp.rendezvous import world
from mpiddp.runner import launchers_inside, trained_alone
from mpiddp.torch_internals.backend_names import (
    BACKEND,
    CCL,
    ccl_is_anothers,
    names_mpiddp,
    names_of,
)
from mpiddp.torch_internals.patching import replace_function

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "KEEP",
    "limit_threads",
    "replace_backends",
    "replace_data_parallel",
    "replace_ddp",
    "replace_sync_batch_norm",
    "set_environment",
]

# A choice of backend: the script's own.
KEEP = "keep"

# The backends that a script may name, torch's and torch-ccl, and whether this machine can run them.
_TORCHS: dict[str, Callable[[], bool]] = {
    CCL: ccl_is_anothers,
    "gloo": dist.is_gloo_available,
    "mpi": dist.is_mpi_available,
    "nccl": lambda: dist.is_nccl_available() and torch.cuda.is_available(),
    "ucc": dist.is_ucc_available,
    "xccl": lambda: dist.is_xccl_available() and torch.xpu.is_available(),
}


def set_environment(communicator: MPI.Intracomm, topology: Topology) -> str:
    """Set torchrun's variables where they are unset.

    Collective over `communicator`.

    Returns:
        What contradicts MPI in the environment of a rank, "" if nothing does: the same text on
        all ranks.
    """
    by_mpi = {"RANK": topology.rank, "WORLD_SIZE": topology.world_size}
    wrong = [
        f"rank {topology.rank}: {name}={os.environ[name]} in the environment, but MPI says {value}"
        for name, value in by_mpi.items()
        if os.environ.get(name, str(value)) != str(value)
    ]
    for told in communicator.allgather(wrong):
        if told:
            return str(told[0])
    address, port = communicator.bcast(_address(topology) if topology.rank == 0 else None)
    variables = topology.as_environment() | {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(topology.rank),
        "ROLE_WORLD_SIZE": str(topology.world_size),
        # Of DeepSpeed's own launcher: without it DeepSpeed's sums on CPUs crash.
        "LOCAL_SIZE": str(topology.local_world_size),
        # Libraries read these to see that the processes have been started.
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    for name, text in variables.items():
        os.environ.setdefault(name, text)
    return ""


def limit_threads(topology: Topology) -> bool:
    """Give each of several ranks of a node one thread, as torchrun does. Not collective.

    Returns:
        Whether that was done: not where OMP_NUM_THREADS is set.
    """
    if "OMP_NUM_THREADS" in os.environ or topology.local_world_size == 1:
        return False
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # torch has read the variable already
    return True


def replace_backends(backend: str) -> None:
    """Let init_process_group start `backend` for each of torch's own, and if none is named.

    Groups other than the world keep their backend, such as Gloo, if this machine can run it. Not
    collective.
    """
    process_id = os.getpid()

    def in_init(torchs: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(torchs)

        def init_process_group(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            if os.getpid() != process_id:  # forked: the world is torch's
                mpiddp_children.check(given)
                torchs(*args, **kwargs)
                return
            named = given.get("backend")
            asked = None
            if named is None or _of_torch(named):
                asked = "undefined" if named is None else named
                given["backend"] = backend
                if backend == BACKEND:
                    _leave_meeting_to_mpi(given)
                    given.pop("pg_options", None)  # NCCL's
                    if not torch.accelerator.is_available():
                        given.pop("device_id", None)
            begins = not (world.is_starting() or dist.is_initialized())
            torchs(**given)
            launchers_inside.note_world()
            if backend == BACKEND:
                if begins:
                    asked_backend.note(asked)
                _watch(dist.group.WORLD)

        return init_process_group

    def in_new_group(torchs: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(torchs)

        def new_group(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != process_id:
                return torchs(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            named = given.get("backend")
            replaced = asked_backend.was_told(named) or (
                named is not None
                and _of_torch(named)
                and not all(_TORCHS[name]() for name in names_of(named))
            )
            if replaced:
                given["backend"] = backend
                given.pop("pg_options", None)
            made = torchs(**given)
            if backend == BACKEND and isinstance(made, dist.ProcessGroup):
                asked_backend.note(named if replaced else given.get("backend"), made)
                _watch(made)
            return made

        return new_group

    replace_function(dist.init_process_group, in_init)
    replace_function(dist.new_group, in_new_group)
    if backend == BACKEND:
        replace_function(dist.get_backend, _answering(lambda named: named))
        replace_function(dist.get_backend_config, _answering(asked_backend.asked_config))


def _watch(group: dist.ProcessGroup | None) -> None:
    """See what the group averages, if it is ours. Not collective."""
    if names_mpiddp(asked_backend.get_backend(group)):
        trained_alone.watch_groups()
    else:
        trained_alone.note_other_group()


def _answering(answer: Callable[[str], str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what lets a function of torch answer for the backend that the script asked for."""

    def in_question(torchs: Callable[..., Any]) -> Callable[..., Any]:
        def question(group: dist.ProcessGroup | None = None) -> Any:
            compiling = torch.compiler.is_compiling()
            named = asked_backend.of_world()
            if compiling and group is None and named is not None:
                return answer(
                    named
                )  # Dynamo of torch 2.11 does not find our group in torch's table
            true = torchs(group)
            if not names_mpiddp(true):
                return true
            if not compiling:  # else there are no frames to look at
                named = asked_backend.told(group or dist.group.WORLD, sys._getframe(1))
            return true if named is None else answer(named)

        return question

    return in_question


def replace_ddp(derived: bool) -> None:
    """Let torch's DistributedDataParallel construct ours where its group is one of mpiddp.

    However the script imported torch's class, it gets ours: the class stays; calling it constructs
    our subclass. Not collective.

    Args:
        derived: whether classes that derive from torch's from now on derive from ours instead.
            They then refuse groups of other backends.
    """
    torchs = torch.nn.parallel.DistributedDataParallel
    signature = inspect.signature(torchs.__init__)

    def choose(cls: type, *args: Any, **kwargs: Any) -> object:
        chosen = cls
        if cls is torchs and _on_mpiddp(signature, args, kwargs):
            chosen = DistributedDataParallel
        return object.__new__(chosen)

    torchs.__new__ = choose  # type: ignore[method-assign, assignment]
    if derived:
        _derive_from(torchs, DistributedDataParallel)


def replace_sync_batch_norm() -> None:
    """Let torch's SyncBatchNorm, which refuses the CPU, construct ours. Not collective.

    Its `convert_sync_batchnorm` then makes ours too.
    """
    _replace_class(torch.nn.SyncBatchNorm, SyncBatchNorm)


def replace_data_parallel() -> None:
    """Let torch's DataParallel construct ours. Not collective."""
    _replace_class(torch.nn.DataParallel, DataParallel)


def _replace_class(torchs: Any, ours: type) -> None:
    """Let `torchs` construct `ours`, its subclass, and classes that derive from it do so from ours.

    As in `replace_ddp`, the class stays.
    """

    def choose(cls: type, *args: Any, **kwargs: Any) -> object:
        return object.__new__(ours if cls is torchs else cls)

    torchs.__new__ = choose
    _derive_from(torchs, ours)


def _derive_from(torchs: Any, ours: type) -> None:
    """Let classes that derive from `torchs` from now on derive from `ours`, its subclass."""

    def derive(cls: type, **kwargs: Any) -> None:
        super(torchs, cls).__init_subclass__(**kwargs)
        cls.__bases__ = tuple(ours if base is torchs else base for base in cls.__bases__)

    torchs.__init_subclass__ = classmethod(derive)  # type: ignore[arg-type]


def _leave_meeting_to_mpi(given: dict[str, Any]) -> None:
    """Replace an address or a file at which the ranks would meet by what it says of the ranks.

    MPI knows them, and each rank may have found another free port. What it says is compared with
    MPI as if it were given by itself.
    """
    url = urlparse(str(given.get("init_method") or ""))
    if url.scheme not in ("tcp", "file") or given.get("store") is not None:
        return
    del given["init_method"]
    for name, value in parse_qsl(url.query):
        if name in ("rank", "world_size") and value.isdigit():
            given.setdefault(name, int(value))


def _on_mpiddp(signature: inspect.Signature, args: Any, kwargs: Any) -> bool:
    try:
        given = signature.bind(None, *args, **kwargs).arguments
    except TypeError:
        return False  # unpickling; or torch's own error follows
    group, mesh = given.get("process_group"), given.get("device_mesh")
    if mesh is not None:
        if mesh.ndim != 1 or mesh.get_coordinate() is None:
            return False  # torch's own error follows
        group = mesh.get_group(mesh_dim=0)
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    from mpi4py import MPI

    from mpiddp.process_group.group import ProcessGroup

    return isinstance(group, ProcessGroup | MPI.Comm)


def _of_torch(backend: object) -> bool:
    return isinstance(backend, str) and all(name in _TORCHS for name in names_of(backend))


def _address(topology: Topology) -> tuple[str, int]:
    """Return this host, and a port on it that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return ("127.0.0.1" if topology.node_count == 1 else socket.gethostname()), port
