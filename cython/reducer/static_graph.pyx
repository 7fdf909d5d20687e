"""What `static_graph=True` learns from the first backward, on behalf of a reducer.

Note [Static graph]
~~~~~~~~~~~~~~~~~~~
In every backward the hook of a parameter runs `expected` times, and the last time makes the
parameter ready: `left` counts down. `expected` is 1, unless the graph is static: then the
first backward counts (both numbers are negative, and no bucket is launched before its end),
and later ones wait for as many runs. A parameter that was never reached is not waited for:
it is filled in for when the first hook runs, so that its bucket is not held up.
The numbers are this rank's own; other ranks may use other parameters. If a hook runs more
often than in the first backward, that is an error at once; if less often, the parameter
counts as missed, and all ranks report it at the next forward.
"""

from mpiddp.reducer.state cimport ParameterState, ReducerState


def begin(ReducerState reducer not None):
    """Let `reducer` count in its next backward.

    Not collective, but the same on all ranks.

    Raises:
        RuntimeError: there was a forward pass already.
    """
    cdef Py_ssize_t index
    if reducer.iterations:
        raise RuntimeError(
            "set_static_graph() should be called before training loop starts and after "
            "DistributedDataParallel is constructed."
        )
    reducer.static_graph = reducer.learning = reducer.compare_gradients = True
    for index in range(len(reducer.parameters)):
        reducer.states[index].expected = -1
    reducer._reset_counting()


def learn(ReducerState reducer not None):
    """Take all gradients at the end of the first backward, and what its hooks have counted.

    Not collective.
    """
    cdef ParameterState *state
    cdef Py_ssize_t index
    cdef bint brought
    reducer.compare_gradients = False
    for index in range(len(reducer.parameters)):
        state = &reducer.states[index]
        state.expected = -1 - state.left
        state.left = 0
        gradient = reducer.parameters[index].grad
        brought = state.expected > 0 and gradient is not None
        if brought and reducer._is_old(index, gradient):
            # Its hook runs, but brings nothing: that must be checked in every backward.
            brought = False
            reducer.compare_gradients = True
        if state.expected == 0:
            reducer.never_used.append(index)
        reducer.mark_ready(index, reducer.parameters[index], gradient, brought)
    if not reducer.has_rebuilt_buckets:
        # Where a hook ran several times, the last one counts.
        order = reversed(dict.fromkeys(reversed(reducer.arrival_order)))
        reducer.arrival_order = [*order, *reducer.never_used]
    reducer.learning = False
