from mpiddp.device_runtime cimport DeviceRuntime, Runtime, Stream
from mpiddp.engine cimport Channel, ChannelState, EngineState, Transport, Work
from mpiddp.memory cimport DeviceMemory


cdef struct Piece:
    # A part of a bucket that travels by itself.
    Work work               # its all-reduce on the inner channel
    void *copied            # event: its gradients are in host memory
    size_t offset           # in the bucket, in bytes
    size_t device_bytes     # of gradients; the tail follows in the last piece
    size_t bytes            # with the tail


cdef struct StagedBucket:
    char *data              # on the device
    Piece *pieces
    size_t count
    void *filled            # event: the gradients are in the bucket
    void *returned          # event: the means are
    size_t device_bytes     # of gradients
    size_t number           # how many works were announced before, on this transport
    size_t queued           # pieces that the inner channel has got
    size_t sent_back        # pieces whose copy back has been issued
    int busy                # announced and not done
    int code                # of a call that failed in `announce`
    const char *call


cdef struct StagingState:
    Transport transport     # first: the engine's pointer is a pointer to this
    DeviceRuntime *functions
    EngineState *engine
    ChannelState *inner
    void *out               # streams: to the host
    void *back              # and to the device
    int device
    int inner_failed
    size_t announced        # works
    size_t queued           # works, all of whose pieces the inner channel has got


cdef class StagingTransport:
    cdef StagingState state
    cdef readonly Channel inner
    cdef readonly Runtime runtime
    cdef readonly object device         # a torch.device
    cdef readonly size_t piece_bytes
    cdef Stream out
    cdef Stream back
    cdef object allocated               # a set of StagedBuckets that lets go of them


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


cdef class StagedMemory(DeviceMemory):
    pass
