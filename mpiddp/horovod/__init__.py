"""Horovod's API for PyTorch, on mpiddp: ``import mpiddp.horovod as hvd``.

May import: the leaves, mpi, torch_internals, engine, process_group, rendezvous and ddp. Must never
change the user's own process groups, or match operations by the order of their calls.
"""

from mpiddp.horovod.compression import Compression
from mpiddp.horovod.errors import HorovodInternalError
from mpiddp.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from mpiddp.horovod.reduce_ops import Adasum, Average, Max, Min, Product, Sum
from mpiddp.horovod.world import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
]
