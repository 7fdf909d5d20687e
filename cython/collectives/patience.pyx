"""How long a rank that has begun a collective in memory goes on with it itself.

Note [Who carries a collective out]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A collective of a node's ranks ends soonest if all of them stay with it: who leaves in the middle
holds up the others, until its program waits or the engine's thread has woken up. For 1 MB that
takes longer than the collective. So a rank stays as long as something moves,

* if its program waits: in a synchronous call, and in an asynchronous one if the last few were
  waited for at once, as tensor parallelism does (`WaitHabit`);
* if no core is left over for the engine's thread. That would take the core of a thread that
  computes, in this process or another rank's, for as long as the collective takes.

Where ranks are more than cores, who does not wait leaves at once, and the engine's thread goes on,
which yields between the steps; see Note [Who makes progress].

When nothing has moved for a while, because another rank is late, it leaves. Who could have gone on
with its program has then lost about as much time as the collective takes, and no more.
"""

from mpiddp.collectives.direct_jobs cimport advance
from mpiddp.engine.interface cimport ADVANCE_DONE, ADVANCE_SOME, Advance
from mpiddp.system.posix cimport now, sched_yield
from mpiddp.system.waiting cimport SPIN


# Seconds in which nothing moves: of who waits, of who does not, and of who waits where the waiting
# ranks take the cores of those that they wait for.
cdef double OF_WAITING = 2e-3
cdef double OF_OTHERS = 500e-6
cdef double IF_CROWDED = 200e-6
# About as long as a collective takes: 4 GB/s.
cdef double OF_BYTE = 0.25e-9
# What one call may take.
cdef double LONGEST = 0.1

# So many collectives in a row are waited for within so many seconds: that is a habit.
cdef int ENOUGH = 3
cdef double SOON = 1e-3


cdef double patience(bint waits, bint crowded, size_t size) noexcept nogil:
    """Return for how many seconds nothing may move before a rank leaves a collective.

    Args:
        waits: whether its program does nothing else.
        crowded: whether the ranks of the node are more than its cores.
        size: bytes of the collective.
    """
    if crowded:
        return IF_CROWDED if waits else 0.0
    return (OF_WAITING if waits else OF_OTHERS) + OF_BYTE * size


cdef bint drive(Transport *transport, Job *job, double seconds) noexcept nogil:
    """Move a collective along on this thread; return whether it has ended.

    Args:
        seconds: for which nothing may move; 0: take what is there.
    """
    cdef Advance status = advance(transport, job, True)
    cdef double began, moved, idle = 0.0
    if status == ADVANCE_DONE or seconds == 0.0:
        return status == ADVANCE_DONE
    began = moved = now()
    while status != ADVANCE_DONE and idle < seconds and moved - began < LONGEST:
        if idle > SPIN or transport.crowded:
            sched_yield()
        status = advance(transport, job, True)
        if status == ADVANCE_SOME:
            moved = now()
        idle = now() - moved
    return status == ADVANCE_DONE


cdef class WaitHabit:
    """Whether the callers of a group wait at once for asynchronous collectives. Not collective."""

    cdef bint expects_wait(self) noexcept:
        """Whether what is begun next will be waited for at once."""
        if self.unwaited:
            self.prompt = 0
        return self.prompt == ENOUGH

    cdef void begun(self, long long number) noexcept:
        """Note that the call of a collective returns."""
        self.unwaited = number
        self.returned = now()

    cpdef waited(self, long long number):
        """Note that somebody waits for a collective."""
        if number != self.unwaited:
            return
        self.unwaited = 0
        self.prompt = min(self.prompt + 1, ENOUGH) if now() - self.returned < SOON else 0
