# How a thread that waits for other ranks gives up its core: the more readily, the longer nothing
# has happened. First it spins, then it yields, then it sleeps for a sixteenth of the wait so far,
# so that a sleep adds no more than that to the wait.

from mpiddp.system.posix cimport sched_yield, sleep_for


cdef extern from *:
    """
    /* Seconds, chosen by the project's measurements of waiting ranks. */
    #define MPIDDP_SPIN 20e-6
    #define MPIDDP_YIELD 200e-6
    #define MPIDDP_SLEEP_SHORTEST 50e-6
    #define MPIDDP_SLEEP_LONGEST 1e-3
    """
    const double SPIN "MPIDDP_SPIN"
    const double YIELD "MPIDDP_YIELD"
    const double SLEEP_SHORTEST "MPIDDP_SLEEP_SHORTEST"
    const double SLEEP_LONGEST "MPIDDP_SLEEP_LONGEST"


cdef inline double sleep_after(double idle) noexcept nogil:
    """Return how long to sleep when nothing has happened for `idle` seconds."""
    return min(max(idle / 16, SLEEP_SHORTEST), SLEEP_LONGEST)


cdef inline void give_way(double idle) noexcept nogil:
    """Let others have the core when nothing has happened for `idle` seconds."""
    if idle < SPIN:
        return
    if idle < YIELD:
        sched_yield()
    else:
        sleep_for(sleep_after(idle))
