"""The time in which this process ran: what it was stopped for counts for no limit.

Note [Running time]
~~~~~~~~~~~~~~~~~~~
`scontrol suspend`, Ctrl-Z or a debugger stop a process, and no clock of Linux stops with it. But
whoever waits looks at the clock every second or oftener. If much more has passed between two looks
of one thread, the process did not run meanwhile, and the running time stands still for as long: for
all threads, whichever of them looks first. A rank that alone is stopped is still noticed in time,
since the clocks of the others go on.
The last 4000 stops are remembered, as gang scheduling makes one a minute: a wait that began before
has its limit from the moment at which it began. Of what is older the two oldest stops become one at
the end of both, so that a moment between them is taken for a later one, and nobody gives up early.
All of this needs the GIL, and no other lock.
"""

from libc.string cimport memmove

from mpiddp.system.posix cimport now as monotonic


cdef struct Stop:
    double began
    double ended
    double before           # seconds of all earlier ones


cdef enum:
    MOST_STOPS = 4000


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
                stops[1].began -= stops[0].ended - stops[0].began
                stops[1].before = stops[0].before
                memmove(&stops[0], &stops[1], count * sizeof(Stop))
            stops[count] = Stop(began, time, stopped)
            count += 1
            stopped += time - began
    looked[0] = time
    return time - stopped


cdef double running_at(double time) noexcept:
    cdef int first = 0, end = count, middle
    cdef Stop *last
    while first < end:  # `first` becomes the number of stops that began before
        middle = (first + end) // 2
        if stops[middle].began < time:
            first = middle + 1
        else:
            end = middle
    if first == 0:
        return time
    last = &stops[first - 1]
    if time < last.ended:
        return last.began - last.before
    return time - last.before - (last.ended - last.began)


cdef class Clock:
    """The looks of one thread, which waits. Not collective.

    Attributes:
        looked: when it has last looked, on the monotonic clock.
    """

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
