"""MPI operations for the largest and the smallest of floats, where a NaN wins, as in torch.

See Note [The largest of a NaN and a number] in combining.h.
"""

from mpiddp.mpi.calls cimport Combine, MPI_Op, mpi
from mpiddp.mpi.errors cimport check

cdef extern from "combining.h":
    """
    #define MPIDDP_MPI_FUNCTION(name)                                                             \
        static void name##_for_mpi(void *theirs, void *ours, int *count, void *datatype)         \
        {                                                                                         \
            (void)datatype;                                                                       \
            name(theirs, ours, *count);                                                           \
        }
    MPIDDP_MPI_FUNCTION(mpiddp_max_float32)
    MPIDDP_MPI_FUNCTION(mpiddp_min_float32)
    MPIDDP_MPI_FUNCTION(mpiddp_max_float64)
    MPIDDP_MPI_FUNCTION(mpiddp_min_float64)
    """
    void mpiddp_max_float32_for_mpi(void *, void *, int *, void *) noexcept nogil
    void mpiddp_min_float32_for_mpi(void *, void *, int *, void *) noexcept nogil
    void mpiddp_max_float64_for_mpi(void *, void *, int *, void *) noexcept nogil
    void mpiddp_min_float64_for_mpi(void *, void *, int *, void *) noexcept nogil


cdef object _operation(Combine function):
    from mpi4py import MPI

    cdef MPI_Op operation = 0
    check(mpi.op_create(function, True, &operation), "MPI_Op_create", mpi.comm_null)
    return MPI.Op.fromhandle(<size_t>operation)


def operations():
    """Make the operations, which live as long as MPI. Not collective; MPI is initialised.

    Returns:
        Largest and smallest of 32-bit floats, then of 64-bit floats.
    """
    return (
        _operation(mpiddp_max_float32_for_mpi),
        _operation(mpiddp_min_float32_for_mpi),
        _operation(mpiddp_max_float64_for_mpi),
        _operation(mpiddp_min_float64_for_mpi),
    )
