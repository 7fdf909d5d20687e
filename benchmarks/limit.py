"""Compile limit.c and run it on the ranks of one node: the bound that no framework can beat."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from mpi4py import MPI

# torch's sizes of buckets, in bytes: the first, and all others.
FIRST_BUCKET, OTHER_BUCKETS = 1 << 20, 25 << 20
PAGE = 4096


class Limit:
    """Average gradients over the ranks of a node as limit.c does.

    Collective.

    Args:
        gradients: float32 tensors, contiguous, that stay where they are.
        communicator: ranks that share memory.
        in_place: whether the gradients are taken to lie in the bucket already.

    Raises:
        RuntimeError: there is no C compiler, or not enough shared memory.
    """

    def __init__(
        self, gradients: Sequence[torch.Tensor], communicator: MPI.Comm, in_place: bool = False
    ) -> None:
        self.communicator = communicator
        self.gradients = list(gradients)
        ranks, rank = communicator.size, communicator.rank
        sizes = [gradient.numel() for gradient in self.gradients]
        ends = bucket_ends(sizes)
        part_bytes = -(-4 * sum(sizes) // PAGE) * PAGE
        self._library = _compile(communicator)
        self.memory = _share(communicator, PAGE + ranks * part_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        own = PAGE + rank * part_bytes
        # Pages lie where they are touched first.
        ctypes.memset(address + own, 0, part_bytes)
        self.own = torch.frombuffer(self.memory, dtype=torch.float32, count=sum(sizes), offset=own)
        self.arguments = (
            ctypes.c_void_p(address),
            (ctypes.c_void_p * ranks)(*(address + PAGE + r * part_bytes for r in range(ranks))),
            ctypes.c_uint(ranks),
            ctypes.c_uint(rank),
            None
            if in_place
            else (ctypes.c_void_p * len(sizes))(*(g.data_ptr() for g in self.gradients)),
            (ctypes.c_size_t * len(sizes))(*sizes),
            (ctypes.c_size_t * len(ends))(*ends),
            ctypes.c_size_t(len(ends)),
        )
        communicator.Barrier()

    def step(self, copy_back: bool) -> None:
        """Average once. Collective."""
        self._library.limit_step(*self.arguments, ctypes.c_int(copy_back))

    def means(self) -> list[torch.Tensor]:
        """Return the means of the last step, in reversed order of the gradients."""
        pieces = torch.split(self.own, [gradient.numel() for gradient in self.gradients])
        return [
            piece.view(gradient.shape)
            for piece, gradient in zip(pieces[::-1], self.gradients[::-1], strict=True)
        ]

    def seconds(self, copy_back: bool, steps: int) -> float:
        """Return the seconds of a step, the mean of `steps` in a row. Collective."""
        function = self._library.limit_seconds
        return (
            float(function(*self.arguments, ctypes.c_int(copy_back), ctypes.c_size_t(steps)))
            / steps
        )


def bucket_ends(sizes: Sequence[int]) -> list[int]:
    """Return where each bucket ends, as an index into `sizes` (numbers of float32)."""
    ends: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        filled += 4 * size
        if filled >= (OTHER_BUCKETS if ends else FIRST_BUCKET) or index == len(sizes) - 1:
            ends.append(index + 1)
            filled = 0
    return ends


def _agree(communicator: MPI.Comm, problem: str) -> None:
    """Raise on all ranks if one has a problem. Collective."""
    problems = [other for other in communicator.allgather(problem) if other]
    if problems:
        raise RuntimeError(problems[0])


def _compile(communicator: MPI.Comm) -> ctypes.CDLL:
    """Compile with the system's compiler, once for all ranks. Collective."""
    folder, problem = "", ""
    if communicator.rank == 0:
        folder = tempfile.mkdtemp(prefix="mpiddp-limit-")
        flags = ["-std=c11", "-O3", "-fPIC", "-shared"]
        if " avx2 " in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
            flags.append("-mavx2")
        source = Path(__file__).with_name("limit.c")
        command = ["cc", *flags, str(source), "-o", f"{folder}/limit.so"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            problem = f"limit.c cannot be compiled: {getattr(error, 'stderr', '') or error}"
    try:
        _agree(communicator, problem)
        library = ctypes.CDLL(f"{communicator.bcast(folder)}/limit.so")
        communicator.Barrier()
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    library.limit_seconds.restype = ctypes.c_double
    library.limit_step.restype = None
    return library


def _share(communicator: MPI.Comm, size: int) -> mmap.mmap:
    """Return `size` bytes that all ranks see, zero at first. Collective."""
    name, problem = "", ""
    if communicator.rank == 0:
        handle, name = tempfile.mkstemp(prefix="mpiddp-limit-", dir="/dev/shm")
        try:
            os.posix_fallocate(handle, 0, size)
        except OSError as error:
            problem = f"/dev/shm has no {size >> 20} MB: {error}"
        os.close(handle)
    name = communicator.bcast(name)
    try:
        _agree(communicator, problem)
        with open(name, "r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
        communicator.Barrier()
    finally:
        if communicator.rank == 0:
            os.unlink(name)
    # Fewer misses of the address cache, where the system allows it.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
