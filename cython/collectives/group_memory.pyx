"""The memory in which the ranks of a process group carry out collectives, and those under way.

A group has its part of one piece that all ranks of the node share, see Note [One piece for all] in
transports/shared_memory.pyx; what no collective has written to takes no memory. A collective begins
on the thread that calls it. What other ranks hold up is handed to the engine, in the order of the
calls, on a channel of the group; see Note [Rounds in memory] and Note [Reading each other's
memory].

Note [Awaited callers]
~~~~~~~~~~~~~~~~~~~~~~
Waking the engine's thread takes longer than a small collective. When this rank has shown all that
the others read, they need no more of it until its next collective: in the last round it only takes.
So that last step of an asynchronous collective is left to its caller, who waits for it sooner or
later, tests it, or begins the next one. Only one is left so at a time, and only one thread drives
it. Who asks for a future does not come back: then the engine gets it.
"""

import os

from cpython.exc cimport PyErr_CheckSignals
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from mpiddp.collectives.direct_jobs cimport advance, goes_directly, leave
from mpiddp.collectives.memory_jobs cimport (
    DEAL, EXCHANGE, FILL, GATHER_ALL, HEAD_BYTES, MEET, REDUCE_ALL, REDUCE_PARTS, REDUCE_TO_ROOT,
    REGION_BYTES, SPREAD, TRADE, MemoryJob, MemoryState, has_shown_all,
)
from mpiddp.collectives.patience cimport drive, patience
from mpiddp.engine.engine cimport WAIT_DONE, look_if_due
from mpiddp.engine.forks cimport is_child
from mpiddp.engine.interface cimport Transport
from mpiddp.system.posix cimport load, now, peek, sleep_for
from mpiddp.system.running_time cimport look
from mpiddp.transports.shared cimport Bell, load32, sleep_on
from mpiddp.transports.shared_memory cimport Mapping
from mpiddp.engine.forks import check as check_process


cdef extern from "<sys/mman.h>" nogil:
    int madvise(void *, size_t, int)
    const int MADV_REMOVE

# What the kernels have no element type for.
NO_ELEMENT = -1

cdef double SIGNAL_CHECK = 0.1
# Seconds between two looks whether another thread has done.
cdef double SHORT = 5e-6


cdef unsigned int take_ticket(Transport *transport) noexcept nogil:
    return load32(&(<MemoryState *>transport).bell.rung)


cdef void sleep(Transport *transport, unsigned int ticket, double seconds) noexcept nogil:
    sleep_on((<MemoryState *>transport).bell, ticket, seconds)


cdef void finished(Transport *transport) noexcept nogil:
    """Wake the threads that watch what nobody waits for, as the end of a request does."""
    cdef Transport *requests = (<MemoryState *>transport).requests
    requests.finished(requests)


cdef char **addresses_of(addresses, size_t ranks) except NULL:
    """Return an array of one address for each rank, to be freed."""
    cdef char **result
    cdef size_t rank
    assert <size_t>len(addresses) == ranks
    result = <char **>calloc(ranks, sizeof(char *))
    if result == NULL:
        raise MemoryError
    for rank in range(ranks):
        result[rank] = <char *><size_t>addresses[rank]
    return result


cdef void clear_regions(char *regions, size_t ranks) noexcept:
    """Leave a group's part of the memory as it was before any group used it."""
    if madvise(regions, ranks * REGION_BYTES, MADV_REMOVE):
        memset(regions, 0, ranks * REGION_BYTES)


cdef GroupMemory make_group(
    Mapping mapping, char *regions, unsigned int ranks, unsigned int rank, requests
):
    """Return a group whose first rank's region is there."""
    cdef GroupMemory group = GroupMemory.__new__(GroupMemory)
    group.mapping = mapping
    group.engine = requests.engine
    group.requests = requests
    group.thread_has_core = requests.thread_has_core
    group.under_way = []
    group.state.regions = regions
    group.state.bell = <Bell *>(regions + HEAD_BYTES - sizeof(Bell))
    group.state.ranks = ranks
    group.state.rank = rank
    group.state.requests = <Transport *><size_t>requests.address
    group.state.transport.advance = advance
    group.state.transport.finished = finished
    group.state.transport.take_ticket = take_ticket
    group.state.transport.sleep = sleep
    group.state.transport.call = "the wait in the node's memory"
    group.state.transport.quiet = True
    group.state.transport.wants_thread = True
    group.state.transport.crowded = requests.crowded
    if requests.crowded:
        group.state.transport.yields = patience(True, True, 0)
    return group


cdef class GroupMemory:
    """Collectives of one group in memory. Made by `NodeMemory.of_group`.

    The methods begin one, and return what waits for it. Collective: all ranks begin the same ones
    in the same order. Addresses are of memory that `memory` keeps; bytes are the same on all ranks.

    Attributes:
        at_once: whether the caller waits at once for what it begins next.
    """

    @property
    def reads_directly(self):
        """Whether long ones do."""
        return self.state.moves_from != 0

    @property
    def direct_from(self):
        """From how many bytes on they do, see `read_directly`."""
        return self.state.moves_from, self.state.sums_from, self.state.all_reduces_from

    def read_directly(self, size_t moves_from, size_t sums_from, size_t all_reduces_from):
        """Let long ones read the other ranks' memory, which must be readable. Not collective.

        Args:
            moves_from: from how many bytes of a rank's larger side on they are moved so; 0: never.
            sums_from: the same for what is reduced.
            all_reduces_from: the same for what is reduced for all. All are the same on all ranks.
        """
        self.state.moves_from, self.state.sums_from = moves_from, sums_from
        self.state.all_reduces_from = all_reduces_from

    @property
    def address(self):
        """Where the engine finds the C ``Transport``."""
        return <size_t>&self.state.transport

    def meet(self):
        """Wait for all ranks."""
        cdef MemoryPending pending = MemoryPending.__new__(MemoryPending)
        pending.job_state.kind = MEET
        return self.start(pending, None)

    def reduce(
        self, size_t source, size_t target, size_t size, int element, int way, double divisor,
        int root, memory,
    ):
        """Reduce `size` bytes of all ranks in order of rank.

        Args:
            source: where this rank's are.
            target: where the result goes, which may be `source`.
            size: bytes.
            element: of the kernels; `NO_ELEMENT`: see `way`.
            way: of `mpi.combining.WAYS`.
            divisor: by which the kernels divide the sum.
            root: which rank gets the result; -1: all.
            memory: what is kept.
        """
        cdef MemoryPending pending = MemoryPending.__new__(MemoryPending)
        pending.job_state.kind = REDUCE_ALL if root < 0 else REDUCE_TO_ROOT
        pending.job_state.root = <unsigned int>max(root, 0)
        pending.job_state.source = <char *>source
        pending.job_state.target = <char *>target
        pending.job_state.size = size
        self._reduces(pending, element, way, divisor)
        return self.start(pending, memory)

    def reduce_parts(
        self, sources, size_t target, size_t size, int element, int way, double divisor, memory
    ):
        """Reduce for each rank `size` bytes of all ranks, and take those for this one.

        Args:
            sources: an address for each rank; the others as for `reduce`.
        """
        cdef MemoryPending pending = MemoryPending.__new__(MemoryPending)
        pending.job_state.kind = REDUCE_PARTS
        pending.job_state.target = <char *>target
        pending.job_state.size = size
        pending.job_state.sources = addresses_of(sources, self.state.ranks)
        self._reduces(pending, element, way, divisor)
        return self.start(pending, memory)

    def gather(self, size_t source, targets, size_t size, memory):
        """Take `size` bytes of each rank.

        Args:
            source: where this rank's are.
            targets: for each rank, where its bytes go. This rank's may be `source`.
            size: bytes of one rank.
            memory: what is kept.
        """
        cdef MemoryPending pending = MemoryPending.__new__(MemoryPending)
        pending.job_state.kind = GATHER_ALL
        pending.job_state.source = <char *>source
        pending.job_state.size = size
        pending.job_state.targets = addresses_of(targets, self.state.ranks)
        return self.start(pending, memory)

    def spread(self, size_t address, size_t size, int root, memory):
        """Take `size` bytes of one rank, which has them there, to the same address."""
        cdef MemoryPending pending = MemoryPending.__new__(MemoryPending)
        pending.job_state.kind = SPREAD
        pending.job_state.root = <unsigned int>root
        pending.job_state.source = pending.job_state.target = <char *>address
        pending.job_state.size = size
        return self.start(pending, memory)

    def exchange(self, sources, targets, size_t size, memory):
        """Send `size` bytes to each rank, and take as many from each."""
        cdef MemoryPending pending = MemoryPending.__new__(MemoryPending)
        pending.job_state.kind = EXCHANGE
        pending.job_state.size = size
        pending.job_state.sources = addresses_of(sources, self.state.ranks)
        pending.job_state.targets = addresses_of(targets, self.state.ranks)
        return self.start(pending, memory)

    def trade(self, sources, targets, sizes, memory, int root=-1):
        """Send each rank as many bytes as there are for it, and take those that it has.

        Args:
            sources: an address for each rank. What this one has for itself is copied as well.
            targets: the same.
            sizes: bytes for each rank, and then from each.
            memory: what is kept.
            root: the only rank that has something for others; -1: all may.
        """
        cdef MemoryPending pending = MemoryPending.__new__(MemoryPending)
        cdef Py_ssize_t number
        cdef Py_ssize_t own = self.state.rank
        assert len(sizes) == 2 * self.state.ranks
        pending.job_state.kind = TRADE if root < 0 else DEAL
        pending.job_state.root = <unsigned int>max(root, 0)
        pending.job_state.sources = addresses_of(sources, self.state.ranks)
        pending.job_state.targets = addresses_of(targets, self.state.ranks)
        pending.job_state.sizes = <size_t *>calloc(len(sizes), sizeof(size_t))
        if pending.job_state.sizes == NULL:
            raise MemoryError
        for number in range(len(sizes)):
            pending.job_state.sizes[number] = sizes[number]
        pending.job_state.size = max(
            size for number, size in enumerate(sizes) if number % self.state.ranks != own)
        return self.start(pending, memory)

    def _reduces(self, MemoryPending pending, int element, int way, double divisor):
        pending.job_state.element = element
        pending.job_state.way = way if element == NO_ELEMENT else 0
        pending.job_state.job.divisor = divisor

    cdef MemoryPending start(self, MemoryPending pending, object memory):
        cdef bint first
        cdef MemoryJob *job = &pending.job_state
        if self.awaited is not None:
            self.settle()
        first = self.is_free()
        pending.group = self
        pending.memory = memory
        pending.job_state.phase = FILL
        pending.job_state.job.count = 1
        pending.job_state.job.context = &pending.job_state
        if first:
            with nogil:
                pending.ended = drive(&self.state.transport, &job.job, 0.0)
                if not pending.ended and (
                    self.at_once or not (self.thread_has_core or self.may_leave(job))
                ):
                    pending.ended = drive(
                        &self.state.transport, &job.job,
                        patience(self.at_once, self.state.transport.crowded, job.size),
                    )
        if pending.ended:
            pending.memory = None
            pending.check()
            return pending
        while self.under_way and self.under_way[0].left:    # they end in their order
            del self.under_way[0]
        self.under_way.append(pending)
        if first and not self.at_once and self.may_leave(job):
            self.awaited = pending
        else:
            self.submit(pending)
        return pending

    cdef bint may_leave(self, MemoryJob *job) noexcept nogil:
        """Whether the others need no more of this rank."""
        return not goes_directly(&self.state, job) and has_shown_all(&self.state, job)

    cdef int submit(self, MemoryPending pending) except -1:
        """Let the engine move something along."""
        if self.channel is None:
            self.channel = self.engine.open_channel(self)
        pending.submitted = True
        self.channel.submit(&pending.job_state.job)
        return 0

    cdef int settle(self) except -1:
        """End what a caller is awaited for, see Note [Awaited callers], or submit it."""
        cdef MemoryPending pending = self.awaited
        self.let_drive()
        if pending is None or self.awaited is not pending:
            return 0
        if not pending.step():
            self.awaited = None
            self.submit(pending)
        return 0

    cdef void let_drive(self):
        """Wait while another thread drives what its caller is awaited for."""
        while self.awaited is not None and self.awaited.driven:
            with nogil:
                sleep_for(SHORT)

    def close(self):
        """Touch the memory no more. What is under way never ends. Not collective."""
        self.give_up()
        self.awaited = None
        if self.channel is not None and not load(&self.channel.state.failure):
            self.engine.close_channel(self.channel)
            self.under_way.clear()
        self.channel = None

    cdef bint is_free(self):
        """Whether nothing is under way, and something may begin."""
        return not self.state.given_up and (
            not self.under_way or self.under_way[len(self.under_way) - 1].left
        )

    cdef void give_up(self):
        """Let what is under way go, and wait until the engine has done so."""
        self.state.given_up = True
        if self.state.moves_from:
            with nogil:
                leave(&self.state)
        self.let_drive()
        if self.channel is None:
            return
        # After a failure the engine does not look at a channel any more.
        while peek(&self.channel.state.pending) and not load(&self.channel.state.failure):
            self.engine.progress()

    def clear(self):
        """Leave the memory as it was before any group used it. By one rank, the last to close."""
        clear_regions(self.state.regions, self.state.ranks)


cdef class MemoryPending:
    """One collective in memory under way, as `Pending` is one of MPI.

    Not collective. Made by the methods of `GroupMemory`.
    """

    def __dealloc__(self):
        free(self.job_state.sources)
        free(self.job_state.sizes)
        free(self.job_state.targets)

    @property
    def begun(self):
        """Whether other ranks may know of it: always."""
        return True

    @property
    def expected(self):
        """How many bytes a message has: it is none."""
        return -1

    @property
    def left(self):
        """Whether the engine has left it, well or not."""
        return bool(self.ended or load(&self.job_state.job.done))

    @property
    def done(self):
        """Whether it has ended; nothing is tried."""
        return self.left and not (self.submitted and self.group.state.given_up)

    @property
    def job(self):
        """Where the engine's job is, for its record; 0: it is not the engine's any more."""
        return <size_t>&self.job_state.job

    cdef bint drives(self, bint patiently):
        """Move along what its caller is awaited for; return whether it has ended."""
        cdef bint ended
        cdef Transport *transport = &self.group.state.transport
        cdef double seconds = 0.0
        if patiently:
            seconds = patience(True, transport.crowded, self.job_state.size)
        self.driven = True
        with nogil:
            ended = drive(transport, &self.job_state.job, seconds)
        if ended and not self.group.state.given_up:
            self.ended = True
            self.memory = None
            self.group.awaited = None
        self.driven = False
        return self.ended

    cdef bint step(self):
        """Move along what its caller is awaited for, if other ranks have come."""
        return self.drives(False)

    def submit(self):
        """Do nothing: what has not ended is the engine's, or waits for its caller."""

    def hand_over(self):
        """Let it end without its caller, who waits in another way. Not collective."""
        if self.group.awaited is self:
            self.group.settle()

    cdef int check(self) except -1:
        """Raise what has kept this rank from its result."""
        cdef int failure = self.job_state.failure
        if failure:
            raise RuntimeError(
                f"rank {self.group.state.rank} of the group could not copy a tensor out of another "
                f"rank's memory or into it ({os.strerror(failure)}). What lies in memory of a "
                "device cannot be copied so: set MPIDDP_COLLECTIVES=copies")
        return 0

    def test(self):
        """Take a step of progress; return whether it has ended. Not collective.

        Raises:
            RuntimeError: this rank could not read another one's tensor.
        """
        if not self.done:
            if is_child():
                check_process("the test of a collective")
            if self.group.awaited is not self:
                self.group.engine.step()
            elif not self.driven:
                self.step()
        return self.result()

    cdef bint result(self) except -1:
        """Whether it has ended."""
        if not self.done:
            return False
        self.check()
        return True

    def wait(self, double seconds):
        """Wait until it has ended; return whether it has in time. Not collective.

        What the process is stopped for does not count, see Note [Running time].

        Raises:
            RuntimeError: this rank could not read another one's tensor, or a rank was lost.
            KeyboardInterrupt: or whatever else a signal handler raises.
        """
        cdef double looked, running, limit
        cdef Channel channel
        if self.result():
            return True
        if is_child():
            check_process("the wait for a collective")
        self.group.let_drive()
        if self.group.awaited is self and not self.drives(True):
            self.hand_over()
        if self.result():
            return True
        looked = now()
        running = look(&looked)
        limit = running + seconds
        while not self.group.state.given_up:
            channel = self.group.channel
            if channel is None:
                break
            if channel.wait_until(
                &self.job_state.job, now() + min(limit - running, SIGNAL_CHECK), 0.0
            ) == WAIT_DONE:
                return self.result()
            PyErr_CheckSignals()
            looked = now()
            running = look(&looked)
            look_if_due(&looked)
            if running > limit:
                break
        return self.result()

    def take_back(self):
        """Let the group's memory be: other ranks do not fit, or do not come. Not collective."""
        if not self.done:
            self.group.give_up()
