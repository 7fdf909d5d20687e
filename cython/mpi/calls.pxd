# MPI's functions and constants, for whatever MPI mpi4py uses. See Note [MPI through one door].
from libc.stdint cimport intptr_t


cdef extern from "calls.h" nogil:
    ctypedef intptr_t MPI_Comm "mpiddp_handle"
    ctypedef intptr_t MPI_Request "mpiddp_handle"
    ctypedef intptr_t MPI_Message "mpiddp_handle"
    ctypedef intptr_t MPI_Datatype "mpiddp_handle"
    ctypedef intptr_t MPI_Op "mpiddp_handle"
    ctypedef struct MPI_Status "mpiddp_status":
        pass
    # What an operation of ours calls; it gets the address of a datatype, which it must not read.
    ctypedef void (*Combine "mpiddp_combine_t")(void *, void *, int *, void *) noexcept nogil

    enum:
        LONGEST_TEXT "MPIDDP_LONGEST_TEXT"
        LONGEST_NAME "MPIDDP_LONGEST_NAME"

    ctypedef struct Calls "struct mpiddp_calls":
        const char *interface
        const char *vendor
        const char *version
        MPI_Comm comm_null
        MPI_Comm comm_self
        MPI_Comm comm_world
        MPI_Request request_null
        MPI_Datatype byte
        MPI_Datatype float32
        MPI_Datatype float64
        MPI_Datatype uint64
        MPI_Datatype datatype_null
        MPI_Op sum
        void *in_place
        int any_source
        int error_other
        int (*initialized)(int *) noexcept nogil
        int (*finalized)(int *) noexcept nogil
        int (*get_library_version)(char *, int *) noexcept nogil
        int (*error_string)(int, char *, int *) noexcept nogil
        int (*comm_rank)(MPI_Comm, int *) noexcept nogil
        int (*comm_get_name)(MPI_Comm, char *, int *) noexcept nogil
        int (*when_freed)(MPI_Comm, void (*)(void *) noexcept nogil, void *) noexcept nogil
        int (*test)(MPI_Request *, int *, MPI_Status *) noexcept nogil
        int (*testall)(int, MPI_Request *, int *) noexcept nogil
        int (*cancel)(MPI_Request *) noexcept nogil
        int (*isend)(
            const void *, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request *) noexcept nogil
        int (*irecv)(void *, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request *) noexcept nogil
        int (*improbe)(int, int, MPI_Comm, int *, MPI_Message *, MPI_Status *) noexcept nogil
        int (*imrecv)(void *, int, MPI_Datatype, MPI_Message *, MPI_Request *) noexcept nogil
        int (*status_source)(const MPI_Status *) noexcept nogil
        int (*status_bytes)(const MPI_Status *, long long *) noexcept nogil
        int (*iallreduce)(
            const void *, void *, int, MPI_Datatype, MPI_Op, MPI_Comm, MPI_Request *) noexcept nogil
        int (*iallgather)(
            const void *, int, MPI_Datatype, void *, int, MPI_Datatype, MPI_Comm,
            MPI_Request *) noexcept nogil
        int (*iallgatherv)(
            const void *, int, MPI_Datatype, void *, const int *, const int *, MPI_Datatype,
            MPI_Comm, MPI_Request *) noexcept nogil
        int (*ialltoall)(
            const void *, int, MPI_Datatype, void *, int, MPI_Datatype, MPI_Comm,
            MPI_Request *) noexcept nogil
        int (*ialltoallv)(
            const void *, const int *, const int *, MPI_Datatype, void *, const int *, const int *,
            MPI_Datatype, MPI_Comm, MPI_Request *) noexcept nogil
        int (*ibcast)(void *, int, MPI_Datatype, int, MPI_Comm, MPI_Request *) noexcept nogil
        int (*op_create)(Combine, int, MPI_Op *) noexcept nogil
        int (*type_of_words)(int, MPI_Datatype *) noexcept nogil


cdef enum:
    MPI_SUCCESS = 0     # of every MPI

# The table. Whoever calls `mpi.isend` calls MPI_Isend.
cdef Calls mpi
