from mpiddp.engine.engine cimport Channel
from mpiddp.engine.interface cimport Job
from mpiddp.engine.memory cimport BucketMemory, CommonMemory
from mpiddp.system.kernels cimport ElementType


cdef enum:
    # Positions of the flags that stand for the whole bucket, from the end.
    COUNT = -19             # the first of the two flags of each bit
    JOINED = -3
    INCOMPLETE = -2
    MISSED = -1
    BUCKET_FLAGS = 19
    COUNT_BITS = 8


cdef bint same_layout(tensor, view) except -1
cdef bint is_at(tensor, view) except -1
cdef bint overlaps(tensor, view) except -1


cdef class Bucket:
    cdef readonly Py_ssize_t index
    cdef readonly tuple parameter_indices
    cdef readonly list views
    cdef readonly list places       # where gradients are laid to be reduced: `views`, or in a stage
    cdef readonly CommonMemory common   # the memory, if the mean lies there once for all ranks
    cdef list tensors               # what gradients are set to, made by `tensor_at`
    cdef readonly object buffer
    cdef readonly BucketMemory memory
    cdef readonly Channel channel       # the channel that it is submitted to
    cdef readonly bint on_gpu        # it is a GpuBucket
    cdef readonly object dtype          # of the gradients
    cdef readonly object gradient_buffer        # the gradients, where they are not in the buffer
    cdef readonly bint flags_only       # the engine moves no gradients
    cdef readonly bint converts         # the views have the dtype that travels, not the gradients'
    cdef readonly bint sparse
    cdef public bint skipped            # never launched: no rank uses its parameters
    cdef Job job
    cdef Py_ssize_t pending         # parameters that are not ready yet
    # While a trace is on, when the first gradient came, and the last so far; else 0.
    cdef double filled
    cdef double full
    cdef Py_ssize_t bytes_per_element   # as they travel
    cdef ElementType element            # of the gradients
    cdef char *flags                # see Note [Flags behind the gradients]
    cdef object own_flags           # their memory, where the tail is not the bucket's own
    cdef Py_ssize_t flag_count
    cdef Py_ssize_t gradient_elements
    cdef char *first_view           # where the gradients are, and
    cdef char *last_view_end        # where they end

    cdef void note_gradient(self, double moment) noexcept
    cdef object tensor_at(self, Py_ssize_t position)
    cdef int narrow(self, char *view, const char *gradient, size_t bytes_) except -1
    cdef int widen(self, char *gradient, const char *view, size_t bytes_) except -1
    cdef int fill_from_gradient_buffer(self) except -1
    cdef int read_into_gradient_buffer(self) except -1
    cdef int fill_with_zeros(self) except -1
    cdef int submit(self) except -1
    cdef int read_flags(self) except -1
    cdef char *view_address(self, Py_ssize_t position) except? NULL
    cdef char *place_address(self, Py_ssize_t position) except? NULL
    cdef char *flag_address(self, Py_ssize_t position) noexcept nogil
    cdef void set_flag(self, Py_ssize_t position, bint value) noexcept nogil
    cdef bint flag(self, Py_ssize_t position) noexcept nogil
    cdef void set_count(self, Py_ssize_t count) noexcept nogil
    cdef bint counts_differ(self) noexcept nogil
