from mpiddp.engine.engine cimport Channel
from mpiddp.engine.interface cimport Job, Transport
from mpiddp.engine.memory cimport GpuMemory
from mpiddp.gpu.runtime cimport GpuFunctions, Runtime, Stream


cdef enum:
    # Every piece starts on a cache line, whatever its elements are.
    ALIGNMENT = 64


cdef struct Piece:
    # A part of a bucket that travels by itself.
    Job job               # its all-reduce on the inner channel
    void *copied            # event: its gradients are in host memory
    size_t offset           # in the bucket, in bytes
    size_t gpu_bytes     # of gradients; the tail follows in the last piece
    size_t bytes            # with the tail


cdef struct StagedBucket:
    char *data              # on the device
    Piece *pieces
    size_t count
    void *filled            # event: the gradients are in the bucket
    void *returned          # event: the means are
    size_t gpu_bytes     # of gradients
    size_t number           # how many jobs were announced before, on this transport
    size_t queued           # pieces that the inner channel has got
    size_t sent_back        # pieces whose copy back has been issued
    int busy                # announced and not done
    int code                # of a call that failed in `announce`
    const char *call


cdef class StagedBuckets:
    cdef StagedBucket *buckets
    cdef Piece *pieces
    cdef size_t count
    cdef Runtime runtime
    cdef int device
    cdef list tensors                   # on the device
    cdef list hosts                     # `BucketMemory` of each piece
    cdef list registered                # addresses
    cdef list events
    cdef object __weakref__

    cdef attach(self, list hosts, list tensors)
    cdef register(self)
    cdef int busy(self) noexcept
    cdef void release(self)


cdef class StagedMemory(GpuMemory):
    pass
