"""MPI operations for the largest and the smallest of floats, where a NaN wins, as in torch.

MPI's own compare as C does: a NaN is neither larger nor smaller, so what comes out depends on the
order in which ranks are combined, and can differ between ranks.
"""

from mpi4py.libmpi cimport MPI_COMM_NULL, MPI_Datatype, MPI_Op, MPI_Op_create, MPI_User_function
from mpi4py.MPI cimport Op

from mpiddp.mpi.errors cimport check

cdef extern from *:
    """
    #include <math.h>
    /* Of two zeros the positive one is the larger: all ranks get the same bits. */
    #define MPIDDP_EXTREME(name, type, beats, sign_wins)                                          \
        static void name(void *in, void *inout, int *count, MPI_Datatype *datatype)               \
        {                                                                                         \
            const type *restrict theirs = in;                                                     \
            type *restrict ours = inout;                                                          \
            (void)datatype;                                                                       \
            for (int i = 0; i < *count; i++) {                                                    \
                type a = theirs[i], b = ours[i];                                                  \
                int takes = (a beats b) | (a != a) | ((a == b) & (sign_wins));                    \
                ours[i] = takes ? a : b;                                                          \
            }                                                                                     \
        }
    MPIDDP_EXTREME(mpiddp_max_float, float, >, !signbit(a))
    MPIDDP_EXTREME(mpiddp_min_float, float, <, signbit(a) != 0)
    MPIDDP_EXTREME(mpiddp_max_double, double, >, !signbit(a))
    MPIDDP_EXTREME(mpiddp_min_double, double, <, signbit(a) != 0)
    """
    MPI_User_function mpiddp_max_float
    MPI_User_function mpiddp_min_float
    MPI_User_function mpiddp_max_double
    MPI_User_function mpiddp_min_double


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
        _operation(mpiddp_max_float),
        _operation(mpiddp_min_float),
        _operation(mpiddp_max_double),
        _operation(mpiddp_min_double),
    )
