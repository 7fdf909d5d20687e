"""The time in which this process ran: what it was stopped for counts for no limit.

Note [Running time]
~~~~~~~~~~~~~~~~~~~
`scontrol suspend`, Ctrl-Z or a debugger stop a process, and no clock of Linux stops with it. But
whoever waits looks at the clock every second or oftener. If much more has passed between two looks
of one thread, the process did not run meanwhile, and the running time stands still for as long: for
all threads, whichever of them looks first. A rank that alone is stopped is still noticed in time,
since the clocks of the others go on.
All of this needs the GIL, and no other lock.
"""

from libc.string cimport memmove

from mpiddp.system.posix cimport now as monotonic


cdef struct Stop:
    double began
    double ended
    double before           # seconds of all earlier ones


cdef enum:
    MOST_STOPS = 16


# Seconds between two looks of a thread that are longer than any nap between them, even where many
# threads share a core.
cdef double LONGEST = 2.0

# The last ones, and all seconds.
cdef Stop[MOST_STOPS] stops
cdef int count = 0
cdef double stopped = 0.0


cdef double look(double *looked) noexcept:
    global stopped, count
    cdef double time = monotonic()
    cdef double began = looked[0]
    if time - began > LONGEST:
        if count and stops[count - 1].ended > began:
            began = stops[count - 1].ended  # seen by another thread
        if time > began:
            if count == MOST_STOPS:
                count -= 1
                memmove(&stops[0], &stops[1], count * sizeof(Stop))
            stops[count] = Stop(began, time, stopped)
            count += 1
            stopped += time - began
    looked[0] = time
    return time - stopped


cdef double running_at(double time) noexcept:
    cdef int index
    for index in range(count - 1, -1, -1):
        if time >= stops[index].ended:
            return time - stops[index].before - (stops[index].ended - stops[index].began)
        if time > stops[index].began:
            return stops[index].began - stops[index].before
    return time - (stops[0].before if count else 0.0)


cdef class Clock:
    """The looks of one thread, which waits. Not collective."""

    def __cinit__(self):
        self.looked = monotonic()

    def now(self):
        """Look: return the running time. Not collective; called every second or oftener."""
        return look(&self.looked)


def now():
    """Return the running time as far as the looks of others tell. Not collective."""
    return monotonic() - stopped


def at(double time):
    """Return the running time at a moment of the monotonic clock. Not collective."""
    return running_at(time)
