from mpiddp.mpi.calls cimport MPI_Comm

cdef int check(int code, const char *call, MPI_Comm comm) except -1 nogil
cdef int check_errno(int code, const char *call) except -1 nogil
