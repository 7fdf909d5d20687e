"""What Horovod can be asked about how it was built. Here MPI is all there is."""

from __future__ import annotations

import torch

from mpiddp.horovod.process_sets import table

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_built() -> bool:
    """Return True. Not collective."""
    return True


def mpi_enabled() -> bool:
    """Return True. Not collective."""
    return True


def mpi_threads_supported() -> bool:
    """Return whether MPI takes calls from several threads. Not collective.

    Raises:
        ValueError: Horovod is not initialised.
    """
    table()
    from mpi4py import MPI

    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def gloo_built() -> bool:
    """Return False: mpiddp never uses Gloo. Not collective."""
    return False


def gloo_enabled() -> bool:
    """Return False: mpiddp never uses Gloo. Not collective."""
    return False


def nccl_built() -> int:
    """Return 0: mpiddp never uses NCCL. Not collective."""
    return 0


def ddl_built() -> bool:
    """Return False: mpiddp never uses IBM's DDL. Not collective."""
    return False


def ccl_built() -> bool:
    """Return False: mpiddp never uses oneCCL. Not collective."""
    return False


def cuda_built() -> bool:
    """Return whether torch is built for CUDA: GPU tensors are taken then. Not collective."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch is built for ROCm: GPU tensors are taken then. Not collective."""
    return torch.version.hip is not None
