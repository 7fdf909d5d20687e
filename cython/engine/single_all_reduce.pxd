from mpiddp.engine.engine cimport Channel
from mpiddp.engine.interface cimport Job
from mpiddp.engine.memory cimport BucketMemory


cdef class SingleAllReduce:
    cdef readonly Channel channel
    cdef readonly BucketMemory memory
    cdef Job job
