"""The data-parallel part of Apex, apex.parallel, on mpiddp.

May import: the leaves and ddp. Must never import Apex, nor start or end a world.
"""

from mpiddp.apex.distributed import DistributedDataParallel
from mpiddp.apex.reducer import Reducer
from mpiddp.apex.sync_batch_norm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
