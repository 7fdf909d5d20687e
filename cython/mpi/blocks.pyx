"""A small message of one size, which all ranks combine: do they call the same, and their data.

Note [Calls in a block]
~~~~~~~~~~~~~~~~~~~~~~~
MPI does not compare what the ranks of a communicator call. If they call different collectives, or
one with different sizes, it cuts a message, hangs or dies. So ranks that share no memory first
combine a block: an all-reduce of always the same size, which nothing can spoil. In it are a digest
of the call, a sum that is zero if the two ends of each message agree on its size, and the data of
the collective where that is small enough. Then the block is the collective: it takes as long as MPI
takes for a few numbers. Else the collective of MPI follows.

Data that ranks only hand on is combined by OR with the zeros of the others.
"""

from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from mpiddp.mpi.calls cimport MPI_Comm, MPI_Datatype, MPI_Op, MPI_Request, mpi
from mpiddp.mpi.errors cimport check
from mpiddp.mpi.combining import WAYS

cdef extern from "blocks.h":
    int MPIDDP_BLOCK_BYTES
    void mpiddp_combine_blocks(const void *, void *, int) nogil

# How many bytes of data there is room for.
ROOM = MPIDDP_BLOCK_BYTES - 24
HANDED_ON = WAYS["bor", "uint8"]

cdef MPI_Datatype _datatype
cdef MPI_Op _operation
# mpi4py's, once MPI knows of blocks: to import mpi4py.MPI may initialise MPI.
cdef object _request_from = None


cdef void _combine(void *theirs, void *ours, int *count, void *datatype) noexcept nogil:
    mpiddp_combine_blocks(theirs, ours, count[0])


cdef int _make() except -1:
    """Make what MPI needs to know of blocks; it lives as long as MPI."""
    global _request_from
    from mpi4py import MPI

    check(
        mpi.type_of_words(MPIDDP_BLOCK_BYTES // 8, &_datatype), "MPI_Type_contiguous", mpi.comm_null
    )
    check(mpi.op_create(_combine, True, &_operation), "MPI_Op_create", mpi.comm_null)
    _request_from = MPI.Request.fromhandle
    return 0


cdef class Block:
    """What one rank says of a collective, and after the all-reduce what all have said.

    Not collective, except `start`.
    """

    def __cinit__(self):
        self.block = <block_t *>calloc(1, MPIDDP_BLOCK_BYTES)
        if self.block is NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.block)

    def say(self, unsigned long long digest, unsigned long long balance):
        """Say what this rank calls.

        Args:
            digest: equal on all ranks that call the same.
            balance: the sum over all ranks is zero, modulo 2 ** 64, if sizes fit together.
        """
        self.block.digest = digest
        self.block.balance = balance

    def carry(
        self, int way, Py_ssize_t address, Py_ssize_t count, Py_ssize_t place, Py_ssize_t total
    ):
        """Take this rank's data along.

        Args:
            way: one of `combining.WAYS`, the same on all ranks.
            address: where `count` bytes lie.
            count: how many.
            place: where in the data of all ranks they belong, in bytes.
            total: how many bytes the data of all ranks has, at most `ROOM`.
        """
        assert 0 <= place <= place + count <= total <= ROOM
        self.block.way = way
        self.block.bytes = total
        memcpy(<char *>self.block.data + place, <const void *>address, count)

    def start(self, communicator):
        """Begin the all-reduce. Collective.

        Args:
            communicator: mpi4py's.

        Returns:
            The request of MPI. The block must live until that has ended.
        """
        cdef MPI_Comm comm = <MPI_Comm><size_t>communicator.handle
        cdef MPI_Request request = mpi.request_null
        if _request_from is None:
            _make()
        check(
            mpi.iallreduce(
                mpi.in_place, self.block, 1, _datatype, _operation, comm, &request
            ),
            "MPI_Iallreduce", comm,
        )
        return _request_from(<size_t>request)

    @property
    def differs(self):
        """Whether ranks have said what does not fit together; known when all have."""
        return bool(self.block.differs or self.block.balance)

    def read(self, Py_ssize_t address, Py_ssize_t count, Py_ssize_t place):
        """Write `count` bytes of the data of all ranks, from `place` on, to an address."""
        assert 0 <= place <= place + count <= self.block.bytes
        memcpy(<void *>address, <const char *>self.block.data + place, count)
