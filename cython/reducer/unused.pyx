"""Handle parameters that got no gradient in a backward, on behalf of a reducer.

Note [Unused parameters]
~~~~~~~~~~~~~~~~~~~~~~~~
A rank that has no gradient for a parameter contributes what `.grad` holds from
earlier accumulation, or zeros, and still launches every bucket: no rank is left
waiting, and all get the same mean. Without `find_unused_parameters` the missing
gradient is reported all the same, by every rank together at the next forward
(the flag behind the gradients tells them all, see bucket.pyx).

Note [Skipped buckets]
~~~~~~~~~~~~~~~~~~~~~~
With `skip_unused`, buckets that no rank used in the first reduction are never launched again: all
ranks know them from the flags. Using one later is an error, where torch's class would hang.
"""

from mpiddp.reducer.bucket cimport MISSED, Bucket
from mpiddp.reducer.bucket_views cimport write_gradient
from mpiddp.reducer.state cimport ParameterState, ReducerState


def contribute(ReducerState reducer not None):
    """Fill in for the parameters whose hook did not run. Not collective."""
    cdef ParameterState *state
    cdef Bucket bucket
    cdef Py_ssize_t index
    reducer.missing = []
    for index in range(len(reducer.parameters)):
        state = &reducer.states[index]
        if state.left == 0:
            continue
        state.left = 0
        reducer.missing.append(index)
        if not reducer.has_rebuilt_buckets:
            reducer.arrival_order.append(index)
        parameter = reducer.parameters[index]
        reducer.mark_ready(index, parameter, parameter.grad, False)
        bucket = <Bucket>reducer.buckets[state.bucket]
        if not bucket.sparse:
            bucket.set_flag(MISSED, True)


def write_means(ReducerState reducer not None, Bucket bucket not None):
    """Write the means of a bucket for which some rank missed a gradient. Not collective."""
    cdef Py_ssize_t index, position
    for position, index in enumerate(bucket.parameter_indices):
        parameter = reducer.parameters[index]
        if not bucket.flag(position):
            if index in reducer.set_aside:
                bucket.views[position].copy_(reducer.set_aside[index])
        elif reducer.gradient_as_bucket_view:
            reducer.check_view(index)
        else:
            write_gradient(&reducer.states[index].view, bucket, position, parameter)
