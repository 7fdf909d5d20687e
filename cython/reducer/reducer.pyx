"""Hooks, buckets, readiness and launch order: the per-iteration side of DDP.

The reducer sees each gradient as autograd makes it, copies it into its bucket, hands full buckets
to the engine strictly in order of index, and at the end of backward waits and writes the means. It
does not know MPI: small collectives that are not gradients go through the process group. In torch's
wrapper it replaces torch's C++ Reducer, with torch_reducer.py on top.

Note [End of backward]
~~~~~~~~~~~~~~~~~~~~~~
The first hook of a backward, of a parameter or of an output, queues
`end_of_backward` as a callback of autograd's graph task, which runs when every
gradient of that task is there. Parameters whose hook has not run by then are the
unused ones: no search of the graph is needed.
In a backward nested in another one (reentrant checkpointing) the callback belongs
to the inner task and comes too early unless all parameters are ready; it then
leaves the work to the callback that the next hook queues.

Note [Hooks of the user]
~~~~~~~~~~~~~~~~~~~~~~~~
Other hooks of a parameter may change its gradient, and their result is averaged. So ours is kept
the last one in the parameter's dictionary, which autograd reads when the gradient is there. Hooks
may be added at any time, so this is checked before each backward and, for hooks that are added
after that, in ours. Where ours is not the last, it moves to the end, and in this one backward the
gradient is taken at the end.
"""

from cpython.dict cimport PyDict_Next, PyDict_Size
from cpython.object cimport PyObject

import warnings
import weakref

import torch
from torch.autograd import Variable

from mpiddp.engine.forks cimport is_child
from mpiddp.engine.progress cimport job_is_done
from mpiddp.flight_recorder.ring cimport tracing
from mpiddp.reducer.bucket cimport INCOMPLETE, MISSED, Bucket
from mpiddp.reducer.bucket_views cimport copy_fast
from mpiddp.reducer.gpu_bucket cimport GpuBucket
from mpiddp.reducer.lazy cimport release, release_unused
from mpiddp.reducer.state cimport ParameterState, ReducerState
from mpiddp.reducer.step_times cimport WINDOW
from mpiddp.system.helpers cimport has_helpers
from mpiddp.system.posix cimport now
from mpiddp.torch_internals.tensors cimport has_gradient
from mpiddp.engine.forks import check as check_process
from mpiddp.reducer import forward_passes, joined, sparse, static_graph, unused
from mpiddp.reducer.backward_kinds import adds_to_gradients
from mpiddp.reducer.bucket_views import hold_gradients, move_gradient, views_by_parameter
from mpiddp.reducer.building import NO_BUCKETS, make_again, make_buckets
from mpiddp.reducer.errors import raise_unfinished, raise_used_again, refuse_shared_views
from mpiddp.reducer.futures import wait_for_all
from mpiddp.reducer.model_check import verify_unchanged

_queue_callback = Variable._execution_engine.queue_callback
_current_autograd_node = torch._C._current_autograd_node
_is_grad_enabled = torch.is_grad_enabled

# Buckets of reducers that went away while MPI could still write to them. None when the interpreter
# collects its last objects.
_abandoned = []


cdef class ParameterHook:
    """What autograd calls when the gradient of one parameter is accumulated."""

    def __call__(self, parameter):
        cdef bint last
        if self.reducer != NULL:
            try:
                last = PyDict_Size(self.hooks) == 1 or self.is_last()
                (<Reducer>self.reducer).parameter_ready(self.index, parameter, last)
                if not last:
                    self.move_to_end()
            except Exception as error:
                (<Reducer>self.reducer).failed = True
                (<Reducer>self.reducer).note_error(error)
                raise

    cdef bint is_last(self) except -1:
        """Whether no hook but ours comes after this one, in autograd's order."""
        cdef Py_ssize_t position = 0
        cdef PyObject *key = NULL
        cdef PyObject *hook = NULL
        cdef bint found = False, last = True
        while PyDict_Next(self.hooks, &position, &key, &hook):
            if hook == <PyObject *>self:
                found = True
            elif found and not isinstance(<object>hook, ParameterHook):
                last = False
        return last

    cdef int move_to_end(self) except -1:
        """Run after all present hooks, from the next time on."""
        # Not move_to_end() of OrderedDict: autograd does not see the order that it keeps.
        if self.hooks.pop(self.key, None) is self:
            self.hooks[self.key] = self
        return 0


cdef class Reducer(ReducerState):
    """Average the gradients of one module over the ranks of a process group.

    Collective: every rank of `process_group` makes its reducers in the same order.

    Args:
        arguments, settings: those of `ReducerState`.

    Raises:
        TypeError: a parameter's dtype cannot be averaged.
    """

    def __init__(self, *arguments, **settings):
        cdef Py_ssize_t index
        ReducerState.__init__(self, *arguments, **settings)
        self._build_buckets(self.assign_buckets(None))
        for index in range(len(self.parameters)):
            self._register_hook(index)

    def __del__(self):
        self._remove_autograd_hooks()
        # MPI may still write to a bucket that was launched: keep its memory.
        cdef Bucket bucket
        for bucket in self.buckets or ():
            if not job_is_done(&bucket.job) and _abandoned is not None:
                _abandoned.append(bucket)

    cdef _register_hook(self, Py_ssize_t index):
        cdef ParameterHook hook = ParameterHook.__new__(ParameterHook)
        cdef Reducer other
        for others in list((self.parameters[index]._post_accumulate_grad_hooks or {}).values()):
            if isinstance(others, ParameterHook) and (<ParameterHook>others).reducer != NULL:
                other = <Reducer>(<ParameterHook>others).reducer
                if other.expecting and other.ready:
                    other._remove_autograd_hooks()      # its backward failed: it is of no use
                elif weakref.ref(other) not in self.sharing:
                    self.sharing.append(weakref.ref(other))
                    other.sharing.append(weakref.ref(self))
        hook.reducer = <PyObject *>self
        hook.index = index
        handle = self.parameters[index].register_post_accumulate_grad_hook(hook)
        hook.hooks = self.parameters[index]._post_accumulate_grad_hooks
        hook.key = handle.id
        self.hooks.append(hook)
        self.handles.append(handle)

    def _build_buckets(self, assignment):
        """Make the buckets of `assignment`, a list of lists of parameter indices.

        Raises:
            OSError: there is no memory for other buckets than the present ones.
            RuntimeError: nor for these.
        """
        cdef Bucket bucket
        cdef Py_ssize_t index
        problem = None
        old_views = views_by_parameter(self.buckets) if self.gradient_as_bucket_view else {}
        if self.buckets is None:
            self.buckets = make_buckets(self, assignment)
        else:
            verify_unchanged(self)
            present = [bucket.parameter_indices for bucket in self.buckets]
            self.buckets = []
            if not hold_gradients(self.parameters, old_views):
                old_views = {}      # else the old memory goes when the gradients have moved
            try:
                self.buckets, problem = make_again(self, assignment, present)
            except Exception:
                self._remove_autograd_hooks()
                raise
        self.counting, self.layout = -1, self.layout + 1
        self.channel = self.channels[self.parameters[0].device]     # perhaps another by now
        for bucket in self.buckets:
            bucket.skipped = self.unused_everywhere.issuperset(bucket.parameter_indices)
            if not bucket.sparse and not bucket.skipped:
                self.counting = bucket.index
            self._find_views(bucket)
            for position, index in enumerate(bucket.parameter_indices):
                if index in old_views:
                    move_gradient(self.parameters[index], old_views[index], bucket, position)
            if bucket.skipped:
                for index in bucket.parameter_indices:
                    self.states[index].expected = 0
        self.never_used = [
            index for index in range(len(self.parameters)) if self.states[index].expected == 0
        ]
        self._reset_counting()
        if self.lazy_buckets:
            release_unused(self)
        if problem is not None:
            raise problem

    # The path of one gradient.

    cdef int parameter_ready(self, Py_ssize_t index, object parameter, bint last) except -1:
        """Take a gradient that autograd has made: now, if our hook is the last one."""
        cdef ParameterState *state = &self.states[index]
        cdef Bucket bucket = <Bucket>self.buckets[state.bucket]
        if not self.expecting or state.left != 1:
            self.note_hook(index, parameter)
            return 0
        state.left = 0
        if tracing:
            bucket.note_gradient(now())
        self.queue_callback()
        if not self.has_rebuilt_buckets:
            self.arrival_order.append(index)
        if not last:
            self.late.append(index)
            return 0
        if state.view.within_reach and not self.grads_before and (
            has_gradient(parameter) if bucket.common is not None else copy_fast(
                &state.view, bucket, state.position, parameter, self.gradient_as_bucket_view)
        ):
            state.used = True
            bucket.set_flag(state.position, True)
            self.ready += 1
            bucket.pending -= 1
        else:
            self.mark_ready(index, parameter, parameter.grad, self.notice(index, parameter))
        if bucket.pending == 0 and state.bucket == self.next_bucket:
            self.launch_full_buckets()
        # After the last gradient, sums are left to the end of backward, which has helpers.
        if self.ready < len(self.parameters) or not has_helpers():
            self.channel.poke()
        return 0

    cdef int note_hook(self, Py_ssize_t index, object parameter) except -1:
        """Take note of a hook that does not make its parameter ready."""
        brought = self.notice(index, parameter)
        if self.expecting:
            if brought or not (<Bucket>self.buckets[self.states[index].bucket]).skipped:
                self.count_hook(index)
            else:
                self.queue_callback()   # as in the iteration in which no rank used it
        return 0

    cdef int count_hook(self, Py_ssize_t index) except -1:
        """Count a hook that does not make its parameter ready, see static_graph.pyx."""
        cdef ParameterState *state = &self.states[index]
        if state.left == 0:
            raise_used_again(
                self.describe_parameter(index), self.static_graph,
                skipped=(<Bucket>self.buckets[state.bucket]).skipped,
            )
        self.queue_callback()
        if state.left < 0 and not self.has_rebuilt_buckets:
            self.arrival_order.append(index)
        state.left -= 1
        return 0

    cdef int queue_callback(self) except -1:
        """Have `end_of_backward` called, see Note [End of backward]."""
        if self.expecting and not self.callback_queued:
            if is_child():
                check_process("backward of a module wrapped in DistributedDataParallel")
            if self.sharing:
                refuse_shared_views(self, self.sharing)
            self.callback_queued = True
            _queue_callback(self.end_of_backward)
            if self.python_hook is not None:
                self._find_moved_views()
            if _is_grad_enabled():
                forward_passes.warn_of_higher_orders()
            if self.ready == 0:
                if self.gradient_as_bucket_view:
                    self.move_strangers_out()
                if self.reductions % WINDOW == 0:
                    self._before_reduction()
                for index in self.never_used:
                    parameter = self.parameters[index]
                    self.mark_ready(index, parameter, parameter.grad, False)
                self.launch_full_buckets()
        return 0

    cdef int launch_full_buckets(self, bint must=False) except -1:
        """Submit the buckets that are full, strictly in order of index.

        Args:
            must: this is the end of backward: wait for a stage, see `take_stage`.
        """
        cdef Bucket bucket
        if self.launching:
            return 0        # the thread of another device is here and submits them
        self.launching = True
        try:
            while self.next_bucket < len(self.buckets):
                bucket = <Bucket>self.buckets[self.next_bucket]
                if bucket.pending:
                    break
                if not bucket.sparse and not bucket.skipped:
                    if not self.take_stage(bucket, must):
                        break
                    if bucket.common is not None:
                        self.fill_stage(bucket)
                    bucket.fill_from_gradient_buffer()
                    if bucket.index == self.counting and self.passes is not None:
                        bucket.set_count(self.passes.settle())
                    if self.profile is not None:
                        self.profile.begin(bucket.index)
                    self.record(bucket)
                    bucket.submit()
                if self.next_bucket == 0:
                    self.communication_began = now()
                self.next_bucket += 1
                if self.python_hook is not None and not bucket.skipped:
                    self.python_hook.launch(self, bucket)
        finally:
            self.launching = False
        return 0

    def launch_held_back(self):
        """Launch full buckets whose stage has become free. Not collective."""
        if self.expecting:
            self.launch_full_buckets()

    # The end of backward.

    def end_of_backward(self):
        """Launch what is left, wait for the buckets and write the means. Autograd's final callback.

        Collective.

        Raises:
            RuntimeError: an all-reduce failed, or some rank did not take part in it
                within the group's timeout.
        """
        self.callback_queued = False
        if not self.expecting:
            return
        if self.late:
            self.take_late()
        if self.ready < len(self.parameters):
            if _current_autograd_node() is not None:
                return              # see Note [End of backward]
            if self.learning:
                static_graph.learn(self)
            else:
                unused.contribute(self)
        self.launch_full_buckets(True)
        if not self.ends_by_hand:
            self.finish_backward()

    def finish_backward(self):
        """Wait for the buckets, all of which are launched, and write the means.

        Collective. Raises what `end_of_backward` does.
        """
        cdef Bucket bucket
        cdef Py_ssize_t index
        self.backward_ended = now()
        self.incomplete = False
        self.forget_writes()
        for bucket in self.buckets:
            if bucket.sparse or bucket.skipped:
                continue
            self.wait_for(bucket)
            self.incomplete |= bucket.flag(MISSED)
            if self.python_hook is not None:
                self.python_hook.finish(self, bucket)
                self._find_views(bucket)        # a hook that resizes the buffer moves it
            bucket.read_into_gradient_buffer()
            if bucket.flag(INCOMPLETE):
                unused.write_means(self, bucket)
            elif self.gradient_as_bucket_view:
                for index in bucket.parameter_indices:
                    self.check_view(index)
            elif bucket.on_gpu:
                (<GpuBucket>bucket).write_out(
                    [self.parameters[index] for index in bucket.parameter_indices])
            else:
                for index in bucket.parameter_indices:
                    self.copy_out(index)
            if self.lazy_buckets and not self.gradient_as_bucket_view:
                release(bucket)
        if self.has_sparse:
            self.incomplete |= sparse.reduce(self)
        if self.post_backward_futures:
            futures, self.post_backward_futures = self.post_backward_futures, []
            wait_for_all(futures, self.process_group.me, self.process_group.timeout)
        self._after_reduction()
        if self.out_of_step:
            self.out_of_step = False
            forward_passes.report(self)

    # What torch's wrapper calls.

    def prepare_for_forward(self):
        """Begin an iteration whose gradients are to be reduced. Not collective.

        Raises:
            RuntimeError: the previous backward did not end; or there are no buckets, because
                they could not be made again.
        """
        check_process("forward of DistributedDataParallel with gradients enabled")
        if not self.buckets:
            raise RuntimeError(f"rank {self.process_group.me}: {NO_BUCKETS}")
        self.iterations += 1
        self.forward_began = now()
        if self.divisor != self.world_size:
            self.set_divisor(self.world_size)
        if self.lazy_buckets and self.gradient_as_bucket_view and not self.expecting:
            release_unused(self)
        if self.expecting and (self.ready or self.late or self.failed):
            raise_unfinished(
                self.without_gradient(), len(self.parameters), self.process_group.me,
                self.describe_parameter, self.static_graph,
            )

    def prepare_for_backward(self, outputs):
        """Expect a backward whose gradients are to be reduced. Not collective.

        Args:
            outputs: the tensors that forward returned, with `find_unused_parameters`. Backward
                begins at them, even on a rank where it reaches no parameter at all.
        """
        cdef ParameterHook hook
        for hook in self.hooks:
            if PyDict_Size(hook.hooks) > 1 and not hook.is_last():
                hook.move_to_end()
        self.expect(True)
        self.backward_began = now()
        # Left over if the last backward raised: its callback never ran.
        self.callback_queued = False
        if self.static_graph and not self.ready:
            self._reset_counting()      # drop what a backward that raised has counted
        if self.compare_gradients:
            self.grads_before = [
                (parameter.grad, -1 if parameter.grad is None else parameter.grad._version)
                for parameter in self.parameters
            ]
        self.watch(outputs)

    def watch(self, outputs):
        """End a backward that begins at `outputs`, even if no parameter's hook runs in it.

        Not collective.
        """
        for output in outputs:
            if output.grad_fn is not None:       # a leaf is the user's own tensor
                output.register_hook(self._backward_begins)

    def _backward_begins(self, gradient):
        """Queue the final callback. A hook of the module's outputs; changes no gradient."""
        if self.expecting and not self.callback_queued and adds_to_gradients(self.parameters):
            self.queue_callback()

    def _rebuild_buckets(self):
        """Lay the buckets out in the order in which gradients arrived on rank 0.

        Collective the first time after a reduction, and after one in which a gradient was
        missing on some rank; else it does nothing. Ranks that have joined call it too.

        Returns:
            Whether the buckets were rebuilt by this call.

        Raises:
            RuntimeError: parameters got no gradient in the last reduction, and neither
                `find_unused_parameters` nor the static graph allows that.
        """
        if self.shadowing:
            joined.finish(self)
        if self.incomplete:
            self.incomplete = False
            missing, self.missing = self.missing, []
            pairs = [(index, self.states[index].bucket) for index in missing]
            self.report_missing(pairs, self.static_graph)
        if self.has_rebuilt_buckets or not self.reductions or self.expecting:
            return False
        assignment = self.assign_buckets(self.arrival_order)
        try:
            self._build_buckets(assignment)
        except OSError as error:
            # The present buckets hold the same gradients, in an order that was guessed.
            if self.process_group.rank() == 0:
                warnings.warn(
                    f"the buckets keep the order of the parameters instead of that in which "
                    f"gradients arrive, which may be slower: {error}",
                    stacklevel=2,
                )
        self.arrival_order = []
        self.has_rebuilt_buckets = True
        return True

    def _remove_autograd_hooks(self):
        """Take the hooks off the parameters. Not collective."""
        cdef ParameterHook hook
        for hook in self.hooks or ():
            hook.reducer = NULL
            hook.hooks = None
        for handle in self.handles or ():
            handle.remove()
        self.hooks = []
        self.handles = []

    def run_hook(self, Py_ssize_t index):
        """Do what the hook of a parameter does, for measurements. Not collective."""
        self.parameter_ready(index, self.parameters[index], True)
