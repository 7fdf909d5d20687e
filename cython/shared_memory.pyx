"""Memory that the ranks of a node share: a piece a rank, mapped by all of them.

Note [Anonymous files instead of windows]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each rank makes its piece as an anonymous file (memfd_create) and the others open it
through /proc. Compared with MPI_Win_allocate_shared: nothing is printed and no progress
thread started by the MPI, the limits on /dev/shm in containers do not count, nothing is
left behind when a job is killed, and each piece lives as long as anybody maps it, so that
a gradient may outlive its model and nothing collective happens at garbage collection.
posix_fallocate takes the pages at once: too little memory is an error here instead of a
bus error in backward, and they come from the memory next to their owner's core.
"""

import os

from cpython.buffer cimport PyBuffer_FillInfo
from libc.errno cimport errno


cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *, size_t, int, int, int, long long)
    int munmap(void *, size_t)
    const int PROT_READ
    const int PROT_WRITE
    const int MAP_SHARED
    void *MAP_FAILED


cdef class Mapping:
    """One file in memory, as a writable buffer of bytes; unmapped with its last user.

    Not collective.

    Args:
        descriptor: of the file; it may be closed afterwards.
        size: in bytes.

    Raises:
        OSError: the file cannot be mapped.
    """

    def __init__(self, int descriptor, Py_ssize_t size):
        cdef void *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0)
        if address == MAP_FAILED:
            raise OSError(errno, f"mmap of {size} bytes: {os.strerror(errno)}")
        self.address = <char *>address
        self.size = size

    def __dealloc__(self):
        if self.address != NULL:
            munmap(self.address, self.size)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.address, self.size, 0, flags)


def allocate(node, Py_ssize_t size):
    """Return mappings of every rank's piece of `size` zero bytes, in order of rank.

    Collective over `node`.

    Args:
        node: an mpi4py communicator whose ranks share memory.
        size: bytes of each piece, greater than zero, the same on all ranks.

    Raises:
        OSError: some rank cannot make or map some piece, or asks for another size; raised on
            all ranks.
    """
    cdef int descriptor = -1
    problem = ""
    identity = None
    mappings = []
    try:
        try:
            descriptor = os.memfd_create("mpiddp", os.MFD_CLOEXEC)
            os.posix_fallocate(descriptor, 0, size)
            identity = _identity(descriptor)
        except (AttributeError, OSError) as error:
            problem = f"cannot make {size} bytes of shared memory: {error}"
        pieces = node.allgather(
            (f"/proc/{os.getpid()}/fd/{descriptor}", identity, size, problem)
        )
        sizes = [their_size for _, _, their_size, _ in pieces]
        if len(set(sizes)) > 1:
            problem = f"the ranks ask for different sizes of shared memory, in bytes: {sizes}"
        elif not any(text for _, _, _, text in pieces):
            try:
                mappings = [_map(path, expected, size) for path, expected, _, _ in pieces]
            except OSError as error:
                problem = f"cannot map another rank's memory: {error}"
        problems = [text for text in node.allgather(problem) if text]
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if problems:
        raise OSError(problems[0])
    return mappings


def _identity(descriptor):
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _map(path, expected, size):
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        # In another container the same path may lead to another process.
        if _identity(descriptor) != expected:
            raise OSError(f"{path} is another file: do the ranks see the same processes?")
        return Mapping(descriptor, size)
    finally:
        os.close(descriptor)
