"""Turn return codes of MPI and of the C library into exceptions, in one place.

Every MPI call of the compiled layer goes through `check`, every pthread or
system call through `check_errno`. Code that runs without the GIL on the engine
thread cannot raise: it stores code and call, and whoever waits checks them here.
"""

from libc.string cimport strerror

from mpiddp.mpi.calls cimport LONGEST_NAME, LONGEST_TEXT, MPI_Comm, MPI_SUCCESS, mpi


class MPIError(RuntimeError):
    """An MPI call of the compiled layer failed.

    Attributes:
        code: the MPI error code.
        call: the name of the MPI function.
        rank: this process's rank in the communicator, -1 when unknown.
    """

    def __init__(self, message: str, code: int = 0, call: str = "", rank: int = -1) -> None:
        super().__init__(message)
        self.code = code
        self.call = call
        self.rank = rank


def error_class(error):
    """Return the class of an error of MPI, 0 if `error` is none. Not collective."""
    from mpi4py import MPI

    code = error.code if isinstance(error, MPIError) else 0
    if isinstance(error, MPI.Exception):
        code = error.Get_error_code()
    return MPI.Get_error_class(code) if code else 0


cdef int check(int code, const char *call, MPI_Comm comm) except -1 nogil:
    if code == MPI_SUCCESS:
        return 0
    with gil:
        raise _mpi_error(code, call.decode(), comm)


cdef int check_errno(int code, const char *call) except -1 nogil:
    if code == 0:
        return 0
    with gil:
        raise OSError(code, f"{call.decode()}: {strerror(code).decode()}")


cdef object _mpi_error(int code, str call, MPI_Comm comm):
    cdef char text[LONGEST_TEXT + 1]
    cdef char name[LONGEST_NAME + 1]
    cdef int length = 0
    cdef int rank = -1
    cdef int initialized = 0
    cdef int finalized = 0
    mpi.initialized(&initialized)
    mpi.finalized(&finalized)
    if not initialized or finalized:
        when = "before MPI was initialised" if not initialized else "after MPI was finalised"
        return MPIError(f"{call} was called {when} (error code {code})", code, call)
    message = f"error code {code}"
    if mpi.error_string(code, text, &length) == MPI_SUCCESS:
        message = text[:length].decode(errors="replace")
    mpi.comm_rank(mpi.comm_world, &rank)
    where = f"world rank {rank}"
    if comm != mpi.comm_null:
        if mpi.comm_get_name(comm, name, &length) == MPI_SUCCESS and length:
            where += f", communicator {name[:length].decode(errors='replace')!r}"
        mpi.comm_rank(comm, &rank)
        where += f", rank {rank} there"
    return MPIError(f"{call} failed on {where}: {message}", code, call, rank)
