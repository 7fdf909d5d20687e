from mpi4py.libmpi cimport MPI_Request, MPI_Status

from mpiddp.engine.engine cimport Channel, Engine
from mpiddp.engine.interface cimport Job, Transport
from mpiddp.system.posix cimport pthread_cond_t, pthread_mutex_t


cdef struct RequestState:
    Job job               # what the engine sees of it, once it is submitted
    MPI_Request request
    MPI_Status status
    int code                # MPI error code, 0 while all is well
    int given_up            # whether a receive is to be taken back, or the request forgotten


cdef struct RequestsState:
    Transport transport     # first: the engine's pointer is a pointer to this
    pthread_mutex_t lock
    pthread_cond_t changed
    int watchers
    unsigned int finished   # how many submitted requests have finished


cdef class Requests:
    cdef RequestsState state
    cdef readonly Engine engine
    cdef readonly bint crowded
    cdef Channel channel
    cdef int process_id


cdef class Pending:
    cdef RequestState state
    cdef Requests requests
    cdef Channel channel    # None until submitted
    cdef object request     # mpi4py's
    cdef object memory
    cdef object communicator
    cdef readonly str call
    cdef bint ended         # the calling thread has driven it to its end
    cdef public long long expected

    cdef int check_result(self) except -1
