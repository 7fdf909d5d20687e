from mpiddp.engine.engine cimport Channel, Engine
from mpiddp.engine.interface cimport Job, Transport
from mpiddp.mpi.calls cimport MPI_Comm, MPI_Request, MPI_Status
from mpiddp.system.posix cimport pthread_cond_t, pthread_mutex_t


cdef struct RequestState:
    Job job               # what the engine sees of it, once it is submitted
    MPI_Request request
    MPI_Status status
    int code                # MPI error code, 0 while all is well
    int given_up            # whether a receive is to be taken back, or the request forgotten
    # Of an arrival for which no message has come.
    int awaits
    MPI_Comm comm
    void *buffer
    int count
    int tag


cdef enum:
    MOST_ASKED = 64


cdef struct RequestsState:
    Transport transport     # first: the engine's pointer is a pointer to this
    pthread_mutex_t lock
    pthread_cond_t changed
    int watchers
    unsigned int finished   # how many submitted requests have finished
    # Of arrivals that have asked in vain in this round; more than there is room for: no other asks.
    int asked
    MPI_Comm comms[MOST_ASKED]
    int tags[MOST_ASKED]


cdef class Requests:
    cdef RequestsState state
    cdef readonly Engine engine
    cdef readonly bint crowded
    cdef readonly bint thread_has_core
    cdef Channel channel
    cdef int process_id


cdef class Arrival:
    cdef size_t address
    cdef int count
    cdef int tag


cdef class Pending:
    cdef RequestState state
    cdef Requests requests
    cdef Channel channel    # None until submitted
    cdef object request     # mpi4py's
    cdef object later       # what makes it, until it has begun
    cdef object memory
    cdef object communicator
    cdef readonly str call
    cdef object error       # with which it could not begin
    cdef bint ended         # the calling thread has driven it to its end
    cdef public long long expected

    cdef int check_result(self) except -1
