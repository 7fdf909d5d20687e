"""Run queues of all-reduces in order, on one thread that never spins.

The engine owns all gradient traffic of a process. It knows queues, chunks and
time; it knows neither autograd nor which MPI call a transport makes.

Note [Who makes progress]
~~~~~~~~~~~~~~~~~~~~~~~~~
MPI moves a nonblocking collective only while somebody is inside MPI. Exactly one
thread at a time is that somebody, the holder of `progress_lock`:

* the engine thread, while backward runs. Between steps it naps, because a thread
  that spins takes a core from the backward that it is meant to overlap with. The
  nap doubles while nothing finishes, until all waking in vain takes a hundredth of a
  core at most, and is cut short when work is submitted.
* the thread that waits at the end of backward. It announces itself (`waiters`),
  the engine thread goes to sleep, and the waiter tests without naps at first: it
  spins briefly, then yields, then sleeps, so that ranks that outnumber the cores
  do not burn each other's time.
* without an engine thread, each hook takes one step (`poke`).
"""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdlib cimport calloc, free
from posix.time cimport CLOCK_MONOTONIC

from mpi4py.libmpi cimport MPI_COMM_NULL, MPI_SUCCESS, MPI_Comm

from mpiddp.chunks cimport move_chunks
from mpiddp.errors cimport check, check_errno
from mpiddp.forks cimport is_child
from mpiddp.forks import check as check_process
from mpiddp.memory import allocate_private
from mpiddp.queues cimport fail
from mpiddp.system cimport (
    ask_for_slices,
    create_thread_without_signals,
    getpid,
    load,
    name_thread,
    now,
    processor_time,
    pthread_cond_destroy,
    pthread_cond_init,
    pthread_cond_signal,
    pthread_cond_wait,
    pthread_condattr_destroy,
    pthread_condattr_init,
    pthread_condattr_setclock,
    pthread_condattr_t,
    pthread_join,
    pthread_mutex_destroy,
    pthread_mutex_init,
    pthread_mutex_lock,
    pthread_mutex_trylock,
    pthread_mutex_unlock,
    sched_yield,
    store,
    wait_for_signal,
)
from mpiddp.waiting cimport YIELD, give_way, sleep_after


# How long to nap and wait, in seconds; design.md has the measurements behind them.
cdef double NAP_SHORTEST = 50e-6
cdef double NAP_LONGEST = 200e-6
cdef double NAP_LIMIT = 1e-3
cdef double NAPS_TO_WAKING = 100
cdef double SPIN_BEFORE_SLEEP = 50e-6
cdef double SIGNAL_CHECK = 0.1
cdef double ALERT = 10e-3


cdef enum:
    # The shortest that Linux grants: a backward on the same core is interrupted at once, instead
    # of 3 ms later, when a message has come.
    SLICE_NANOSECONDS = 100000


cdef int work_is_done(Work *work) noexcept nogil:
    return load(&work.done)


cdef size_t element_bytes(ElementType element) noexcept nogil:
    if element == ELEMENT_FLOAT32:
        return 4
    if element == ELEMENT_FLOAT64:
        return 8
    return 2


cdef int advance_works(EngineState *state, ChannelState *channel, int helping) noexcept nogil:
    """Let a transport move its works; return how many steps they took."""
    cdef Transport *transport = channel.transport
    cdef Work *work
    cdef Work *previous = NULL
    cdef Work *following
    cdef Advance status
    cdef int code, advanced = 0
    if transport.poll != NULL:
        code = transport.poll(transport, &advanced)
        if code != MPI_SUCCESS:
            fail(channel, code)
            return advanced
    pthread_mutex_lock(&state.queue_lock)
    work = channel.head
    pthread_mutex_unlock(&state.queue_lock)
    while work != NULL:
        status = transport.advance(transport, work, helping)
        if status == ADVANCE_FAILED:
            fail(channel, transport.code)
            return advanced
        if status == ADVANCE_BLOCKED:
            return advanced
        pthread_mutex_lock(&state.queue_lock)
        following = work.next
        if status == ADVANCE_DONE:
            if previous == NULL:
                channel.head = following
            else:
                previous.next = following
            if following == NULL:
                channel.tail = previous
            channel.pending -= 1
            if transport.wants_thread:
                state.pending -= 1
        pthread_mutex_unlock(&state.queue_lock)
        if status == ADVANCE_DONE:
            channel.last_progress = now()
            if not transport.quiet:
                state.chunks += 1
                state.thread_chunks += state.on_thread
            store(&work.done, 1)
            if transport.finished != NULL:
                transport.finished(transport)
        else:
            previous = work
        advanced += status != ADVANCE_PENDING
        work = following
    return advanced


cdef int step_channels(EngineState *state, int helping) noexcept nogil:
    """Take one step on every channel. The caller holds `progress_lock`."""
    cdef ChannelState *channel = state.channels
    cdef int advanced = 0
    while channel != NULL:
        if channel.pending and not channel.failure:
            if channel.transport.advance != NULL:
                advanced += advance_works(state, channel, helping)
            else:
                advanced += move_chunks(state, channel)
        channel = channel.next
    return advanced


cdef void enqueue(EngineState *state, ChannelState *channel, Work *work) noexcept nogil:
    cdef Transport *transport = channel.transport
    work.started = 0
    work.finished = 0
    work.next = NULL
    store(&work.done, 0)
    if transport.announce != NULL:
        transport.announce(transport, work)
    pthread_mutex_lock(&state.queue_lock)
    if channel.tail == NULL:
        channel.head = work
    else:
        channel.tail.next = work
    channel.tail = work
    channel.pending += 1
    if transport.wants_thread:
        state.pending += 1
        if transport.quiet:
            state.alert_until = now() + ALERT
        if state.running and not state.waiters and (state.asleep or not transport.quiet):
            pthread_cond_signal(&state.wake)
    pthread_mutex_unlock(&state.queue_lock)


cdef void *engine_thread(void *argument) noexcept nogil:
    cdef EngineState *state = <EngineState *>argument
    cdef double nap = NAP_SHORTEST
    cdef double longest = NAP_LONGEST
    cdef double ran = processor_time()
    cdef double running, waking = 0
    cdef int advanced
    name_thread("mpiddp engine")
    ask_for_slices(SLICE_NANOSECONDS)
    pthread_mutex_lock(&state.queue_lock)
    while not state.stop:
        if state.waiters or not state.pending:
            if now() < state.alert_until:
                wait_for_signal(&state.wake, &state.queue_lock, NAP_LONGEST)
            else:
                state.asleep = 1
                pthread_cond_wait(&state.wake, &state.queue_lock)
                state.asleep = 0
            nap = NAP_SHORTEST
            ran = processor_time()
            continue
        pthread_mutex_unlock(&state.queue_lock)
        advanced = 0
        if pthread_mutex_trylock(&state.progress_lock) == 0:
            state.on_thread = 1
            advanced = step_channels(state, False)
            state.on_thread = 0
            pthread_mutex_unlock(&state.progress_lock)
        running = processor_time()
        if advanced:
            nap = NAP_SHORTEST
        else:
            # What one wake-up costs, averaged over the last few.
            waking += 0.2 * (running - ran - waking)
            longest = min(max(NAPS_TO_WAKING * waking, NAP_LONGEST), NAP_LIMIT)
            nap = min(2 * nap, longest)
        ran = running
        pthread_mutex_lock(&state.queue_lock)
        if not state.stop and not state.waiters:
            state.naps += 1
            wait_for_signal(&state.wake, &state.queue_lock, nap)
    pthread_mutex_unlock(&state.queue_lock)
    return NULL


cdef void relax(
    EngineState *state, Transport *transport, unsigned int ticket, double idle
) noexcept nogil:
    """Give the core away; where other ranks wake this one, as soon as spinning does not pay."""
    if transport.sleep != NULL and not state.pending:
        # No messages to move: another rank's bell is all that this one waits for.
        if transport.crowded or idle > SPIN_BEFORE_SLEEP:
            transport.sleep(transport, ticket, SIGNAL_CHECK)
    elif transport.sleep != NULL and idle > YIELD:
        transport.sleep(transport, ticket, sleep_after(idle))
    else:
        give_way(idle)


cdef int drive(
    EngineState *state, ChannelState *channel, Work *work, double until
) noexcept nogil:
    """Make progress until `work` is done, its channel failed, or `until` passed."""
    cdef Transport *transport = channel.transport
    cdef double idle_since = now()
    cdef double time
    cdef unsigned int ticket = 0
    cdef int advanced
    while not load(&work.done) and not channel.failure:
        if transport.take_ticket != NULL:
            ticket = transport.take_ticket(transport)
        # If another thread is at it, nothing was looked at: do not sleep.
        advanced = 1
        if pthread_mutex_trylock(&state.progress_lock) == 0:
            advanced = step_channels(state, True)
            pthread_mutex_unlock(&state.progress_lock)
        else:
            sched_yield()
        time = now()
        if time > until:
            return 0
        if advanced:
            idle_since = time
        else:
            relax(state, transport, ticket, time - idle_since)
    return 1


cdef class Engine:
    """The progress engine of a process.

    Not collective.

    Args:
        threaded: whether a thread of its own makes progress; without it progress
            is made by `Channel.poke` and while waiting.

    Raises:
        OSError: the thread cannot be created.
    """

    def __cinit__(self, *, bint threaded=True):
        cdef pthread_condattr_t attributes
        self.threaded = threaded
        self.channels = []
        self.process_id = getpid()
        self.state = <EngineState *>calloc(1, sizeof(EngineState))
        if self.state == NULL:
            raise MemoryError
        check_errno(pthread_mutex_init(&self.state.queue_lock, NULL), "pthread_mutex_init")
        check_errno(pthread_mutex_init(&self.state.progress_lock, NULL), "pthread_mutex_init")
        check_errno(pthread_condattr_init(&attributes), "pthread_condattr_init")
        check_errno(
            pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC), "pthread_condattr_setclock"
        )
        check_errno(pthread_cond_init(&self.state.wake, &attributes), "pthread_cond_init")
        pthread_condattr_destroy(&attributes)

    def __dealloc__(self):
        if self.state == NULL:
            return
        if self.process_id == getpid():
            self._stop_thread()
            pthread_cond_destroy(&self.state.wake)
            pthread_mutex_destroy(&self.state.progress_lock)
            pthread_mutex_destroy(&self.state.queue_lock)
        free(self.state)

    def open_channel(self, transport, communicator=None):
        """Add a queue and return it.

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
        pthread_mutex_lock(&self.state.queue_lock)
        channel.state.next = self.state.channels
        self.state.channels = &channel.state
        pthread_mutex_unlock(&self.state.queue_lock)
        pthread_mutex_unlock(&self.state.progress_lock)
        self.channels.append(channel)
        if (
            self.threaded and not self.state.running and channel.state.transport != NULL
            and channel.state.transport.wants_thread
        ):
            check_errno(
                create_thread_without_signals(&self.state.thread, engine_thread, self.state),
                "pthread_create",
            )
            self.state.running = 1
        return channel

    def close_channel(self, Channel channel not None):
        """Remove an idle queue, so that its communicator may be freed, and the one below it.

        Not collective.

        Raises:
            RuntimeError: the queue has work in flight.
        """
        cdef ChannelState **link
        if channel.state.pending:
            raise RuntimeError("cannot close a channel with all-reduces in flight")
        pthread_mutex_lock(&self.state.progress_lock)
        pthread_mutex_lock(&self.state.queue_lock)
        link = &self.state.channels
        while link[0] != NULL:
            if link[0] == &channel.state:
                link[0] = channel.state.next
                break
            link = &link[0].next
        pthread_mutex_unlock(&self.state.queue_lock)
        pthread_mutex_unlock(&self.state.progress_lock)
        channel.state.transport = NULL
        channel.closed = True
        self.channels.remove(channel)
        inner = getattr(channel.transport, "inner", None)
        if inner is not None:
            self.close_channel(inner)

    def stop(self):
        """Stop the thread and forget the channels; what is in flight is abandoned.

        Not collective. Harmless when called twice, and in a forked child, where
        the thread does not exist.
        """
        if self.process_id == getpid():
            self._stop_thread()
            pthread_mutex_lock(&self.state.progress_lock)
            self.state.channels = NULL
            self.state.pending = 0
            pthread_mutex_unlock(&self.state.progress_lock)

    cdef _stop_thread(self):
        if not self.state.running:
            return
        pthread_mutex_lock(&self.state.queue_lock)
        self.state.stop = 1
        pthread_cond_signal(&self.state.wake)
        pthread_mutex_unlock(&self.state.queue_lock)
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
        """What the engine has done with gradients since it was made, by name.

        ``submitted``: all-reduces; ``chunks``: chunks that finished, of which ``thread_chunks`` on
        the engine thread; ``naps``: times that thread slept.
        """
        return {
            "submitted": self.state.submitted,
            "chunks": self.state.chunks,
            "thread_chunks": self.state.thread_chunks,
            "naps": self.state.naps,
        }

    def progress(self):
        """Take one step, if nobody else is at it. Not collective."""
        self.step()

    cdef int step(self) noexcept nogil:
        cdef int advanced = 0
        if not is_child() and pthread_mutex_trylock(&self.state.progress_lock) == 0:
            advanced = step_channels(self.state, False)
            pthread_mutex_unlock(&self.state.progress_lock)
        return advanced


cdef class Channel:
    """An ordered queue of all-reduces over one communicator. Made by `Engine.open_channel`."""

    @property
    def idle(self):
        """Whether everything submitted here is done and nothing has failed."""
        return self.state.pending == 0 and not self.state.failure

    cdef int submit(self, Work *work) except -1:
        """Queue `work`; its memory belongs to the engine until it is done."""
        cdef EngineState *state = self.engine.state
        if is_child():
            check_process("an all-reduce of gradients")
        if self.state.failure:
            self._raise_failure()
        if self.closed:
            raise RuntimeError("the process group of this module has been destroyed")
        if self.state.transport == NULL or not self.state.transport.quiet:
            state.submitted += 1
        if self.state.transport == NULL or work.count == 0:
            store(&work.done, 1)
        else:
            enqueue(state, &self.state, work)
        return 0

    cdef WaitStatus wait(self, Work *work, double timeout) except *:
        """Drive the engine until `work` is done.

        `timeout` counts, in seconds, from the last chunk that finished here: for all-reduces of one
        module, which follow one another.
        """
        return self.wait_until(work, now(), timeout)

    cdef WaitStatus wait_until(self, Work *work, double deadline, double patience) except *:
        """Drive the engine until `work` is done or it is later than `deadline`.

        With `patience`, it must also be so many seconds since the last chunk that finished here,
        and since `deadline`. Without, what others have submitted here does not count.
        """
        cdef EngineState *state = self.engine.state
        cdef ChannelState *channel = &self.state
        cdef double until
        cdef int ended = load(&work.done)
        if ended:
            return WAIT_DONE
        if is_child():
            check_process("the wait for an all-reduce")
        with nogil:
            pthread_mutex_lock(&state.queue_lock)
            state.waiters += 1
            pthread_mutex_unlock(&state.queue_lock)
        try:
            while not ended:
                until = deadline
                if patience:
                    until = max(deadline, channel.last_progress) + patience
                with nogil:
                    ended = drive(state, channel, work, min(until, now() + SIGNAL_CHECK))
                if not ended:
                    PyErr_CheckSignals()
                    if patience:
                        until = max(deadline, channel.last_progress) + patience
                    if now() > until:
                        return WAIT_TIMED_OUT
        finally:
            pthread_mutex_lock(&state.queue_lock)
            state.waiters -= 1
            if state.asleep and state.pending:
                pthread_cond_signal(&state.wake)
            pthread_mutex_unlock(&state.queue_lock)
        if channel.failure:
            self._raise_failure()
        return WAIT_DONE

    cdef void poke(self) noexcept nogil:
        """Take one step of progress where no thread does it."""
        if self.state.pending and not (
            self.engine.state.running and self.state.transport.wants_thread
        ):
            self.engine.step()

    def allocate(self, sizes, tails=None):
        """Return a `BucketMemory` for each of `sizes` in bytes, a `DeviceMemory` on a device.

        Collective.

        Args:
            sizes: of the buckets, gradients and tails.
            tails: how much of each, at its end, has its place in host memory. On the CPU all
                has, and this is ignored.

        Raises:
            OSError: some rank has too little memory; raised on all ranks.
        """
        if self.transport is None:
            return allocate_private(sizes)
        if self.device is None:
            return self.transport.allocate(sizes)
        return self.transport.allocate(sizes, tails)

    def _raise_failure(self):
        cdef MPI_Comm comm = MPI_COMM_NULL
        # Codes of another library than MPI.
        raise_failure = getattr(self.transport, "raise_failure", None)
        if raise_failure is not None:
            raise_failure(self.state.failure, self.state.failed_call)
        if self.communicator is not None:
            comm = <MPI_Comm><size_t>self.communicator.handle
        check(self.state.failure, self.state.failed_call, comm)
