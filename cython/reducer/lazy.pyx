"""Give the memory of buckets back while nobody needs it, for `lazy_bucket_allocation`.

Note [Lazy buckets]
~~~~~~~~~~~~~~~~~~~
torch's class allocates a bucket when its first gradient is ready, and frees it after backward. The
memory that ranks share is mapped once by all of them, so here it is the pages that come and go: the
kernel gives them again, full of zeros, when gradients are copied in. When a rank has the mean of a
bucket, the others have read what they need of it, and nobody writes there until this rank submits
it again. The flags behind the gradients stay.
Gradients that are views lie in the bucket: it is given back at the next forward, if all of them
were set to None and no tensor of the user lies there. Buckets on GPUs stay.
"""

from cpython.object cimport PyObject

import torch

from mpiddp.reducer.bucket cimport Bucket
from mpiddp.reducer.state cimport ReducerState
from mpiddp.system.pages cimport give_back

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject *)

cdef enum:
    # Of a tensor that only the bucket knows: its tensor, and Python's object while one looks.
    STORAGE_USERS = 2

_storage_users = torch._C._storage_Use_Count


cdef int release(Bucket bucket) except -1:
    """Give back the memory of gradients that have been copied out."""
    if bucket.common is not None:
        return 0            # all ranks see it
    if not bucket.on_gpu and not bucket.flags_only and bucket.gradient_buffer is None:
        give_back(bucket.job.data, bucket.gradient_elements * bucket.bytes_per_element)
    return 0


cdef int release_unused(ReducerState reducer) except -1:
    """Give back the buckets in which no gradient lies, between two reductions."""
    cdef Bucket bucket
    for bucket in reducer.buckets:
        if bucket.sparse:
            continue
        if not reducer.gradient_as_bucket_view or _is_unused(reducer, bucket):
            release(bucket)
    return 0


cdef bint _is_unused(ReducerState reducer, Bucket bucket) except -1:
    """Whether no gradient of the user lies in the memory of a bucket, nor any part of one."""
    cdef Py_ssize_t index
    cdef PyObject *tensor
    for index in bucket.parameter_indices:
        if reducer.parameters[index].grad is not None:
            return False
    for index in range(len(bucket.tensors)):
        tensor = <PyObject *>bucket.tensors[index]
        if tensor == <PyObject *>None:
            continue
        if Py_REFCNT(tensor) > 1:
            return False
        storage = (<object>tensor).untyped_storage()
        if _storage_users(storage._cdata) > STORAGE_USERS:
            return False
    return True
