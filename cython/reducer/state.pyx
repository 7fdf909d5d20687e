"""The data of a reducer: parameters, buckets, readiness; and how one gradient gets in and out.

reducer.pyx decides when. static_graph.pyx, unused.pyx and joined.pyx, which fill in for missing
gradients, build on this.
"""

from libc.stdlib cimport calloc, free
from libc.string cimport memset

import weakref

import torch

from mpiddp.engine.engine cimport WAIT_TIMED_OUT, WaitStatus
from mpiddp.engine.interface cimport note_wait
from mpiddp.flight_recorder.ring cimport begin_bucket, note_reduction, tracing
from mpiddp.reducer.bucket cimport INCOMPLETE, JOINED, MISSED, Bucket
from mpiddp.engine.progress cimport job_is_done
from mpiddp.reducer.bucket_views cimport (
    copy_fast, copy_to_view, find_view, is_in_place, write_gradient,
)
from mpiddp.reducer.gpu_bucket cimport GpuBucket
from mpiddp.reducer.step_times cimport WINDOW, StepTimes
from mpiddp.system.posix cimport now
from mpiddp.torch_internals.tensors cimport gradient_address, has_gradient
from mpiddp.flight_recorder.ring import fail_source
from mpiddp.reducer.bucket_progress import explain_missing
from mpiddp.reducer.errors import raise_no_view, raise_other_kind, raise_timed_out

_strided = torch.strided


cdef enum:
    MOST_BUCKETS = 1 << 24      # as BUCKETS in flight_recorder/sources.py


# A backward waits for ranks that are behind, so that its gradients need no more memory. Where
# several modules are in a backward these may not be behind, but wait for this rank in another one:
# after so many seconds it goes on.
cdef double PATIENCE = 2.0
_expecting = weakref.WeakSet()

# Reducers that have gone on like that. What they hold back others may wait for, while this rank
# waits for these in another module: so it launches that between two looks.
_behind = weakref.WeakSet()
cdef double TURN = 0.01


cdef int _launch_behind() except -1:
    for reducer in list(_behind):
        reducer.launch_held_back()
    return 0


cdef class ReducerState:
    """The parameters, buckets and counts of one reducer, and what is done with one parameter.

    Not collective.

    Args:
        parameters: the parameters that require a gradient, without duplicates.
        process_group: an `mpiddp.process_group.group.ProcessGroup`.
        channels: the engine's channel for the buckets on each device, by `torch.device`.
        assign_buckets: called with None, later with the order in which gradients
            arrived (a list of parameter indices), on all ranks; returns the parameter
            indices of each bucket in launch order, the same on all ranks.
        describe_parameter: called with a parameter index, returns its name for errors.
        report_missing: called on all ranks after a backward in which some rank missed a
            gradient, with this rank's pairs (parameter index, bucket index) and whether the
            graph is static; must raise.
        expect_sparse: for each parameter, whether its gradient is sparse.
        find_unused_parameters: as in torch's class.
        gradient_as_bucket_view: as in torch's class.
        skip_unused: `skip_all_reduce_unused_params` of torch's class.
        lazy_buckets: `lazy_bucket_allocation` of torch's class.
        mixed_precision: the dtype of the gradients and that in which a hook in Python gets them,
            if these are not the parameters'; not together with views.
        domain: a number; ranks of a node with the same one share the means, where the transport
            can and no hook moves them. None: they do not. Only with views.
    """

    def __init__(self, parameters, process_group, dict channels not None, assign_buckets,
                 describe_parameter, report_missing, *, expect_sparse=None,
                 bint find_unused_parameters=False, bint gradient_as_bucket_view=False,
                 bint skip_unused=False, bint lazy_buckets=False, mixed_precision=None,
                 domain=None):
        cdef Py_ssize_t index, count = len(parameters)
        self.parameters = list(parameters)
        self.process_group = process_group
        self.channels = channels
        self.channel = channels[parameters[0].device]
        self.mixed_precision = mixed_precision
        self.assign_buckets = assign_buckets
        self.describe_parameter = describe_parameter
        self.report_missing = report_missing
        self.world_size = self.divisor = process_group.size()
        self.expect_sparse = list(expect_sparse) if expect_sparse else [False] * count
        self.has_sparse = any(self.expect_sparse)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.skip_unused = skip_unused
        self.lazy_buckets = lazy_buckets
        self.domain = domain
        self.compare_gradients = find_unused_parameters
        self.waiting_for = -1
        self.record_source = -1
        self.times = StepTimes()
        self.never_used = []
        self.unused_everywhere = set()
        self.arrival_order = []
        self.late = []
        self.set_aside = {}
        self.grads_before = []
        self.missing = []
        self.unused = []
        self.post_backward_futures = []
        self.hooks = []
        self.handles = []
        self.sharing = []
        self.states = <ParameterState *>calloc(max(count, 1), sizeof(ParameterState))
        if self.states == NULL:
            raise MemoryError
        for index in range(count):
            self.states[index].expected = 1

    def __dealloc__(self):
        free(self.states)

    def _find_views(self, Bucket bucket):
        """Note where in `bucket` each gradient has its place."""
        cdef ParameterState *state
        cdef Py_ssize_t index, position, size
        if not bucket.sparse:
            bucket.first_view = bucket.view_address(0)
            size = sum([view.nbytes for view in bucket.views])
            bucket.last_view_end = bucket.first_view + size
        for position, index in enumerate(bucket.parameter_indices):
            state = &self.states[index]
            state.bucket = bucket.index
            state.position = position
            if not bucket.sparse:
                find_view(&state.view, bucket, position)

    cdef void record(self, Bucket bucket) noexcept:
        """Note in the flight recorder that a bucket is about to be handed to the engine."""
        begin_bucket(
            self.record_source, <long long>self.reductions * MOST_BUCKETS + bucket.index,
            bucket.gradient_elements, bucket.job.element, bucket.filled,
            bucket.full, &bucket.job)
        bucket.filled = bucket.full = 0

    cdef _reset_counting(self):
        cdef Py_ssize_t index
        cdef Bucket bucket
        for index in range(len(self.parameters)):
            self.states[index].left = self.states[index].expected
        for bucket in self.buckets:
            bucket.pending = len(bucket.parameter_indices)
            bucket.filled = bucket.full = 0
            if not bucket.sparse:
                bucket.set_flag(INCOMPLETE, False)
                bucket.set_flag(MISSED, False)
            if bucket.on_gpu:
                (<GpuBucket>bucket).forget()
        self.next_bucket = 0
        self.ready = 0
        self.is_alone = False
        self.late.clear()

    cdef int mark_ready(
        self, Py_ssize_t index, object parameter, object gradient, bint brought
    ) except -1:
        """Copy what this rank has for a parameter that is ready into its bucket."""
        cdef ParameterState *state = &self.states[index]
        cdef Bucket bucket = <Bucket>self.buckets[state.bucket]
        self.ready += 1
        if not bucket.sparse and not bucket.skipped:
            if brought:
                if bucket.common is None:
                    self.copy_in(index, parameter, gradient)
                bucket.set_flag(state.position, True)
            else:
                self.contribute_old(index, parameter, gradient)
        bucket.pending -= 1     # last: the thread of another device may be launching buckets
        return 0

    cdef int take_late(self) except -1:
        """Take the gradients that hooks after ours may have changed."""
        late, self.late = self.late, []
        for index in late:
            parameter = self.parameters[index]
            self.mark_ready(index, parameter, parameter.grad, self.notice(index, parameter))
        return 0

    cdef bint notice(self, Py_ssize_t index, object parameter) except -1:
        """Note and return whether the hook of a parameter has brought a gradient."""
        if not has_gradient(parameter) or (
            self.grads_before and self._is_old(index, parameter.grad)
        ):
            return False
        self.states[index].used = True
        return True

    cdef int copy_in(self, Py_ssize_t index, object parameter, object gradient) except -1:
        """Copy `gradient` into the bucket; with views, point `.grad` there."""
        cdef ParameterState *state = &self.states[index]
        cdef Bucket bucket = <Bucket>self.buckets[state.bucket]
        view = bucket.views[state.position]
        if (gradient.dtype is not bucket.dtype or gradient.layout is not _strided
                or gradient.shape != view.shape):
            raise_other_kind(self.describe_parameter(index), gradient, bucket.dtype)
        if bucket.on_gpu:
            (<GpuBucket>bucket).gather(state.position, gradient)
        elif (not copy_to_view(&state.view, bucket, state.position, gradient)
                and self.gradient_as_bucket_view):
            parameter.grad = bucket.tensor_at(state.position)
        return 0

    cdef int wait_for_job(self, Bucket bucket) except -1:
        """Wait for the engine to have reduced a bucket."""
        cdef double limit, last
        cdef WaitStatus status
        self.waiting_for = bucket.index
        note_wait(&bucket.job)
        try:
            limit = self.process_group.timeout.total_seconds()  # it may have been set since
            if self.agreement is not None:
                agreement, self.agreement = self.agreement, None
                if not agreement.wait(limit):
                    raise_timed_out(self, bucket, explain_missing(self, bucket))
            status = WAIT_TIMED_OUT
            last = now() + limit
            while _behind and status == WAIT_TIMED_OUT and now() < last:
                _launch_behind()
                status = bucket.channel.wait(&bucket.job, min(TURN, limit))
            if status == WAIT_TIMED_OUT:
                status = bucket.channel.wait(&bucket.job, limit if not _behind else 0)
            if status == WAIT_TIMED_OUT:
                raise_timed_out(self, bucket, explain_missing(self, bucket))
        except BaseException:
            # Nobody waits for the others of this backward either.
            fail_source(self.record_source)
            raise
        finally:
            self.waiting_for = -1
        return 0

    cdef int wait_for(self, Bucket bucket) except -1:
        """Wait for the mean of a bucket; note the parameters that no rank used."""
        self.wait_for_job(bucket)
        bucket.read_flags()
        if self.profile is not None:
            self.profile.end(bucket.index)
        if bucket.on_gpu:
            (<GpuBucket>bucket).receive()
        if bucket.index == self.counting:
            self.out_of_step = bucket.counts_differ() and not bucket.flag(JOINED)
        if self.skip_unused and not self.has_rebuilt_buckets:
            for position, index in enumerate(bucket.parameter_indices):
                if not bucket.flag(position):
                    self.unused_everywhere.add(index)
        return 0

    cdef int expect(self, bint expecting) except -1:
        """Note whether a forward has asked for gradients to be reduced."""
        self.expecting = expecting
        if self.domain is not None:
            (_expecting.add if expecting else _expecting.discard)(self)
        return 0

    # Gradients that lie once, see Note [Gradients of a node] in bucket.pyx.

    cdef bint take_stage(self, Bucket bucket, bint must) except -1:
        """Wait for the bucket that is in the stage; return whether it is reduced.

        Args:
            bucket: that is about to be launched.
            must: wait as long as for means; else for so long that others may be behind.
        """
        cdef Bucket other = self.in_stage
        if bucket.common is None:
            return True
        if other is not None and not job_is_done(&other.job):
            if must or len(_expecting) == 1:
                self.wait_for_job(other)
            elif self.is_alone or other.channel.wait(&other.job, PATIENCE) == WAIT_TIMED_OUT:
                self.is_alone = True
                _behind.add(self)
                return False
        if must or self.is_alone:
            _behind.discard(self)
        self.in_stage = bucket
        return True

    cdef int fill_stage(self, Bucket bucket) except -1:
        """Lay this rank's gradients where they are reduced; they are views of the means then."""
        cdef ParameterState *state
        cdef Py_ssize_t index
        for index in bucket.parameter_indices:
            state = &self.states[index]
            parameter = self.parameters[index]
            if state.view.within_reach and copy_fast(
                &state.view, bucket, state.position, parameter, True
            ):
                continue
            gradient = parameter.grad
            if gradient is None:
                memset(state.view.address, 0, state.view.bytes)
            else:
                self.copy_in(index, parameter, gradient)
        return 0

    cdef int forget_writes(self) except -1:
        """See the means that are there now, or are to come, where this rank has written."""
        cdef Bucket bucket
        for bucket in self.buckets:
            if bucket.common is not None:
                bucket.common.owner.forget_writes()     # of all buckets
                break
        return 0

    def note_error(self, error):
        """Take note of an error that a hook is about to raise. Not collective."""

    def _before_reduction(self):
        """Begin what goes beside this reduction. Collective. Called before each WINDOW of them."""

    cdef int contribute_old(self, Py_ssize_t index, object parameter, object gradient) except -1:
        """Contribute what earlier backwards left, or zeros; flag whether that is a gradient."""
        cdef ParameterState *state = &self.states[index]
        cdef Bucket bucket = <Bucket>self.buckets[state.bucket]
        if bucket.common is not None:
            if gradient is not None and not state.used:
                self.set_aside[index] = gradient.clone()
        elif gradient is None:
            if bucket.on_gpu:
                (<GpuBucket>bucket).clear(state.position)
            else:
                memset(state.view.address, 0, state.view.bytes)
        else:
            if self.gradient_as_bucket_view and not state.used:
                self.set_aside[index] = gradient.clone()
            self.copy_in(index, parameter, gradient)
        bucket.set_flag(state.position, gradient is not None and state.used)
        bucket.set_flag(INCOMPLETE, True)
        return 0

    def _is_old(self, Py_ssize_t index, gradient):
        """Whether autograd came with an undefined gradient and left `.grad` as it was.

        It does so below outputs that take no part in the loss. Known with
        `compare_gradients` only.
        """
        old, version = self.grads_before[index]
        return gradient is old and gradient._version == version

    cdef int copy_out(self, Py_ssize_t index) except -1:
        """Write the mean to the gradient of a parameter."""
        cdef ParameterState *state = &self.states[index]
        cdef Bucket bucket = <Bucket>self.buckets[state.bucket]
        write_gradient(&state.view, bucket, state.position, self.parameters[index])
        return 0

    cdef _after_reduction(self):
        cdef Py_ssize_t index
        for index in range(len(self.parameters)):
            self.states[index].used = False
        self._reset_counting()
        self.unused = self.missing + self.never_used
        self.communication_ended = now()
        self.set_aside.clear()
        self.grads_before = []
        self.expect(False)
        self.reductions += 1
        if self.find_unused_parameters and not self.static_graph:
            self.incomplete = False
        if not self.incomplete:
            self.missing = []
        self.times.note(
            self.record_source, self.forward_began, self.backward_began, self.communication_began,
            self.backward_ended, self.communication_ended)
        if tracing:
            note_reduction(self)
        if self.reductions % WINDOW == 1 and self.comparison is not None:
            self.comparison.end()

    def keep_buckets(self):
        """Never rebuild the buckets: parameters lie in their order, too. Not collective."""
        self.has_rebuilt_buckets = True

    def was_used(self, Py_ssize_t index):
        """Return whether parameter `index` got a gradient since the last reduction.

        Not collective.
        """
        return bool(self.states[index].used)

    def was_used_anywhere(self, Py_ssize_t index):
        """Return whether any rank had a gradient for parameter `index` in the last reduction.

        Not collective. Known until the next backward.
        """
        cdef ParameterState *state = &self.states[index]
        return bool((<Bucket>self.buckets[state.bucket]).flag(state.position))

    cpdef int set_divisor(self, double divisor) except -1:
        """Divide the sums over ranks by `divisor` from now on. Not collective."""
        cdef Bucket bucket
        self.divisor = divisor
        for bucket in self.buckets:
            bucket.job.divisor = divisor
        return 0

    def describe_bucket(self, bucket):
        """Return what to call a bucket in errors. Not collective."""
        names = [self.describe_parameter(index) for index in bucket.parameter_indices]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        of = f" of wrapped module {self.number} ({self.module_name})"
        return f"gradient bucket {bucket.index} ({shown}){of}"

    def without_gradient(self):
        """Return the parameters that have no gradient so far in this backward. Not collective."""
        return [index for index in range(len(self.parameters)) if self.states[index].left]

    def last_moments(self):
        """Return the five timestamps of the last iteration, in seconds. Not collective.

        When forward, backward and communication began; when backward and communication ended.
        """
        return [
            self.forward_began,
            self.backward_began,
            self.communication_began,
            self.backward_ended,
            self.communication_ended,
        ]

    cdef int check_view(self, Py_ssize_t index) except -1:
        """Make sure that the gradient of a parameter is where its mean is."""
        cdef ParameterState *state = &self.states[index]
        cdef Bucket bucket = <Bucket>self.buckets[state.bucket]
        parameter = self.parameters[index]
        if is_in_place(&state.view, bucket, state.position, parameter):
            return 0
        if not has_gradient(parameter):
            parameter.grad = bucket.tensor_at(state.position)
        elif not bucket.flags_only:     # hooks in Python may step optimizers and drop gradients
            raise_no_view(self.process_group, self.describe_parameter(index))
        return 0

    cdef int move_strangers_out(self) except -1:
        """Give memory of their own to gradients that lie in the place of other gradients."""
        cdef Py_ssize_t index
        cdef Bucket bucket
        cdef char *address
        for index in range(len(self.parameters)):
            if self.expect_sparse[index]:
                continue
            parameter = self.parameters[index]
            address = gradient_address(parameter)
            if address == NULL or address == self.states[index].view.mean:
                continue
            for bucket in self.buckets:
                if bucket.first_view <= address < bucket.last_view_end:
                    parameter.grad = parameter.grad.clone()
                    break
        return 0

    def _find_moved_views(self):
        """Note the views again in buffers of Python hooks whose memory has moved."""
        cdef Bucket bucket
        for bucket in self.buckets:
            if not bucket.sparse:
                if bucket.first_view != bucket.view_address(0):
                    self._find_views(bucket)
