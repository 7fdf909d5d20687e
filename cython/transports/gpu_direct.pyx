"""The common part of transports that give device memory to MPI: memory, waiting, flags.

Note [Order of device memory]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
MPI knows no streams. When a bucket is submitted, an event is recorded on the stream that fills it.
The engine polls that event without the GIL, and gives the bucket to MPI when it has passed. What
MPI has completed is in memory for every stream, so nobody waits for anything but the engine.

All ranks give their buckets to MPI in the order of submission: a job begins when all of the
job before it has begun, and its flags go last.

Note [Flags of device buckets]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The last elements of a bucket say which parameters were used. They are written by the host, so
they stay there, and travel by a small all-reduce of their own; they are divided here. Gradients
are not divided here: no kernel of this package runs on the GPU, and torch divides them as it
copies them in.
"""

import torch

from libc.string cimport memset

from mpiddp.engine.interface cimport (
    ADVANCE_BLOCKED, ADVANCE_DONE, ADVANCE_FAILED, ADVANCE_PENDING, ADVANCE_SOME, MAX_SLOTS,
    Advance, Job, Transport,
)
from mpiddp.engine.memory cimport GpuMemory
from mpiddp.gpu.runtime cimport GPU_READY, Event, Runtime, event_passed, gpu_error
from mpiddp.mpi.calls cimport MPI_Comm, MPI_SUCCESS, mpi
from mpiddp.system.kernels cimport ELEMENT_FLOAT64, element_bytes, selected_kernels
from mpiddp.gpu.allocation import zeros
from mpiddp.gpu.runtime import GpuError


cdef void set_up(PointerState *state, MPI_Comm comm, Runtime runtime, int device) noexcept:
    state.comm = comm
    state.functions = &runtime.functions
    state.device = device
    state.transport.announce = announce
    state.transport.wants_thread = True


cdef size_t gradients_of(Job *job) noexcept nogil:
    cdef PointerBucket *bucket = <PointerBucket *>job.context
    return job.count - bucket.tail_bytes // element_bytes(job.element)


cdef void announce(Transport *transport, Job *job) noexcept nogil:
    cdef PointerState *state = <PointerState *>transport
    cdef PointerBucket *bucket = <PointerBucket *>job.context
    bucket.number = state.announced
    state.announced += 1
    bucket.passed = False
    bucket.begun = 0
    bucket.ended = 0
    bucket.tail_state = TAIL_WAITS
    bucket.failure = state.functions.event_record(bucket.filled, job.stream)


cdef Advance fail_in_mpi(PointerState *state, int code) noexcept nogil:
    state.transport.code = code
    return ADVANCE_FAILED


cdef Advance fail_on_gpu(PointerState *state, int code, const char *call) noexcept nogil:
    state.device_code = code
    state.device_call = call
    state.transport.call = call
    state.transport.code = mpi.error_other
    return ADVANCE_FAILED


cdef Advance may_start(PointerState *state, Job *job) noexcept nogil:
    cdef PointerBucket *bucket = <PointerBucket *>job.context
    cdef int passed
    if bucket.number != state.starting:
        # A later job waits for its turn; an earlier one was given to MPI completely.
        return ADVANCE_BLOCKED if bucket.number > state.starting else ADVANCE_PENDING
    if not bucket.passed:
        if bucket.failure != GPU_READY:
            return fail_on_gpu(state, bucket.failure, "EventRecord")
        passed = event_passed(state.functions, bucket.filled)
        if passed < 0:
            return fail_on_gpu(state, -passed, "EventQuery")
        if not passed:
            return ADVANCE_BLOCKED
        bucket.passed = True
    return ADVANCE_SOME


cdef int begin_tail(PointerState *state, Job *job, PointerBucket *bucket) noexcept nogil:
    cdef char *tail = bucket.tail
    cdef size_t count = bucket.tail_bytes // element_bytes(job.element)
    # Narrow elements are widened and wide ones copied.
    selected_kernels().sum_to(job.element, bucket.tail_sent, &tail, 1, 0, count)
    state.transport.call = "MPI_Iallreduce"
    return mpi.iallreduce(
        bucket.tail_sent, bucket.tail_sum, <int>count,
        mpi.float64 if job.element == ELEMENT_FLOAT64 else mpi.float32,
        mpi.sum, state.comm, &bucket.tail_request,
    )


cdef Advance finish(PointerState *state, Job *job, Advance status) noexcept nogil:
    cdef PointerBucket *bucket = <PointerBucket *>job.context
    cdef size_t gradients = gradients_of(job)
    cdef size_t count = bucket.tail_bytes // element_bytes(job.element)
    cdef int code, finished = 0
    if bucket.tail_state == TAIL_WAITS:
        if bucket.begun < gradients:
            # Nothing of a later job may be given to MPI before the rest of this one.
            return status
        bucket.tail_state = TAIL_DONE
        if count:
            code = begin_tail(state, job, bucket)
            if code != MPI_SUCCESS:
                return fail_in_mpi(state, code)
            bucket.tail_state = TAIL_TRAVELS
        state.starting += 1
        status = ADVANCE_SOME
    if bucket.tail_state == TAIL_TRAVELS:
        state.transport.call = "MPI_Test"
        code = mpi.test(&bucket.tail_request, &finished, NULL)
        if code != MPI_SUCCESS:
            return fail_in_mpi(state, code)
        if finished:
            selected_kernels().spread_mean(
                job.element, &bucket.tail, 1, 0, count, bucket.tail_sum, job.divisor
            )
            bucket.tail_state = TAIL_DONE
            status = ADVANCE_SOME
    if bucket.tail_state == TAIL_DONE and bucket.ended == gradients:
        return ADVANCE_DONE
    return status


cdef int check_settings(size_t chunk_bytes, size_t window) except -1:
    if chunk_bytes == 0 or chunk_bytes % 64 or chunk_bytes > 1 << 30:
        raise ValueError(
            f"chunk_bytes must be a multiple of 64 of at most 2^30, not {chunk_bytes}"
        )
    if not 1 <= window <= MAX_SLOTS:
        raise ValueError(f"window must be 1 to {MAX_SLOTS}, not {window}")
    return 0


cdef class PointerMemory(GpuMemory):
    """Memory of a bucket on a GPU, whose address MPI gets.

    Not collective. What MPI has done is in memory for all streams: `wait_on` has nothing to do.

    Args:
        runtime: of the device.
        device: a `torch.device`.
        size: of the whole bucket in bytes.
        tail: how many of these, at the end, the host writes and keeps in its memory.

    Raises:
        GpuError: there is not enough memory, or the runtime refuses.
    """

    def __init__(self, Runtime runtime not None, device, size_t size, size_t tail):
        cdef Event filled
        if tail > size:
            raise ValueError(f"a tail of {tail} bytes does not fit into {size}")
        filled = Event(runtime, runtime.index_of(device))
        memset(&self.bucket, 0, sizeof(self.bucket))
        # 16-bit flags travel as float32.
        self.travelling = [torch.zeros(2 * tail, dtype=torch.uint8, device="cpu") for _ in range(2)]
        sent, received = self.travelling
        self.bucket.filled = filled.handle
        self.bucket.tail_bytes = tail
        self.bucket.tail_sent = <char *><size_t>sent.data_ptr()
        self.bucket.tail_sum = <char *><size_t>received.data_ptr()
        self.bucket.tail_request = mpi.request_null
        GpuMemory.__init__(
            self, zeros(runtime, device, size - tail), filled, <size_t>&self.bucket,
            torch.zeros(tail, dtype=torch.uint8, device="cpu"), True,
        )
        self.bucket.tail = self.host_tail


cdef list allocate(Runtime runtime, object device, sizes, tails):
    sizes = list(sizes)
    tails = [0] * len(sizes) if tails is None else tails
    return [
        PointerMemory(runtime, device, size, tail) for size, tail in zip(sizes, tails, strict=True)
    ]


cdef int raise_failure_of(PointerState *state, Runtime runtime) except -1:
    if state.device_code == GPU_READY:
        return 0
    call = state.device_call.decode()
    if call.startswith(("cublas", "rocblas")):
        raise GpuError(
            f"{call} failed on device {state.device} with status {state.device_code}",
            state.device_code, call, -1, state.device,
        )
    raise gpu_error(runtime, state.device_code, call, state.device)
