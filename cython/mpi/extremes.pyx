"""MPI operations for the largest and the smallest of floats, where a NaN wins, as in torch.

See Note [The largest of a NaN and a number] in combining.h.
"""

from mpi4py.libmpi cimport MPI_COMM_NULL, MPI_Op, MPI_Op_create, MPI_User_function
from mpi4py.MPI cimport Op

from mpiddp.mpi.errors cimport check

cdef extern from "combining.h":
    """
    #define MPIDDP_MPI_FUNCTION(name)                                                             \
        static void name##_for_mpi(void *theirs, void *ours, int *count, MPI_Datatype *datatype)  \
        {                                                                                         \
            (void)datatype;                                                                       \
            name(theirs, ours, *count);                                                           \
        }
    MPIDDP_MPI_FUNCTION(mpiddp_max_float32)
    MPIDDP_MPI_FUNCTION(mpiddp_min_float32)
    MPIDDP_MPI_FUNCTION(mpiddp_max_float64)
    MPIDDP_MPI_FUNCTION(mpiddp_min_float64)
    """
    MPI_User_function mpiddp_max_float32_for_mpi
    MPI_User_function mpiddp_min_float32_for_mpi
    MPI_User_function mpiddp_max_float64_for_mpi
    MPI_User_function mpiddp_min_float64_for_mpi


cdef Op _operation(MPI_User_function *function):
    cdef MPI_Op handle
    check(MPI_Op_create(function, True, &handle), "MPI_Op_create", MPI_COMM_NULL)
    cdef Op operation = Op.__new__(Op)
    operation.ob_mpi = handle
    return operation


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
