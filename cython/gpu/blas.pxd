from mpiddp.gpu.runtime cimport Runtime
from mpiddp.system.kernels cimport ElementType


cdef struct GpuSums:
    # Adds vectors on a stream of its own, by the BLAS library that torch has loaded.
    void *handle
    void *stream
    int runs_rocm           # rocBLAS, not cuBLAS: their numbers for types differ
    int (*create)(void **handle) noexcept nogil
    int (*destroy)(void *handle) noexcept nogil
    int (*set_stream)(void *handle, void *stream) noexcept nogil
    int (*axpy)(
        void *handle, int count, const void *factor, int factor_type, const void *source,
        int source_type, int source_step, void *to, int to_type, int to_step, int computed_in,
    ) noexcept nogil


cdef class Adder:
    cdef GpuSums sums
    cdef readonly Runtime runtime
    cdef readonly int device
    cdef readonly object stream
    cdef readonly str library
    cdef void *loaded

    cdef void *find(self, str name) except NULL


# Add `count` elements to others, in order of the stream; return an error code, 0 for success.
cdef int add(
    GpuSums *sums, ElementType element, void *to, const void *source, size_t count
) noexcept nogil
cdef const char *axpy_name(GpuSums *sums) noexcept nogil
