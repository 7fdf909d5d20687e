"""Where the ranks of a node meet: each arrives, does something else, and waits for the others.

Note [Rounds]
~~~~~~~~~~~~~
Arrivals are counted over all rounds, so a round is over when the count has reached the round's
number times the ranks. That holds only if nobody arrives for a round before the one before is over:
so `arrive` must not be called before `wait` has returned true for the last arrival.
With each arrival goes a number, which the others read when they have waited. There are two places
for it, used in turn: a rank that is one round ahead leaves alone what others still read.
"""

from libc.stdint cimport int32_t, uint32_t

from mpiddp.system.posix cimport store
from mpiddp.transports.shared cimport add32, load32, wait_for, wake
from mpiddp.transports.shared_memory cimport Mapping
from mpiddp.transports import shared_memory


cdef class NodeMeeting:
    """Rounds in which all ranks of a node meet.

    Collective over `node`.

    Args:
        node: an mpi4py communicator whose ranks share memory; it is not needed afterwards.
        crowded: there are more ranks than cores; a waiting rank sleeps at once.

    Raises:
        OSError: the ranks cannot share memory; raised on all ranks.
    """

    def __init__(self, node, *, bint crowded=False):
        cdef Mapping mapping
        self.rank = node.Get_rank()
        self.ranks = node.Get_size()
        self.crowded = crowded
        size = sizeof(Attendance) + self.ranks * (2 * sizeof(double) + sizeof(uint32_t))
        mapping = shared_memory.allocate(node, size)[0]
        self.mapping = mapping
        self.attendance = <Attendance *>mapping.address
        self.numbers = <double *>(mapping.address + sizeof(Attendance))
        self.rounds = <uint32_t *>(self.numbers + 2 * self.ranks)

    def arrive(self, double number=0):
        """Say that this rank has come, and go on. Not collective.

        Args:
            number: what the others read in `numbers`.
        """
        self.round += 1
        self.numbers[(self.round % 2) * self.ranks + self.rank] = number
        store(<int *>&self.rounds[self.rank], <int>self.round)
        if add32(&self.attendance.arrived.rung, 1) == self.round * <uint32_t>self.ranks:
            wake(&self.attendance.arrived)

    def wait(self, double timeout):
        """Wait for all ranks; return whether they have come within `timeout` seconds.

        Collective: all ranks have arrived or will.
        """
        return bool(wait_for(
            &self.attendance.arrived, self.round * <uint32_t>self.ranks, timeout, self.crowded))

    def numbers_of_all(self):
        """Return the number of each rank in this round, which is over. Not collective."""
        return [
            self.numbers[(self.round % 2) * self.ranks + rank] for rank in range(self.ranks)
        ]

    def missing(self):
        """Return the ranks that have not come to this round, in order. Not collective."""
        return [
            rank for rank in range(self.ranks)
            if <int32_t>(load32(&self.rounds[rank]) - self.round) < 0
        ]

    def fail(self):
        """Say that this rank has failed, and arrive, for this and all later rounds.

        Not collective.
        """
        if add32(&self.attendance.failures, 1) == 1:
            store(<int *>&self.attendance.failed, <int>self.rank + 1)
            # So many that no wait for a later round lasts.
            add32(&self.attendance.arrived.rung, <uint32_t>(1 << 30))
            wake(&self.attendance.arrived)

    @property
    def failed(self):
        """The rank that has failed, None while all is well. Not collective."""
        failed = load32(&self.attendance.failed)
        return failed - 1 if failed else None
