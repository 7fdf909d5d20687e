"""Leave the end of a reduction to the caller instead of to backward, on behalf of a reducer.

Note [Deferred end]
~~~~~~~~~~~~~~~~~~~
An optimizer that averages gradients itself, as Horovod's does, asks for the means in its step, not
at the end of backward: several backward passes may come before, each for some of the parameters,
or several for each parameter. Buckets are launched while backward runs all the same, strictly in
order of index. What no backward has filled by the step is filled then (`take_rest`, then the
reducer's own `end_of_backward`): so every rank launches every bucket, whichever parameters it used.
A gradient that is there without any hook, because the program has set it, is averaged like others.
`ParameterState.expected` counts the backward passes that a step has, as for a static graph.
"""

from mpiddp.reducer.bucket cimport Bucket
from mpiddp.reducer.reducer cimport Reducer
from mpiddp.reducer.state cimport ReducerState
from mpiddp.torch_internals.tensors cimport has_gradient


def set_passes(ReducerState reducer not None, Py_ssize_t passes):
    """Reduce each gradient in the backward pass of this number, counted from the last reduction.

    Not collective, but the same on all ranks, and while no gradient is under way.

    Args:
        passes: at least 1.
    """
    cdef Py_ssize_t index
    for index in range(len(reducer.parameters)):
        reducer.states[index].expected = passes
    reducer._reset_counting()


def end_of_backward(Reducer reducer not None):
    """Take what hooks after the reducer's own have changed, and do not wait. Not collective.

    Instead of the reducer's method of this name, as autograd's final callback.
    """
    reducer.callback_queued = False
    if reducer.late:
        reducer.take_late()
        reducer.launch_full_buckets()


def take_rest(Reducer reducer not None):
    """Take the gradients that are there but not ready, before the end. Not collective."""
    cdef Py_ssize_t index
    reducer.callback_queued = True      # there is no backward that could call back
    for index in range(len(reducer.parameters)):
        if reducer.states[index].left == 0:
            continue
        parameter = reducer.parameters[index]
        if has_gradient(parameter):
            reducer.states[index].left = 1
            reducer.parameter_ready(index, parameter, True)


def taken(ReducerState reducer not None):
    """Return the first parameter of each bucket whose gradient was taken, as a list of indices.

    Not collective. Sparse gradients are left out: these are read at the end only.
    """
    cdef Bucket bucket
    cdef Py_ssize_t index
    found = []
    for bucket in reducer.buckets:
        if bucket.sparse:
            continue
        for index in bucket.parameter_indices:
            if reducer.states[index].left == 0:
                found.append(index)
                break
    return found
