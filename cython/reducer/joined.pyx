"""Take part without inputs in the backward of the other ranks: with zeros, bucket by bucket.

A rank that has joined (`torch.distributed.algorithms.join`) must reduce what the others
reduce, in the same order, or they would wait for it. It has no gradient for any parameter
and has missed none: see Note [Flags behind the gradients]. Its own gradients stay as they
are, even where they are views of the buckets.

`begin` does not wait: before this backward the others may call the forward of another module,
which needs this rank too. Until `finish`, the engine makes progress while this rank waits in
the process group.
"""

from mpiddp.engine.progress cimport job_is_done
from mpiddp.reducer.bucket cimport COUNT, INCOMPLETE, JOINED, MISSED, Bucket, overlaps
from mpiddp.reducer.state cimport ReducerState
from mpiddp.reducer.step_times cimport WINDOW
from mpiddp.system.posix cimport load
from mpiddp.reducer import sparse


def begin(ReducerState reducer not None, double divisor):
    """Submit zeros for one backward of the ranks that have not joined.

    Collective with that backward.

    Args:
        reducer: of the module that the other ranks train.
        divisor: what the sums over ranks are divided by, the same on all ranks.

    Raises:
        RuntimeError: the transport has failed, or sparse gradients could not be reduced.
    """
    cdef Bucket bucket
    if reducer.reductions % WINDOW == 0:
        reducer._before_reduction()
    # This rank's last forward may have had no backward.
    reducer.expect(False)
    reducer._reset_counting()
    reducer.missing = []
    reducer.incomplete = False
    reducer.set_divisor(divisor)
    reducer.shadowing = True
    for bucket in reducer.buckets:
        if bucket.skipped:
            continue
        if not bucket.sparse:
            _submit_zeros(reducer, bucket)
        if reducer.python_hook is not None:
            _launch(reducer, bucket)
    if reducer.has_sparse:
        # These go through the process group: their turn is now.
        _wait(reducer)
        reducer.incomplete |= sparse.reduce(reducer, joined=True)


cdef _submit_zeros(ReducerState reducer, Bucket bucket):
    if reducer.gradient_as_bucket_view and (bucket.gradient_buffer is None or bucket.flags_only):
        _move_gradients_out(reducer, bucket)
    reducer.take_stage(bucket, True)
    bucket.fill_with_zeros()
    bucket.set_flag(INCOMPLETE, True)
    bucket.set_flag(JOINED, True)
    reducer.record(bucket)
    bucket.submit()


cdef _move_gradients_out(ReducerState reducer, Bucket bucket):
    """Give gradients memory of their own where that of the bucket is about to be overwritten.

    At once, because an optimizer in the same Join steps before this backward is over. The next
    backward of this rank makes them views again.
    """
    memory = bucket.gradients
    for index in bucket.parameter_indices:
        parameter = reducer.parameters[index]
        if parameter.grad is not None and overlaps(parameter.grad, memory):
            parameter.grad = parameter.grad.clone()


cdef _launch(ReducerState reducer, Bucket bucket):
    """Call the communication hook as the other ranks do, with zeros."""
    if not bucket.sparse:
        reducer.python_hook.launch(reducer, bucket)
        return
    parameter = reducer.parameters[bucket.parameter_indices[0]]
    gradient, parameter.grad = parameter.grad, None
    try:
        reducer.python_hook.launch(reducer, bucket)
    finally:
        parameter.grad = gradient


cdef _wait(ReducerState reducer):
    cdef Bucket bucket
    for bucket in reducer.buckets:
        if not bucket.sparse and not bucket.skipped:
            reducer.wait_for(bucket)
            reducer.incomplete |= bucket.flag(MISSED)


def finish(ReducerState reducer not None):
    """Wait for the backward that `begin` has begun; do nothing if there is none.

    Collective.

    Raises:
        RuntimeError: an all-reduce failed, or some rank did not take part in it within the
            group's timeout.
    """
    cdef Bucket bucket
    cdef Py_ssize_t index
    if not reducer.shadowing:
        return
    _wait(reducer)
    reducer.forget_writes()
    if reducer.python_hook is not None:
        for bucket in reducer.buckets:
            if not bucket.sparse and not bucket.skipped:
                reducer.python_hook.finish(reducer, bucket)
                reducer._find_views(bucket)
    reducer.shadowing = False
    # Ranks have yet to learn what this one used: its own gradients were not reduced.
    used = [reducer.states[index].used for index in range(len(reducer.parameters))]
    reducer._after_reduction()
    for index in range(len(used)):
        reducer.states[index].used = used[index]


def is_done(ReducerState reducer not None):
    """Return whether `finish` would not wait. Makes progress. Not collective."""
    cdef Bucket bucket
    for bucket in reducer.buckets:
        if bucket.sparse or bucket.skipped or job_is_done(&bucket.job):
            continue
        if load(&bucket.channel.state.failure):
            return True             # `finish` raises it
        bucket.channel.engine.step()
        return False
    return True


def all_joined(ReducerState reducer not None):
    """Return whether every rank gave zeros in the reduction that `finish` has ended.

    Not collective. Ranks that have not joined count their forward passes in a flag of a bucket, so
    `reducer.passes` must not be None.

    Raises:
        RuntimeError: all gradients are sparse: there is no such bucket.
    """
    cdef Bucket bucket
    if reducer.counting < 0:
        raise RuntimeError(
            f"rank {reducer.process_group.me}: a rank cannot join while others reduce sparse "
            f"gradients only"
        )
    bucket = <Bucket>reducer.buckets[reducer.counting]
    return not (bucket.flag(COUNT) or bucket.flag(COUNT + 1))
