from mpiddp.engine cimport Channel, Work
from mpiddp.memory cimport BucketMemory


cdef class Reduction:
    cdef readonly Channel channel
    cdef readonly BucketMemory memory
    cdef Work work
