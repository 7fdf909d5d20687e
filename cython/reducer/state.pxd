from cpython.object cimport PyObject

from mpiddp.engine.engine cimport Channel
from mpiddp.reducer.bucket cimport Bucket
from mpiddp.reducer.bucket_views cimport BucketView
from mpiddp.reducer.step_times cimport StepTimes


cdef struct ParameterState:
    BucketView view             # in its bucket; none where gradients are sparse
    Py_ssize_t bucket
    Py_ssize_t position     # in its bucket
    int expected            # how often its hook runs in a backward, see static_graph.pyx
    int left                # how often it has still to run in this one; 0: it is ready
    bint used               # its hook ran since the last reduction, no_sync included


cdef class ReducerState:
    cdef object __weakref__
    cdef readonly list parameters
    cdef readonly list buckets
    cdef readonly object process_group
    cdef readonly bint find_unused_parameters
    cdef readonly bint gradient_as_bucket_view
    cdef bint lazy_buckets          # see Note [Lazy buckets]
    cdef public bint ends_by_hand     # the user calls `finish_backward`
    cdef readonly bint has_rebuilt_buckets
    cdef readonly int layout                # how often buckets were made; 1: the first ones
    cdef public object compression    # the 16-bit dtype of float32 and float64, or None
    cdef public object python_hook    # what moves the gradients, or None
    cdef readonly list post_backward_futures     # of hooks of the buffers
    cdef readonly object assign_buckets
    cdef readonly object describe_parameter
    cdef object report_missing
    cdef double world_size
    cdef readonly double divisor            # smaller, while some ranks have joined
    cdef readonly dict channels
    cdef readonly Channel channel           # of the first parameter's device
    cdef readonly object mixed_precision
    cdef ParameterState *states
    cdef readonly list expect_sparse
    cdef bint has_sparse
    cdef list hooks
    cdef list handles
    cdef list sharing               # weak references to reducers of the same parameters
    cdef public list arrival_order
    cdef dict set_aside             # gradients of locally unused parameters in views
    cdef readonly bint static_graph
    cdef bint learning              # the static graph is not known yet
    cdef list never_used            # parameters whose hook is not expected to run
    cdef bint skip_unused
    cdef set unused_everywhere      # with skip_unused: parameters that no rank used
    cdef bint compare_gradients     # whether hooks may run without a gradient
    cdef readonly bint shadowing    # whether this rank takes part in others' backward, joined.pyx
    cdef list grads_before                # .grad and its version at the end of forward
    cdef readonly list missing               # parameters that got no gradient in the last backward
    cdef readonly Py_ssize_t next_bucket
    cdef list late                  # parameters whose gradient is taken at the end of backward
    cdef bint launching             # some thread is launching buckets
    cdef readonly Py_ssize_t ready
    cdef readonly bint expecting             # a forward asked for gradients to be reduced
    cdef readonly bint callback_queued
    cdef bint failed                # a hook has raised in this backward
    cdef public object profile      # notes reductions while the profiler runs, or None
    cdef bint incomplete            # some rank missed some parameter in the last backward
    cdef public object passes       # the forward passes, or None: see forward_passes.py
    cdef readonly Py_ssize_t counting        # the bucket that carries their number, -1: none
    cdef public bint out_of_step    # the ranks have counted different numbers of them
    cdef readonly Py_ssize_t waiting_for     # the bucket that this rank waits for, -1: none
    cdef readonly Py_ssize_t reductions
    cdef readonly object domain     # number of those ranks that share means; None: they do not
    cdef Bucket in_stage            # laid there last, see Note [Gradients of a node]
    cdef bint is_alone              # other ranks do not come in this backward
    cdef public object agreement    # what the ranks compare in their first reduction, or None
    cdef readonly list unused               # parameters without a gradient in the last backward
    # Of the last iteration, for the logger, in seconds on the monotonic clock.
    cdef readonly double forward_began
    cdef readonly double backward_began
    cdef readonly double communication_began         # the first bucket was launched
    cdef readonly double backward_ended
    cdef readonly double communication_ended
    cdef readonly Py_ssize_t iterations     # forward passes whose gradients were to be reduced
    cdef readonly StepTimes times
    cdef public object comparison       # what tells the other ranks of these times, or None

    cdef public int record_source           # of its buckets in the flight recorder

    cdef void record(self, Bucket bucket) noexcept
    cdef _reset_counting(self)
    cdef int contribute_old(self, Py_ssize_t index, object parameter, object gradient) except -1
    cdef int copy_in(self, Py_ssize_t index, object parameter, object gradient) except -1
    cdef int mark_ready(
        self, Py_ssize_t index, object parameter, object gradient, bint brought
    ) except -1
    cdef int take_late(self) except -1
    cdef bint notice(self, Py_ssize_t index, object parameter) except -1
    cdef int copy_out(self, Py_ssize_t index) except -1
    cdef int wait_for(self, Bucket bucket) except -1
    cdef int wait_for_job(self, Bucket bucket) except -1
    cdef int expect(self, bint expecting) except -1
    cdef bint take_stage(self, Bucket bucket, bint must) except -1
    cdef int fill_stage(self, Bucket bucket) except -1
    cdef int forget_writes(self) except -1
    cpdef int set_divisor(self, double divisor) except -1
    cdef int check_view(self, Py_ssize_t index) except -1
    cdef int move_strangers_out(self) except -1
    cdef _after_reduction(self)
