from mpiddp.gpu.runtime cimport Runtime


cdef class Allocation:
    cdef readonly Runtime runtime
    cdef readonly int device
    cdef readonly size_t size       # in bytes
    cdef void *memory
