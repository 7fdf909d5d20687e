from mpiddp.engine.memory cimport GpuMemory
from mpiddp.gpu.runtime cimport Event, Runtime
from mpiddp.reducer.bucket cimport Bucket


cdef class GpuBucket(Bucket):
    cdef readonly object device         # a torch.device
    cdef readonly Runtime runtime
    cdef GpuMemory gpu_memory
    cdef int device_index
    cdef bint gradients_are_views
    cdef list parameters
    cdef list gathered                  # gradients that are not in the bucket yet
    cdef list positions                 # and where they belong
    cdef list cleared                   # positions for which this rank has no gradient
    cdef size_t gathered_bytes
    cdef size_t limit                   # copied as soon as they are this many
    cdef set streams                    # on which the bucket's gradients were made
    cdef Event mark

    cdef int gather(self, Py_ssize_t position, object gradient) except -1
    cdef int clear(self, Py_ssize_t position) except -1
    cdef int receive(self) except -1
    cdef int write_out(self, list parameters) except -1
    cdef int forget(self) except -1
    cdef int note_stream(self) except -1
    cdef int flush(self, size_t stream) except -1
    cdef int copy_gathered(self) except -1
    cdef int order(self, size_t before, size_t after) except -1
