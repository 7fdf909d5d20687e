"""DistributedDataParallel, native to MPI.

    mpirun -n 16 python train.py

    import mpiddp
    from mpiddp import DistributedDataParallel as DDP

    mpiddp.init_process_group()
    model = DDP(model)

Importing this package does not initialise MPI.
"""

from mpiddp.asked_module import asked_module as _asked_module
from mpiddp.source_folder import hand_over as _hand_over

# Else the installed package is in the place of this one; or nothing of torch and MPI is wanted.
if not _hand_over(__path__[0]) and _asked_module() != "mpiddp.top":
    import importlib as _importlib
    import sys as _sys
    from typing import TYPE_CHECKING as _TYPE_CHECKING

    from mpiddp.mpi.compatibility import call_mpi_of_mpi4py as _call_mpi_of_mpi4py
    from mpiddp.torch_internals.versions import check_torch as _check_torch

    try:
        _call_mpi_of_mpi4py()
        _check_torch()
    except ImportError as _error:
        # Python imports the package before the module that -m names, which so cannot say it.
        if _asked_module() != "mpiddp.doctor":
            raise
        _status = _importlib.import_module("mpiddp_command").refused(_error, "--json" in _sys.argv)
        if _status is None:
            raise
        raise SystemExit(_status) from None

    from mpiddp import compression
    from mpiddp import settings as _settings
    from mpiddp.ddp import logger
    from mpiddp.ddp.metrics import metrics
    from mpiddp.ddp.sync_batch_norm import SyncBatchNorm
    from mpiddp.ddp.wrapper import DistributedDataParallel
    from mpiddp.mpi import libfabric as _libfabric
    from mpiddp.mpi import losses as _losses
    from mpiddp.mpi.library import compiled_against
    from mpiddp.mpi.nodes import Topology
    from mpiddp.process_group.asked_backend import get_backend
    from mpiddp.rendezvous import patches as _patches
    from mpiddp.rendezvous.world import (
        create_process_group,
        destroy_process_group,
        get_topology,
        init_process_group,
    )
    from mpiddp.torch_internals import backend_names as _backend_names
    from mpiddp.torch_internals.versions import declare_self_recording as _declare_self_recording
    from mpiddp.version import __version__

    for _name in _backend_names.register(create_process_group):
        _declare_self_recording(_name)
    _patches.install()
    _losses.avoid_shared_memory_of_mpi()
    _libfabric.leave_out_sockets()
    logger.install()
    if _settings.SHARED_PARAMETERS.read_before_init():
        _importlib.import_module("mpiddp.optim.adopted").install()

    if _settings.TRACE.read_before_init():
        _importlib.import_module("mpiddp.tracing.session").follow_world()

    if _TYPE_CHECKING:
        from mpiddp.checkpoint import saving as _saving  # noqa: F401
        from mpiddp.data_parallel.wrapper import DataParallel
        from mpiddp.elastic import running as _running  # noqa: F401
        from mpiddp.optim import node_optimizer as _node_optimizer  # noqa: F401
        from mpiddp.preemption import notice as _notice  # noqa: F401
        from mpiddp.tracing.session import trace

    # Each of a thousand ranks asks the filesystem for what it imports: rooms that many programs do
    # not use are imported when they are.
    _LATE_ROOMS = ("checkpoint", "elastic", "optim", "preemption")

    def __getattr__(name: str) -> object:
        """Import a room, DataParallel or trace at its first use."""
        if name in _LATE_ROOMS:
            return _importlib.import_module(f"mpiddp.{name}")
        if name == "DataParallel":
            return _importlib.import_module("mpiddp.data_parallel.wrapper").DataParallel
        if name == "trace":
            return _importlib.import_module("mpiddp.tracing.session").trace
        raise AttributeError(f"module 'mpiddp' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    __all__ = [
        "DataParallel",
        "DistributedDataParallel",
        "SyncBatchNorm",
        "Topology",
        "__version__",
        "checkpoint",
        "compiled_against",
        "compression",
        "destroy_process_group",
        "elastic",
        "get_backend",
        "get_topology",
        "init_process_group",
        "metrics",
        "optim",
        "preemption",
        "trace",
    ]
