"""Run channels of all-reduces in order, on one thread that never spins.

The engine owns all gradient traffic of a process. It knows channels, chunks and
time; it knows neither autograd nor which MPI call a transport makes.

Note [Who makes progress] is in progress.pyx.
"""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdlib cimport calloc, free
from posix.time cimport CLOCK_MONOTONIC

from mpiddp.engine.forks cimport is_child
from mpiddp.engine.interface cimport ChannelState, fail, note_end
from mpiddp.engine.progress cimport (
    SIGNAL_CHECK, drive, engine_thread, enqueue, hears, step_channels, wake_thread,
)
from mpiddp.mpi.calls cimport MPI_Comm, mpi
from mpiddp.mpi.errors cimport check, check_errno
from mpiddp.system.posix cimport (
    CPU_SET, CPU_ZERO, cpu_set_t, create_thread_without_signals, getpid, load, now, peek,
    peek_time, pthread_cond_destroy, pthread_cond_init, pthread_cond_signal,
    pthread_condattr_destroy, pthread_condattr_init, pthread_condattr_setclock, pthread_condattr_t,
    pthread_join, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock,
    pthread_mutex_trylock, pthread_mutex_unlock, pthread_setaffinity_np, put, store,
)
from mpiddp.system.running_time cimport Clock, look, running_at
from mpiddp.engine.forks import check as check_process
from mpiddp.engine.memory import allocate_private
from mpiddp.system import helpers


# For waits without a channel, in any thread.
cdef int failed = 0


cdef int has_failed() noexcept nogil:
    return load(&failed)


# What a thread that waits calls twice a second, where no other thread looks; and when one has.
_look = None
cdef bint looks = False
cdef double last_look = 0.0
cdef double LOOK_PERIOD = 0.5


def look_while_waiting(function):
    """Let threads that wait call `function` twice a second; None: no more. Not collective."""
    global _look
    _look = function


cdef int look_if_due(double *looked) except -1:
    """Call what is to be called while this thread waits; it may take seconds, as it asks others.

    `looked` is of Note [Running time]: for that time the process was not stopped.
    """
    global looks, last_look
    if _look is None or looks or looked[0] - last_look < LOOK_PERIOD:
        return 0
    looks = True
    try:
        _look()
    finally:
        looks = False
        last_look = looked[0] = now()
    return 0


def look_at_others(Clock clock not None):
    """Look at the clock of a loop in Python that waits, and do the same. Not collective.

    Where it is not time, or where a thread looks, that takes some nanoseconds.
    """
    look(&clock.looked)
    look_if_due(&clock.looked)


cdef double limit_of(ChannelState *channel, double deadline, double patience) noexcept:
    """Return the running time at which a wait is given up."""
    if patience:
        deadline = max(deadline, peek_time(&channel.last_progress))
    return running_at(deadline) + patience


cdef class Engine:
    """The progress engine of a process.

    Not collective.

    Args:
        threaded: whether a thread of its own makes progress; without one, progress
            is made by `Channel.poke` and by waiting threads.
        cores: numbers of those that this thread may run on; none: those of the thread
            that makes it.

    Raises:
        OSError: the thread cannot be created.
    """

    def __cinit__(self, *, bint threaded=True, cores=frozenset()):
        cdef pthread_condattr_t attributes
        self.threaded = threaded
        self.cores = cores
        self.channels = []
        self.process_id = getpid()
        self.state = <EngineState *>calloc(1, sizeof(EngineState))
        if self.state == NULL:
            raise MemoryError
        check_errno(pthread_mutex_init(&self.state.channels_lock, NULL), "pthread_mutex_init")
        check_errno(pthread_mutex_init(&self.state.progress_lock, NULL), "pthread_mutex_init")
        check_errno(pthread_condattr_init(&attributes), "pthread_condattr_init")
        check_errno(
            pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC), "pthread_condattr_setclock"
        )
        check_errno(pthread_cond_init(&self.state.wake, &attributes), "pthread_cond_init")
        pthread_condattr_destroy(&attributes)
        store(&failed, 0)

    def __dealloc__(self):
        if self.state == NULL:
            return
        if self.process_id == getpid():
            self._stop_thread()
            pthread_cond_destroy(&self.state.wake)
            pthread_mutex_destroy(&self.state.progress_lock)
            pthread_mutex_destroy(&self.state.channels_lock)
        free(self.state)

    def open_channel(self, transport, communicator=None):
        """Add a channel and return it.

        Not collective (making the transport's communicator was).

        Args:
            transport: an object with a C ``Transport``, or None in a world of one.
            communicator: the mpi4py communicator below the transport; kept alive,
                and named in errors.
        """
        cdef Channel channel = Channel.__new__(Channel)
        channel.engine = self
        channel.transport = transport
        channel.communicator = communicator
        channel.device = getattr(transport, "device", None)
        if transport is not None:
            channel.state.transport = <Transport *><size_t>transport.address
        pthread_mutex_lock(&self.state.progress_lock)
        pthread_mutex_lock(&self.state.channels_lock)
        channel.state.next = self.state.channels
        self.state.channels = &channel.state
        pthread_mutex_unlock(&self.state.channels_lock)
        pthread_mutex_unlock(&self.state.progress_lock)
        self.channels.append(channel)
        if (
            self.threaded and not self.state.running and channel.state.transport != NULL
            and channel.state.transport.wants_thread
        ):
            self._start_thread()
        return channel

    def close_channel(self, Channel channel not None):
        """Remove an idle channel and its inner one, so that their communicators may be freed.

        Not collective.

        Raises:
            RuntimeError: the channel has a job in flight.
        """
        cdef ChannelState **link
        if peek(&channel.state.pending):
            raise RuntimeError("cannot close a channel with all-reduces in flight")
        pthread_mutex_lock(&self.state.progress_lock)
        pthread_mutex_lock(&self.state.channels_lock)
        link = &self.state.channels
        while link[0] != NULL:
            if link[0] == &channel.state:
                link[0] = channel.state.next
                break
            link = &link[0].next
        pthread_mutex_unlock(&self.state.channels_lock)
        pthread_mutex_unlock(&self.state.progress_lock)
        channel.state.transport = NULL
        channel.closed = True
        self.channels.remove(channel)
        inner = getattr(channel.transport, "inner", None)
        if inner is not None:
            self.close_channel(inner)

    def fail_channels(self, int code):
        """Let every job under way, and every later one, fail with an MPI error code.

        Not collective. For waits in memory that ranks share, of which MPI knows nothing.
        """
        cdef ChannelState *channel
        store(&failed, 1)
        with nogil:
            pthread_mutex_lock(&self.state.progress_lock)
        channel = self.state.channels
        while channel != NULL:
            if channel.transport != NULL and not channel.failure:
                fail(self.state, channel, code)
            channel = channel.next
        pthread_mutex_unlock(&self.state.progress_lock)

    def stop(self):
        """Stop the threads and forget the channels; jobs in flight are abandoned.

        Not collective. Harmless when called twice, and in a forked child, where
        the thread does not exist.
        """
        if self.process_id == getpid():
            self._stop_thread()
            helpers.stop()
            pthread_mutex_lock(&self.state.progress_lock)
            self.state.channels = NULL
            put(&self.state.pending, 0)
            pthread_mutex_unlock(&self.state.progress_lock)

    cdef _start_thread(self):
        cdef cpu_set_t mask
        check_errno(
            create_thread_without_signals(&self.state.thread, engine_thread, self.state),
            "pthread_create",
        )
        self.state.running = 1
        if self.cores:
            CPU_ZERO(&mask)
            for core in self.cores:
                CPU_SET(core, &mask)
            # The kernel refuses cores that were taken from the process since, and all in some
            # sandboxes. Where the thread runs is a matter of speed only.
            pthread_setaffinity_np(self.state.thread, sizeof(mask), &mask)

    cdef _stop_thread(self):
        if not self.state.running:
            return
        pthread_mutex_lock(&self.state.channels_lock)
        self.state.stop = 1
        wake_thread(self.state)
        pthread_mutex_unlock(&self.state.channels_lock)
        with nogil:
            pthread_join(self.state.thread, NULL)
        self.state.running = 0
        self.state.stop = 0

    @property
    def has_thread(self):
        """Whether the engine thread runs."""
        return bool(self.state.running)

    @property
    def counters(self):
        """Counters of the gradient traffic since the engine was made, by name.

        ``submitted``: all-reduces; ``chunks``: chunks that finished, of which ``thread_chunks`` on
        the engine thread; ``naps`` and ``yields``: times that thread slept, and yielded; ``heard``
        and ``missed``: how often lately something moved after a sleep that a socket ended, and
        after others.
        """
        return {
            "submitted": peek(&self.state.submitted),
            "chunks": peek(&self.state.chunks),
            "thread_chunks": peek(&self.state.thread_chunks),
            "naps": peek(&self.state.naps),
            "yields": peek(&self.state.thread_yields),
            "heard": peek(&self.state.heard),
            "missed": peek(&self.state.missed),
        }

    def progress(self):
        """Take one step, unless another thread is taking one. Not collective."""
        self.step()

    cdef int step(self) noexcept nogil:
        cdef int advanced = 0
        if not is_child() and pthread_mutex_trylock(&self.state.progress_lock) == 0:
            advanced = step_channels(self.state, False)
            pthread_mutex_unlock(&self.state.progress_lock)
        return advanced


cdef class Channel:
    """An ordered channel of all-reduces over one communicator. Made by `Engine.open_channel`."""

    @property
    def idle(self):
        """Whether everything submitted here is done and nothing has failed."""
        return peek(&self.state.pending) == 0 and not load(&self.state.failure)

    cdef int submit(self, Job *job) except -1:
        """Queue `job`; its memory belongs to the engine until it is done."""
        cdef EngineState *state = self.engine.state
        if is_child():
            check_process("an all-reduce of gradients")
        if load(&self.state.failure):
            self._raise_failure()
        if self.closed:
            raise RuntimeError("the process group of this module has been destroyed")
        if self.state.transport == NULL or not self.state.transport.quiet:
            put(&state.submitted, state.submitted + 1)
        if self.state.transport == NULL or job.count == 0:
            note_end(job, now())
            store(&job.done, 1)
        else:
            enqueue(state, &self.state, job)
        return 0

    cdef WaitStatus wait(self, Job *job, double timeout) except *:
        """Drive the engine until `job` is done.

        `timeout`, in seconds, counts from the last chunk that finished here, because the
        all-reduces of one module follow one another.
        """
        return self.wait_until(job, now(), timeout)

    cdef WaitStatus wait_until(self, Job *job, double deadline, double patience) except *:
        """Drive the engine until `job` is done or it is later than `deadline`.

        With `patience`, give up only that many seconds after the last chunk that finished here, or
        after `deadline` if that is later. Without it, other jobs do not extend the wait.
        What the process is stopped for does not count, see Note [Running time].
        """
        cdef EngineState *state = self.engine.state
        cdef ChannelState *channel = &self.state
        cdef double looked, running, seconds
        cdef int ended = load(&job.done)
        cdef int served
        if ended:
            return WAIT_DONE
        if is_child():
            check_process("the wait for an all-reduce")
        looked = now()
        running = look(&looked)
        # The engine's thread moves the messages, and this one sleeps until another rank wakes it.
        served = (
            state.running and channel.transport.wants_thread and channel.transport.sleep != NULL
            and hears(state)
        )
        with nogil:
            pthread_mutex_lock(&state.channels_lock)
            state.waiters += not served
            pthread_mutex_unlock(&state.channels_lock)
        try:
            while not ended:
                seconds = min(limit_of(channel, deadline, patience) - running, SIGNAL_CHECK)
                with nogil:
                    ended = drive(state, channel, job, now() + seconds, served)
                if not ended:
                    PyErr_CheckSignals()
                    running = look(&looked)
                    look_if_due(&looked)
                    if running > limit_of(channel, deadline, patience):
                        return WAIT_TIMED_OUT
        finally:
            pthread_mutex_lock(&state.channels_lock)
            state.waiters -= not served
            if state.asleep and state.pending:
                pthread_cond_signal(&state.wake)
            pthread_mutex_unlock(&state.channels_lock)
        if load(&channel.failure):
            self._raise_failure()
        return WAIT_DONE

    cdef void poke(self) noexcept nogil:
        """Take one step of progress if no engine thread does."""
        if peek(&self.state.pending) and not (
            self.engine.state.running and self.state.transport.wants_thread
        ):
            self.engine.step()

    def allocate(self, sizes, tails=None, domain=None):
        """Return a `BucketMemory` for each of `sizes` in bytes; on a GPU, a `GpuMemory`.

        Collective.

        Args:
            sizes: of the buckets, with their tails.
            tails: how many bytes at the end of each stay in host memory. Ignored on the CPU,
                where all of them do.
            domain: each mean shall lie once for all ranks of a node that have the same number
                here, in a `CommonMemory`. Ignored where the transport cannot do that. None, on
                all ranks: on each rank.

        Raises:
            OSError: some rank has too little memory; raised on all ranks.
        """
        if self.transport is None:
            return allocate_private(sizes)
        if self.device is None:
            if domain is not None and hasattr(self.transport, "allocate_once"):
                return self.transport.allocate_once(sizes, domain)
            return self.transport.allocate(sizes)
        return self.transport.allocate(sizes, tails)

    def _raise_failure(self):
        cdef MPI_Comm comm = mpi.comm_null
        # The code may be that of another library than MPI.
        raise_failure = getattr(self.transport, "raise_failure", None)
        if raise_failure is not None:
            raise_failure(self.state.failure, self.state.failed_call)
        if self.communicator is not None:
            comm = <MPI_Comm><size_t>self.communicator.handle
        check(self.state.failure, self.state.failed_call, comm)
