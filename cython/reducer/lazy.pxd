from mpiddp.reducer.bucket cimport Bucket
from mpiddp.reducer.state cimport ReducerState


cdef int release(Bucket bucket) except -1
cdef int release_unused(ReducerState reducer) except -1
