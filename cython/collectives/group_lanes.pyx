"""The lanes in which a process group over several nodes carries out collectives, and those there.

See Note [Lanes of a group] in lane_jobs.pyx. All are moved along by the engine, in the order of the
calls, on a channel of the group.
"""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint32_t
from libc.stdlib cimport calloc, free, malloc

from mpiddp.collectives.group_memory cimport addresses_of, clear_regions
from mpiddp.collectives.lane_jobs cimport BEGINS, TRAVELS, LaneState, Stream, advance
from mpiddp.collectives.memory_jobs cimport (
    GATHER_ALL, HALF_BYTES, HEAD_BYTES, MOST_RANKS, REDUCE_ALL, REDUCE_PARTS, REGION_BYTES, SPREAD,
    STREAM_BYTES, STREAMS,
)
from mpiddp.collectives.node_memory cimport NodeMemory
from mpiddp.engine.engine cimport WAIT_DONE, look_if_due
from mpiddp.engine.forks cimport is_child
from mpiddp.engine.interface cimport Transport
from mpiddp.mpi.calls cimport MPI_Comm, mpi
from mpiddp.system.posix cimport load, now, peek
from mpiddp.system.running_time cimport look
from mpiddp.transports.shared cimport Bell, load32, sleep_on
from mpiddp.engine.forks import check as check_process
from mpiddp.mpi import communicators
from mpiddp.transports.wire import Wire as MadeWire


# What this file and lane_jobs.pyx have room for.
MOST_NODES = MOST_RANKS
PIECE_BYTES = HALF_BYTES
STREAMS_OF_LANES = STREAMS

cdef double SIGNAL_CHECK = 0.1

# Kept: MPI may still write there.
_abandoned = []
# How many groups of this process have lanes, and have not closed them.
cdef Py_ssize_t open_ones = 0


def count_open():
    """Return how many groups of this process have lanes. Not collective."""
    return open_ones


cdef unsigned int take_ticket(Transport *transport) noexcept nogil:
    return load32(&(<LaneState *>transport).streams[0].memory.bell.rung)


cdef void sleep(Transport *transport, unsigned int ticket, double seconds) noexcept nogil:
    sleep_on((<LaneState *>transport).streams[0].memory.bell, ticket, seconds)


cdef void finished(Transport *transport) noexcept nogil:
    """Wake the threads that watch what nobody waits for, as the end of a request does."""
    cdef Transport *requests = (<LaneState *>transport).requests
    requests.finished(requests)


cdef class GroupLanes:
    """Collectives of one group over several nodes, each with as many of its ranks.

    Collective over `communicator`.

    The methods make one, and return what waits for it. Collective: all ranks begin the same ones in
    the same order. Addresses are of memory that `memory` keeps; bytes are the same on all ranks.

    Args:
        communicator: of the group; nothing else is under way in it.
        nodes: for each node its ranks in the group, at least two, as many on each.
        node_memory: of this node.
        index: of this group there.
        plan: how slices travel between nodes.
        requests: those of the process.

    Attributes:
        later: whether what is made next begins when it is told to.

    Raises:
        OSError: no memory for what travels.
    """

    def __init__(self, communicator, nodes, NodeMemory node_memory not None, Py_ssize_t index, plan,
                 requests):
        from mpi4py import MPI

        global open_ones
        cdef Stream *stream
        cdef size_t number, node
        cdef uint32_t lane
        own = communicator.Get_rank()
        node = next(number for number, ranks in enumerate(nodes) if own in ranks)
        lane = nodes[node].index(own)
        self.mapping = node_memory.mapping
        self.engine = requests.engine
        self.requests = requests
        self.state.nodes, self.state.node = len(nodes), node
        self.state.ranks, self.state.rank = len(nodes[0]), lane
        assert self.state.nodes <= MOST_RANKS
        self.lane = communicators.note(communicator.Split(lane, node))
        self.moves = communicators.note(self.lane.Dup())
        self.wire = MadeWire(self.lane, **vars(plan))
        self.state.moves = <MPI_Comm><size_t>self.moves.handle
        self.moves.Set_errhandler(MPI.ERRORS_RETURN)
        self.wire.connect(&self.state.transport)
        self.state.wire = &self.wire.state
        self.state.places = <uint32_t *>calloc(len(nodes) * len(nodes[0]), sizeof(uint32_t))
        self.rooms = <char *>malloc(STREAMS * 2 * HALF_BYTES)
        if self.state.places == NULL or self.rooms == NULL:
            raise MemoryError
        for number, place in enumerate(rank for ranks in nodes for rank in ranks):
            self.state.places[number] = place
        for number in range(STREAMS):
            stream = &self.state.streams[number]
            stream.step = BEGINS
            stream.request = mpi.request_null
            stream.room = self.rooms + 2 * number * HALF_BYTES
            stream.other_room = stream.room + HALF_BYTES
            stream.memory.regions = (
                self.mapping.address + <size_t>(index * node_memory.ranks) * REGION_BYTES
                + number * STREAM_BYTES
            )
            stream.memory.bell = <Bell *>(
                stream.memory.regions - number * STREAM_BYTES + HEAD_BYTES - sizeof(Bell))
            stream.memory.ranks, stream.memory.rank = self.state.ranks, lane
        self.state.requests = <Transport *><size_t>requests.address
        self.state.transport.advance = advance
        self.state.transport.finished = finished
        self.state.transport.take_ticket = take_ticket
        self.state.transport.sleep = sleep
        self.state.transport.call = "the wait in the node's memory"
        self.state.transport.quiet = True
        self.state.transport.wants_thread = True
        self.state.transport.crowded = requests.crowded
        open_ones += 1

    def __dealloc__(self):
        cdef size_t number
        free(self.state.places)
        for number in range(STREAMS):
            if self.state.streams[number].step == TRAVELS:
                return          # MPI may still write there
        free(self.rooms)

    @property
    def address(self):
        """Where the engine finds the C ``Transport``."""
        return <size_t>&self.state.transport

    @property
    def nodes(self):
        """How many nodes the group is on."""
        return self.state.nodes

    @property
    def ranks(self):
        """How many ranks it has on each."""
        return self.state.ranks

    def reduce(self, size_t source, size_t target, size_t size, int element, memory):
        """Add `size` bytes of all ranks, for all.

        Args:
            source: where this rank's are.
            target: where the sum goes, which may be `source`.
            size: bytes.
            element: of the kernels, of 4 bytes or more.
            memory: what is kept.
        """
        cdef LanePending pending = LanePending.__new__(LanePending)
        pending.job_state.kind = REDUCE_ALL
        pending.job_state.source = <char *>source
        pending.job_state.target = <char *>target
        pending.job_state.size = size
        pending.job_state.element = element
        return self.start(pending, memory)

    def reduce_parts(self, sources, size_t target, size_t size, int element, memory):
        """Add for each rank `size` bytes of all ranks, and take those for this one.

        Args:
            sources: an address for each rank; the others as for `reduce`.
        """
        cdef LanePending pending = LanePending.__new__(LanePending)
        pending.job_state.kind = REDUCE_PARTS
        pending.job_state.target = <char *>target
        pending.job_state.size = size
        pending.job_state.element = element
        pending.job_state.sources = addresses_of(sources, self.state.nodes * self.state.ranks)
        return self.start(pending, memory)

    def gather(self, size_t source, targets, size_t size, memory):
        """Take `size` bytes of each rank.

        Args:
            source: where this rank's are.
            targets: for each rank, where its bytes go. This rank's may be `source`.
            size: bytes of one rank.
            memory: what is kept.
        """
        cdef LanePending pending = LanePending.__new__(LanePending)
        pending.job_state.kind = GATHER_ALL
        pending.job_state.source = <char *>source
        pending.job_state.size = size
        pending.job_state.targets = addresses_of(targets, self.state.nodes * self.state.ranks)
        return self.start(pending, memory)

    def spread(self, size_t address, size_t size, int root, memory):
        """Take `size` bytes of one rank, which has them there, to the same address."""
        cdef LanePending pending = LanePending.__new__(LanePending)
        pending.job_state.kind = SPREAD
        pending.job_state.root = <unsigned int>root
        pending.job_state.source = pending.job_state.target = <char *>address
        pending.job_state.size = size
        return self.start(pending, memory)

    cdef LanePending start(self, LanePending pending, object memory):
        pending.lanes = self
        pending.memory = memory
        pending.job_state.job.count = 1
        pending.job_state.job.divisor = 1
        pending.job_state.job.context = &pending.job_state
        pending.waits = self.later
        if not pending.waits:
            self.submit(pending)
        return pending

    cdef int submit(self, LanePending pending) except -1:
        if self.channel is None:
            self.channel = self.engine.open_channel(self, self.lane)
        pending.submitted = True
        self.channel.submit(&pending.job_state.job)
        return 0

    cdef void give_up(self):
        """Let what is under way go, and wait until the engine has done so."""
        self.state.given_up = True
        if self.channel is None:
            return
        # After a failure the engine does not look at a channel any more.
        while peek(&self.channel.state.pending) and not load(&self.channel.state.failure):
            self.engine.progress()

    def close(self):
        """Free the communicators, and touch the memory no more. Collective; not twice."""
        global open_ones
        open_ones -= 1
        self.give_up()
        if self.channel is not None and not load(&self.channel.state.failure):
            self.engine.close_channel(self.channel)
        self.channel = None
        if self.lane is not None:
            self.wire.free()
            communicators.free(self.moves)
            communicators.free(self.lane)
        self.lane = self.moves = None

    def forget_communicators(self):
        """Make `close` free nothing, for an exit that is not collective. Not collective."""
        if self.lane is not None:
            _abandoned.append((self, self.lane, self.moves))
        self.lane = self.moves = None

    def clear(self):
        """Leave the node's memory as it was. By one rank of the node, the last to close."""
        clear_regions(self.state.streams[0].memory.regions, self.state.ranks)


cdef class LanePending:
    """One collective in lanes, as `Pending` is one of MPI.

    Not collective. Made by the methods of `GroupLanes`.
    """

    def __del__(self):
        if not self.done and self.submitted and _abandoned is not None:
            _abandoned[:] = [
                each for each in _abandoned if not isinstance(each, LanePending) or not each.done
            ]
            _abandoned.append(self)

    def __dealloc__(self):
        free(self.job_state.sources)
        free(self.job_state.targets)

    @property
    def begun(self):
        """Whether other ranks may know of it."""
        return not self.waits

    def begin(self):
        """Let the engine move it along. Not collective, but in order.

        Harmless if it was taken back before. An error is raised by the next `test` or `wait`.
        """
        if not self.waits:
            return
        if not self.dropped:
            try:
                self.lanes.submit(self)
            except Exception as error:
                self.error = error
        self.waits = False      # at last: other threads look at it

    @property
    def expected(self):
        """How many bytes a message has: it is none."""
        return -1

    @property
    def done(self):
        """Whether it is known to have ended, well or not; nothing is tried."""
        if self.dropped or self.error is not None:
            return True
        return bool(
            self.submitted and load(&self.job_state.job.done) and not self.lanes.state.given_up
        )

    @property
    def job(self):
        """Where the engine's job is, for its record."""
        return <size_t>&self.job_state.job

    def submit(self):
        """Do nothing: the engine has it, or it is to begin later. Not collective."""

    def hand_over(self):
        """Do nothing: the engine has it. Not collective."""

    def test(self):
        """Take a step of progress; return whether it has ended. Not collective.

        Raises:
            MPIError: it ended with an error.
        """
        if not self.done and not self.waits:
            if is_child():
                check_process("the test of a collective")
            self.lanes.engine.step()
        return self.check_result()

    def wait(self, double seconds):
        """Make progress until it has ended; return whether it has in time. Not collective.

        What the process is stopped for does not count, see Note [Running time]. It must have begun.

        Raises:
            MPIError: it ended with an error, or a rank was lost.
            KeyboardInterrupt: or whatever else a signal handler raises.
        """
        cdef double looked, running, limit
        cdef Channel channel
        if self.check_result():
            return True
        if is_child():
            check_process("the wait for a collective")
        looked = now()
        running = look(&looked)
        limit = running + seconds
        while not self.lanes.state.given_up:
            channel = self.lanes.channel
            if channel is None:
                break
            if channel.wait_until(
                &self.job_state.job, now() + min(limit - running, SIGNAL_CHECK), 0.0
            ) == WAIT_DONE:
                break
            PyErr_CheckSignals()
            looked = now()
            running = look(&looked)
            look_if_due(&looked)
            if running > limit:
                break
        return self.check_result()

    def take_back(self):
        """Let the lanes be: other ranks do not fit, or do not come. Not collective."""
        if self.waits:
            self.dropped = True
        elif not self.done:
            self.lanes.give_up()

    cdef bint check_result(self) except -1:
        """Return whether it has ended, or raise what it has ended with."""
        if self.error is not None:
            raise self.error
        if not self.done:
            return False
        self.memory = None
        return True
