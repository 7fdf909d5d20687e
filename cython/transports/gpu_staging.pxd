from mpiddp.engine.engine cimport Channel
from mpiddp.engine.interface cimport ChannelState, EngineState, Job, Transport
from mpiddp.engine.memory cimport GpuMemory
from mpiddp.gpu.runtime cimport GpuFunctions, Runtime, Stream


cdef struct StagingState:
    Transport transport     # first: the engine's pointer is a pointer to this
    GpuFunctions *functions
    EngineState *engine
    ChannelState *inner
    void *out               # streams: to the host
    void *back              # and to the device
    int device
    int inner_failed
    size_t announced        # jobs
    size_t queued           # jobs, all of whose pieces the inner channel has got


cdef class StagingTransport:
    cdef StagingState state
    cdef readonly Channel inner
    cdef readonly Runtime runtime
    cdef readonly object device         # a torch.device
    cdef readonly size_t piece_bytes
    cdef Stream out
    cdef Stream back
    cdef object allocated               # a weak set of StagedBuckets
