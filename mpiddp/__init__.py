"""DistributedDataParallel, native to MPI.

    mpirun -n 16 python train.py

    import mpiddp
    from mpiddp import DistributedDataParallel as DDP

    mpiddp.init_process_group()
    model = DDP(model)

Importing this package does not initialise MPI.
"""

from mpiddp.mpi.compatibility import check_loaded_library as _check_loaded_library
from mpiddp.torch_internals.versions import check_torch as _check_torch

try:
    from mpiddp.mpi.library import compiled_against
except ModuleNotFoundError as _error:
    raise ImportError(
        f"mpiddp is not compiled in {__path__[0]}. If that is its source folder, run from "
        f"another directory, or install it: pip install ."
    ) from _error

_check_torch()
_check_loaded_library()

from torch.distributed import Backend as _Backend  # noqa: E402

from mpiddp import compression  # noqa: E402
from mpiddp.checkpoint import saving as _saving  # noqa: E402, F401
from mpiddp.data_parallel.wrapper import DataParallel  # noqa: E402
from mpiddp.ddp import logger  # noqa: E402
from mpiddp.ddp.sync_batch_norm import SyncBatchNorm  # noqa: E402
from mpiddp.ddp.wrapper import DistributedDataParallel  # noqa: E402
from mpiddp.elastic import running as _running  # noqa: E402, F401
from mpiddp.mpi import libfabric as _libfabric  # noqa: E402
from mpiddp.mpi import losses as _losses  # noqa: E402
from mpiddp.mpi.nodes import Topology  # noqa: E402
from mpiddp.optim import node_optimizer as _node_optimizer  # noqa: E402, F401
from mpiddp.preemption import notice as _notice  # noqa: E402, F401
from mpiddp.rendezvous import patches as _patches  # noqa: E402
from mpiddp.rendezvous.world import (  # noqa: E402
    BACKEND,
    create_process_group,
    destroy_process_group,
    get_topology,
    init_process_group,
)
from mpiddp.torch_internals.versions import (  # noqa: E402
    declare_self_recording as _declare_self_recording,
)
from mpiddp.version import __version__  # noqa: E402

_Backend.register_backend(BACKEND, create_process_group, extended_api=True, devices=["cpu", "cuda"])
_declare_self_recording(BACKEND)
_patches.install()
_losses.avoid_shared_memory_of_mpi()
_libfabric.leave_out_sockets()
logger.install()

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
    "get_topology",
    "init_process_group",
    "optim",
    "preemption",
]
