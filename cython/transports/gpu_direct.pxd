from mpiddp.engine.interface cimport Advance, Job, Transport
from mpiddp.engine.memory cimport GpuMemory
from mpiddp.gpu.runtime cimport GpuFunctions, Runtime
from mpiddp.mpi.calls cimport MPI_Comm, MPI_Request


cdef enum TailState:
    TAIL_WAITS
    TAIL_TRAVELS
    TAIL_DONE


cdef struct PointerBucket:
    # What a transport that gives device memory to MPI keeps with a bucket; the `context` of its
    # jobs.
    void *filled            # event: the stream has filled the bucket
    size_t number           # of the job among those of the transport, in order of submission
    int passed              # whether the event has
    int failure             # code of the runtime, of a call that failed on the submitting thread
    size_t begun            # gradients given to MPI
    size_t ended            # gradients that hold the sum
    char *tail              # flags in host memory, behind the gradients in the order of elements
    size_t tail_bytes
    char *tail_sum          # room for twice as many bytes: 16-bit flags travel as float32
    char *tail_sent         # likewise
    TailState tail_state
    MPI_Request tail_request


cdef struct PointerState:
    # The first member of such a transport's own struct.
    Transport transport
    MPI_Comm comm
    GpuFunctions *functions
    int device
    size_t announced        # jobs submitted
    size_t starting         # number of the first job that MPI has not got all of
    int device_code         # of a call that failed: of the GPU's runtime or its BLAS library
    const char *device_call


cdef class PointerMemory(GpuMemory):
    cdef PointerBucket bucket
    cdef list travelling            # flags on their way: tensors on the CPU


cdef void set_up(
    PointerState *state, MPI_Comm comm, Runtime runtime, int device
) noexcept
# Gradients of a job: all elements but the flags.
cdef size_t gradients_of(Job *job) noexcept nogil
# The `announce` of such a transport.
cdef void announce(Transport *transport, Job *job) noexcept nogil
# Return ADVANCE_SOME if the job's gradients may be given to MPI now, else what `advance` returns.
cdef Advance may_start(PointerState *state, Job *job) noexcept nogil
# Begin the sum of the flags when MPI has got all gradients; finish it when it has arrived.
cdef Advance finish(PointerState *state, Job *job, Advance status) noexcept nogil
cdef Advance fail_in_mpi(PointerState *state, int code) noexcept nogil
cdef Advance fail_on_gpu(PointerState *state, int code, const char *call) noexcept nogil
cdef list allocate(Runtime runtime, object device, sizes, tails)
# Raise the GpuError of a call that failed in `advance`, if one did.
cdef int raise_failure_of(PointerState *state, Runtime runtime) except -1
# Raise ValueError unless chunks may be of this size and so many may be under way.
cdef int check_settings(size_t chunk_bytes, size_t window) except -1
