cdef class BucketMemory:
    cdef readonly object buffer     # 1-D uint8 tensor, zeros
    cdef readonly object owner      # what `context` points into
    cdef void *context              # what the transport knows of this memory, or NULL
