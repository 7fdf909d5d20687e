from mpi4py.libmpi cimport MPI_Comm, MPI_Request

from mpiddp.device_runtime cimport DeviceRuntime, Runtime
from mpiddp.engine cimport Advance, Transport, Work
from mpiddp.memory cimport DeviceMemory


cdef enum TailState:
    TAIL_WAITS
    TAIL_TRAVELS
    TAIL_DONE


cdef struct PointerBucket:
    # What a transport that gives device memory to MPI keeps with a bucket; the `context` of its
    # works.
    void *filled            # event: all that the stream had to do with the bucket
    size_t number           # of the work among those of the transport, in order of submission
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
    DeviceRuntime *functions
    int device
    size_t announced        # works submitted
    size_t starting         # number of the first work of which not all was given to MPI
    int device_code         # of a call that failed: of the GPU's runtime or its BLAS library
    const char *device_call


cdef class PointerMemory(DeviceMemory):
    cdef PointerBucket bucket
    cdef list travelling            # flags on their way: tensors on the CPU


cdef void set_up(
    PointerState *state, MPI_Comm comm, Runtime runtime, int device
) noexcept
# Gradients of a work: all elements but the flags.
cdef size_t gradients_of(Work *work) noexcept nogil
# The `announce` of such a transport.
cdef void announce(Transport *transport, Work *work) noexcept nogil
# Whether this work's gradients may be given to MPI now: ADVANCE_SOME; else what `advance` returns.
cdef Advance may_start(PointerState *state, Work *work) noexcept nogil
# Begin the sum of the flags when all gradients were given to MPI, finish it when it is there.
cdef Advance finish(PointerState *state, Work *work, Advance status) noexcept nogil
cdef Advance fail_in_mpi(PointerState *state, int code) noexcept nogil
cdef Advance fail_on_device(PointerState *state, int code, const char *call) noexcept nogil
cdef list allocate(Runtime runtime, object device, sizes, tails)
# Raise the DeviceError of a call that failed in `advance`, if one did.
cdef int raise_failure_of(PointerState *state, Runtime runtime) except -1
# Raise ValueError unless chunks may be of this size and so many may be under way.
cdef int check_settings(size_t chunk_bytes, size_t window) except -1
