"""Say what this process waits for in MPI_Init and MPI_Finalize, and end it if MPI_Init never ends.

Nobody else could: mpi4py holds the GIL in MPI_Init, and calls MPI_Finalize when the interpreter has
ended. So a thread speaks that uses nothing of Python. Where the program itself calls MPI_Finalize,
what must end before that ends first.
"""

import contextlib

from libc.signal cimport SIG_DFL, SIGTERM
from libc.signal cimport signal as set_handler
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport strncpy
from posix.signal cimport kill
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, nanosleep, timespec
from posix.unistd cimport getpid, write

from mpiddp.mpi.calls cimport mpi
from mpiddp.mpi.errors cimport check, check_errno


cdef extern from "Python.h" nogil:
    bint Py_IsInitialized()

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
    int POLLOUT
    int poll(pollfd *, unsigned long, int)

cdef extern from *:
    """
    #include <pthread.h>
    #include <signal.h>

    /* Signals belong to Python's main thread, and a new thread inherits what is blocked. */
    static int mpiddp_start_watch(void *(*entry)(void *), void *argument)
    {
        pthread_t thread;
        sigset_t all, before;
        int code;
        sigfillset(&all);
        code = pthread_sigmask(SIG_SETMASK, &all, &before);
        if (code) return code;
        code = pthread_create(&thread, NULL, entry, argument);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (!code) pthread_detach(thread);
        return code;
    }
    """
    int mpiddp_start_watch(void *(*)(void *) noexcept nogil, void *) nogil


cdef enum:
    LONGEST = 700       # bytes of a text
    STANDARD_ERROR = 2

ctypedef struct Watch:
    double say          # seconds until it speaks, then twice as many
    double limit        # seconds until it ends the process
    bint speaks         # before it ends
    bint finalizes
    int over            # set by the one who waited
    char[LONGEST] who   # "mpiddp: rank 1 ..."
    char[LONGEST] why

# How often it looks: a wait is over for the thread this much later.
cdef double PERIOD = 0.25

cdef bint _watches_finalize = False

_ends_before = None


@contextlib.contextmanager
def watched_init(str who, str why, double say, double limit, bint speaks):
    """Within, speak after a while of waiting, and say so and end this process after a longer one.

    Not collective. For MPI_Init, around whatever calls it. The process ends by SIGTERM, because
    MPICH's mpiexec lets others go on waiting for one that ends in another way.

    Args:
        who: of whom to speak, such as "mpiddp: rank 1 (process 7 on a)".
        why: what to say of the reason.
        say: after how many seconds, and then after twice as many; infinite for never.
        limit: the seconds to wait; infinite for no limit. It says so before it ends.
        speaks: whether this process says something before.
    """
    cdef Watch *watch = _new_watch(who, why, say, limit, speaks)
    _start(watch)
    try:
        yield
    finally:
        watch.over = True  # the thread frees it


def watch_finalize(str who, str why, double say):
    """Let this process speak if MPI_Finalize takes long, as `watched_init` does. Not collective.

    For when MPI is initialised. It never ends the process: other ranks may still have work to do.
    """
    global _watches_finalize
    if _watches_finalize:
        return
    cdef Watch *watch = _new_watch(who, why, say, float("inf"), True)
    watch.finalizes = True
    # MPI_Finalize begins with this (MPI-4.0, section 11.2.4).
    check(mpi.when_freed(mpi.comm_self, _on_finalize, watch), b"MPI_Comm_set_attr", mpi.comm_self)
    _watches_finalize = True


def call_before_finalize(function):
    """Call `function` when the program calls MPI_Finalize. Not collective.

    For when MPI is initialised. At the end of the interpreter it is not called. What it raises is
    printed.
    """
    global _ends_before
    if _ends_before is None:
        check(
            mpi.when_freed(mpi.comm_self, _before_finalize, NULL), b"MPI_Comm_set_attr",
            mpi.comm_self)
    _ends_before = function


cdef void _before_finalize(void *nothing) noexcept nogil:
    if Py_IsInitialized():
        with gil:
            _ends_before()


cdef Watch *_new_watch(str who, str why, double say, double limit, bint speaks) except NULL:
    cdef Watch *watch = <Watch *>calloc(1, sizeof(Watch))
    if watch == NULL:
        raise MemoryError
    strncpy(watch.who, who.encode(), LONGEST - 1)
    strncpy(watch.why, why.encode(), LONGEST - 1)
    watch.say, watch.limit, watch.speaks = say, limit, speaks
    return watch


cdef int _start(Watch *watch) except -1:
    try:
        return check_errno(mpiddp_start_watch(_wait, watch), b"pthread_create")
    except OSError:
        free(watch)
        raise


cdef void _on_finalize(void *watch) noexcept nogil:
    mpiddp_start_watch(_wait, watch)  # without a thread it stays silent


cdef void *_wait(void *argument) noexcept nogil:
    cdef Watch *watch = <Watch *>argument
    cdef double waited = 0, before = _now(), now
    cdef double say = watch.say
    cdef timespec nap
    cdef int finalized = 0
    nap.tv_sec, nap.tv_nsec = 0, <long>(PERIOD * 1e9)
    while not watch.over and not finalized:
        nanosleep(&nap, NULL)
        if watch.finalizes and Py_IsInitialized():
            # Called by the program, which goes on then. Open MPI says so too early; the call at the
            # end of the interpreter is the last that a process does.
            mpi.finalized(&finalized)
        # Longer naps are those of a job that was stopped.
        now = _now()
        waited += min(now - before, 4 * PERIOD)
        before = now
        if watch.over or finalized:
            break
        if waited >= watch.limit:
            _say(watch, waited, b", and its time limit is over. It ends")
            # Whoever handles it could not: Python does not run.
            set_handler(SIGTERM, SIG_DFL)
            kill(getpid(), SIGTERM)
        elif waited >= say:
            if watch.speaks:
                _say(watch, waited, b"")
            say *= 2
    free(watch)
    return NULL


cdef void _say(Watch *watch, double waited, const char *then) noexcept nogil:
    cdef char[2 * LONGEST + 100] text
    cdef pollfd stream
    cdef int length = snprintf(
        text, sizeof(text), b"%s %.0f s%s. %s\n", watch.who, waited, then, watch.why
    )
    stream.fd, stream.events = STANDARD_ERROR, POLLOUT
    if poll(&stream, 1, 0) == 1:  # else nobody reads, and writing would not return
        write(STANDARD_ERROR, text, length)


cdef double _now() noexcept nogil:
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return time.tv_sec + 1e-9 * time.tv_nsec
