cdef class BucketMemory:
    cdef readonly object buffer     # 1-D uint8 tensor, zeros
    cdef readonly object owner      # what `context` points into
    cdef void *context              # what the transport knows of this memory, or NULL
    cdef int *given_out             # set where a tensor of the user comes to lie there, or NULL


cdef class CommonMemory(BucketMemory):
    # Of a bucket whose mean lies once for all ranks of a node: `buffer` is where this rank sees it,
    # and what it writes there stays its own. It puts what is reduced into `stage`.
    cdef readonly object stage          # 1-D uint8 tensor; all buckets of a set lie there by turns
    cdef readonly object means          # 1-D uint8 tensor: the mean as all ranks see it


cdef class GpuMemory(BucketMemory):
    # Of a bucket on a GPU. `buffer` is there and holds the gradients only. The tail behind them is
    # in host memory: a rank writes it before it submits the job, and reads it when the job is done.
    cdef char *host_tail
    cdef readonly object tail           # 1-D uint8 tensor on the CPU: what `host_tail` points to
    # Whether the gradients must be divided before a job is submitted; the tail never is.
    cdef readonly bint divides_before

    # Make later work on the stream wait for the means. Called when the job is done, from any
    # thread; the host does not wait.
    cpdef int wait_on(self, size_t stream) except -1
