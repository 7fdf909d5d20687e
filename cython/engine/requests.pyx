"""MPI requests of single operations: waited for by a thread, or moved along by the engine.

A collective that the caller waits for at once is tested by the caller and by nobody else.
One that is to progress in the background is submitted to the engine, whose thread tests it
together with the buckets of gradients.

Note [Messages from anybody]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
With netmod UCX, MPICH 5.0 never ends some receives from MPI_ANY_SOURCE whose message comes from
another node, and then delays what else the process receives. To ask whether a message has come
works. So an `Arrival` takes the place of such a request: whoever would test the request asks, and
receives what has come from the rank that it has come from. Until then MPI does not know the memory.
Only the engine asks, in the order in which receives began. Where one has asked in vain, none with
its tag asks before it has asked again: so messages come in the order of the receives.
"""

from cpython.exc cimport PyErr_CheckSignals
from posix.time cimport CLOCK_MONOTONIC, timespec

from mpiddp.engine.engine cimport WAIT_DONE, Engine, look_if_due
from mpiddp.engine.forks cimport is_child
from mpiddp.engine.interface cimport ADVANCE_DONE, ADVANCE_PENDING, Advance, Job, Transport
from mpiddp.mpi.calls cimport MPI_Comm, MPI_Message, MPI_Request, MPI_SUCCESS, mpi
from mpiddp.mpi.errors cimport check, check_errno
from mpiddp.system.posix cimport (
    as_timespec, getpid, load, now, pthread_cond_broadcast, pthread_cond_destroy,
    pthread_cond_init, pthread_cond_timedwait, pthread_condattr_destroy, pthread_condattr_init,
    pthread_condattr_setclock, pthread_condattr_t, pthread_mutex_destroy, pthread_mutex_init,
    pthread_mutex_lock, pthread_mutex_unlock, sched_yield, sleep_for, store,
)
from mpiddp.system.running_time cimport look
from mpiddp.system.waiting cimport SPIN, sleep_after
from mpiddp.engine.forks import check as check_process


cdef double SIGNAL_CHECK = 0.1

# A collective may need hundreds of calls of MPI_Test, one to start each segment (MPI_Ireduce in
# Open MPI does), and a call does not tell whether it helped. So a caller with nothing else to do
# yields for longer than the engine before it sleeps, and after each sleep tests for a while.
cdef double YIELD = 20e-3
cdef double AWAKE = 100e-6

# Most callers wait at once for what they begin. The engine's thread takes a core for the copy of a
# large message, perhaps that of another rank, and does not make it faster.
cdef double LEFT = 200e-6

# How long it may take to take back a receive; then its memory is kept.
cdef double LONGEST = 1.0

cdef enum:
    TAKEN_BACK = 1
    DROPPED = 2

# Operations that nobody waits for any more: MPI or the engine may still use their memory. None
# when the interpreter collects its last objects.
_abandoned = []
# Those that the engine does not test any more, so that its thread may sleep.
_dropped = []


cdef int begin_round(Transport *transport, int *advanced) noexcept nogil:
    """Let all arrivals ask again."""
    (<RequestsState *>transport).asked = 0
    return MPI_SUCCESS


cdef int may_ask(RequestsState *state, RequestState *arrival) noexcept nogil:
    """Return whether no earlier arrival with its tag has asked in vain in this round."""
    cdef int index
    if state.asked > MOST_ASKED:
        return 0
    for index in range(state.asked):
        if state.comms[index] == arrival.comm and state.tags[index] == arrival.tag:
            return 0
    return 1


cdef void note_in_vain(RequestsState *state, RequestState *arrival) noexcept nogil:
    if state.asked < MOST_ASKED:
        state.comms[state.asked] = arrival.comm
        state.tags[state.asked] = arrival.tag
    state.asked += 1


cdef int test_or_receive(
        RequestsState *all_of_them, RequestState *state, int *finished) noexcept nogil:
    """Test a request, and receive first what has come for an arrival; return MPI's error code."""
    cdef MPI_Message message
    cdef int found = 0, code
    if state.awaits:
        if not may_ask(all_of_them, state):
            return MPI_SUCCESS
        code = mpi.improbe(
            mpi.any_source, state.tag, state.comm, &found, &message, &state.status)
        if code != MPI_SUCCESS or not found:
            note_in_vain(all_of_them, state)
            return code
        state.awaits = 0
        code = mpi.imrecv(state.buffer, state.count, mpi.byte, &message, &state.request)
        if code != MPI_SUCCESS:
            return code
    return mpi.test(&state.request, finished, &state.status)


cdef Advance advance(Transport *transport, Job *job, int helping) noexcept nogil:
    """Test one submitted request; one that failed is done, and the others go on."""
    cdef RequestState *state = <RequestState *>job.context
    cdef int finished = 0
    cdef int wish = load(&state.given_up)
    if wish == DROPPED:
        return ADVANCE_DONE
    if wish == TAKEN_BACK:      # by the thread that tests it, as MPI wants
        store(&state.given_up, 0)
        if state.awaits:
            return ADVANCE_DONE
        mpi.cancel(&state.request)
    state.code = test_or_receive(<RequestsState *>transport, state, &finished)
    if finished or state.code != MPI_SUCCESS:
        return ADVANCE_DONE
    return ADVANCE_PENDING


cdef void finished(Transport *transport) noexcept nogil:
    cdef RequestsState *state = <RequestsState *>transport
    pthread_mutex_lock(&state.lock)
    state.finished += 1
    if state.watchers:
        pthread_cond_broadcast(&state.changed)
    pthread_mutex_unlock(&state.lock)


cdef int drive(RequestState *state, Engine engine, double idle_since, double until) noexcept nogil:
    """Test a request until it has ended; return 0 if `until` passed before."""
    cdef int finished = 0
    cdef double time, slept = 0.0
    while True:
        state.code = mpi.test(&state.request, &finished, &state.status)
        if finished or state.code != MPI_SUCCESS:
            return 1
        time = now()
        # Other ranks may need a bucket of this rank before they reach this operation.
        if engine.step():
            idle_since = time
        if time > until:
            return 0
        if time - idle_since < SPIN:
            continue
        if time - idle_since < YIELD or time - slept < AWAKE:
            sched_yield()
        else:
            sleep_for(sleep_after(time - idle_since))
            slept = now()


cdef class Requests:
    """The requests of a process's collectives in flight.

    Not collective.

    Args:
        engine: makes progress with what is submitted.
        crowded: whether there are fewer cores than waiting ranks; then nobody spins.
        thread_has_core: whether the engine's thread takes no core from those that compute.
    """

    def __cinit__(self, Engine engine not None, *, bint crowded, bint thread_has_core=False):
        cdef pthread_condattr_t attributes
        self.engine = engine
        self.crowded = crowded
        self.thread_has_core = engine.threaded and thread_has_core
        self.process_id = getpid()
        self.state.transport.wants_thread = True
        self.state.transport.quiet = True
        self.state.transport.left_to_caller = LEFT
        self.state.transport.yields = YIELD
        self.state.transport.call = "MPI_Test"
        self.state.transport.poll = begin_round
        self.state.transport.advance = advance
        self.state.transport.finished = finished
        check_errno(pthread_mutex_init(&self.state.lock, NULL), "pthread_mutex_init")
        check_errno(pthread_condattr_init(&attributes), "pthread_condattr_init")
        check_errno(
            pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC), "pthread_condattr_setclock"
        )
        check_errno(pthread_cond_init(&self.state.changed, &attributes), "pthread_cond_init")
        pthread_condattr_destroy(&attributes)

    def __dealloc__(self):
        if self.process_id == getpid():
            pthread_cond_destroy(&self.state.changed)
            pthread_mutex_destroy(&self.state.lock)

    def submit(self, Pending pending not None):
        """Let the engine move a request along. Not collective.

        The first call starts the engine's thread, if it is to have one.

        Raises:
            RuntimeError: the engine has stopped.
        """
        if self.channel is None:
            self.channel = self.engine.open_channel(self)
        pending.state.job.count = 1
        pending.state.job.context = &pending.state
        pending.channel = self.channel
        self.channel.submit(&pending.state.job)

    def watch(self, unsigned int ticket, double seconds):
        """Sleep until some submitted request has finished since `ticket` was taken, or `wake`.

        Makes no progress by itself. Not collective.

        Returns:
            A new ticket.
        """
        cdef timespec until = as_timespec(now() + seconds)
        with nogil:
            pthread_mutex_lock(&self.state.lock)
            self.state.watchers += 1
            while self.state.finished == ticket:
                if pthread_cond_timedwait(&self.state.changed, &self.state.lock, &until):
                    break
            self.state.watchers -= 1
            ticket = self.state.finished
            pthread_mutex_unlock(&self.state.lock)
        return ticket

    def wake(self):
        """Make all calls of `watch` return. Not collective."""
        finished(&self.state.transport)

    @property
    def ticket(self):
        """For `watch`: how many requests have finished by now."""
        cdef unsigned int ticket
        pthread_mutex_lock(&self.state.lock)
        ticket = self.state.finished
        pthread_mutex_unlock(&self.state.lock)
        return ticket

    @property
    def address(self):
        """Where the engine finds the C ``Transport``."""
        return <size_t>&self.state.transport


cdef class Arrival:
    """What a message from any rank is to be received into, see Note [Messages from anybody].

    Not collective.

    Args:
        address: of the memory.
        count: its bytes.
        tag: of the message.
    """

    def __cinit__(self, size_t address, int count, int tag):
        self.address = address
        self.count = count
        self.tag = tag


cdef class Pending:
    """One nonblocking MPI operation.

    Not collective.

    Args:
        requests: those of the process.
        request: mpi4py's object, which nobody else tests or waits for; or an `Arrival`; or a
            function that makes one, for an operation that is to `begin` later.
        communicator: mpi4py's object, on which it runs; named in errors.
        call: the MPI function that began it, for errors.
        memory: what MPI reads and writes; kept until the operation has ended, even if an exception
            or Ctrl-C has left this object to the garbage collector.

    Attributes:
        expected: how many bytes a message must have that is received here; -1: anything.
    """

    def __cinit__(self, Requests requests not None, request, communicator, str call, memory):
        self.requests = requests
        self.request = request
        self.communicator = communicator
        self.call = call
        self.memory = memory
        if isinstance(request, Arrival):
            self.state.comm = <MPI_Comm><size_t>communicator.handle
            self.state.buffer = <void *>(<Arrival>request).address
            self.state.count = (<Arrival>request).count
            self.state.tag = (<Arrival>request).tag
            self.state.awaits = 1
        elif callable(request):
            self.later = request
        else:
            self.state.request = <MPI_Request><size_t>request.handle
        self.expected = -1

    def __del__(self):
        if not self.done and self.later is None and _abandoned is not None:
            _abandoned[:] = [pending for pending in _abandoned if not pending.done]
            _abandoned.append(self)

    @property
    def begun(self):
        """Whether MPI knows of it."""
        return self.later is None

    def begin(self):
        """Call MPI, and let the engine move it along. Not collective, but in order.

        Harmless if it was taken back before. An error is raised by the next `test` or `wait`.
        """
        if self.later is None:
            return
        if not self.ended:
            try:
                self.request = self.later()
                self.state.request = <MPI_Request><size_t>self.request.handle
                self.requests.submit(self)
            except Exception as error:
                self.error = error
                self.ended = True
        self.later = None       # at last: other threads look at it

    def submit(self):
        """Let the engine move it along. Not collective. Raises what `Requests.submit` does."""
        self.requests.submit(self)

    def hand_over(self):
        """Do nothing: the engine has it. Not collective."""

    @property
    def job(self):
        """Where the engine's job is, for its record."""
        return <size_t>&self.state.job

    @property
    def done(self):
        """Whether it is known to have ended, well or not; nothing is tested."""
        return bool(self.ended or (self.channel is not None and load(&self.state.job.done)))

    def test(self):
        """Take a step of progress; return whether it has ended. Not collective.

        Raises:
            MPIError: it ended with an error.
        """
        cdef int finished = 0
        if not self.done:
            if self.later is not None:
                return False
            if is_child():
                check_process(f"the test of {self.call}")
            if self.channel is not None:
                self.requests.engine.step()
            elif not self.state.awaits:
                self.state.code = mpi.test(&self.state.request, &finished, &self.state.status)
                self.ended = finished or self.state.code != MPI_SUCCESS
        if self.done:
            self.check_result()
            return True
        return False

    def wait(self, double seconds):
        """Make progress until it has ended; return whether it has in time. Not collective.

        What the process is stopped for does not count, see Note [Running time]. It must have begun.

        Raises:
            MPIError: it ended with an error.
            KeyboardInterrupt: or whatever else a signal handler raises.
        """
        cdef double began = now()
        cdef double idle_since = began - SPIN if self.requests.crowded else began
        cdef double until
        cdef double looked = began
        cdef double running = look(&looked)
        cdef double limit = running + seconds
        cdef int finished = self.done
        cdef Engine engine = self.requests.engine
        if is_child() and not finished:
            check_process(f"the wait for {self.call}")
        if self.state.awaits and self.channel is None:
            self.requests.submit(self)
        while not finished:
            until = now() + min(limit - running, SIGNAL_CHECK)
            if self.channel is not None:
                finished = (
                    self.channel.wait_until(&self.state.job, until, 0.0) == WAIT_DONE
                    or load(&self.state.job.done)
                )
            else:
                with nogil:
                    finished = drive(&self.state, engine, idle_since, until)
                self.ended = finished
            if not finished:
                PyErr_CheckSignals()
                if self.channel is not None:
                    looked = now()  # its own wait has looked
                running = look(&looked)
                look_if_due(&looked)
                if running > limit:
                    return False
        self.check_result()
        return True

    def take_back(self):
        """End a receive for which no message has come; let the engine forget anything else.

        Not collective. What comes later is not written to the receive's memory any more. That of
        anything else is kept, since MPI has no way to end it.
        """
        cdef double idle_since = now(), until = now() + LONGEST
        if self.later is not None:
            self.ended = True
        if self.done:
            return
        if self.call != "MPI_Irecv":
            if self.channel is not None:
                _dropped.append(self)
                store(&self.state.given_up, DROPPED)
            return
        if self.channel is not None:
            store(&self.state.given_up, TAKEN_BACK)
            self.channel.wait_until(&self.state.job, until, 0.0)
            return
        if self.state.awaits:
            self.ended = True
            return
        mpi.cancel(&self.state.request)
        with nogil:
            self.ended = drive(&self.state, self.requests.engine, idle_since, until)

    cdef int check_result(self) except -1:
        cdef MPI_Comm comm
        self.request = self.memory = None
        if self.error is not None:
            raise self.error
        if self.state.code == MPI_SUCCESS:
            return 0
        comm = <MPI_Comm><size_t>self.communicator.handle
        return check(self.state.code, self.call.encode(), comm)

    @property
    def source(self):
        """The rank, in the communicator, that sent what was received here."""
        return mpi.status_source(&self.state.status)

    @property
    def received(self):
        """How many bytes were received."""
        cdef long long count = 0
        check(
            mpi.status_bytes(&self.state.status, &count), "MPI_Get_elements_x", mpi.comm_null
        )
        return count
