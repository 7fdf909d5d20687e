from mpiddp.engine cimport Work
from mpiddp.memory cimport BucketMemory


cdef enum:
    # Positions of the flags that stand for the whole bucket, from the end.
    INCOMPLETE = -2
    MISSED = -1


cdef class Bucket:
    cdef readonly Py_ssize_t index
    cdef readonly tuple parameter_indices
    cdef readonly list views
    cdef readonly object buffer
    cdef readonly BucketMemory memory
    cdef readonly object dtype
    cdef readonly bint sparse
    cdef Work work
    cdef Py_ssize_t pending         # parameters that are not ready yet
    cdef Py_ssize_t bytes_per_element
    cdef char *flags                # the tail, see Note [Flags behind the gradients]

    cdef char *view_address(self, Py_ssize_t position) except? NULL
    cdef char *flag_address(self, Py_ssize_t position) noexcept nogil
    cdef void set_flag(self, Py_ssize_t position, bint value) noexcept nogil
    cdef bint flag(self, Py_ssize_t position) noexcept nogil
