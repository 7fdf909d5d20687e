"""Hear of a signal while every thread of Python waits: a handler in C writes to a pipe.

Python's own handlers run in the main thread only, when a call of MPI has returned.
"""

from mpiddp.system.posix cimport getpid


cdef extern from *:
    """
    #include <errno.h>
    #include <signal.h>
    #include <string.h>
    #include <unistd.h>

    static int mpiddp_dump_descriptor = -1;
    static pid_t mpiddp_dump_process = 0;

    static void mpiddp_on_dump_signal(int number)
    {
        const int before = errno;
        const char one = 1;
        (void)number;
        /* A forked child has the handler and the pipe, but not the thread. */
        if (getpid() == mpiddp_dump_process) {
            ssize_t written = write(mpiddp_dump_descriptor, &one, 1);
            (void)written;
        }
        errno = before;
    }

    static int mpiddp_handles(int number)
    {
        struct sigaction now;
        return sigaction(number, NULL, &now) == 0 && now.sa_handler == mpiddp_on_dump_signal;
    }

    static int mpiddp_is_free(int number)
    {
        struct sigaction now;
        return sigaction(number, NULL, &now) == 0 && now.sa_handler == SIG_DFL;
    }

    static int mpiddp_set_handler(int number)
    {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        sigemptyset(&action.sa_mask);
        action.sa_flags = SA_RESTART | SA_ONSTACK;
        action.sa_handler = mpiddp_on_dump_signal;
        return sigaction(number, &action, NULL);
    }
    """
    int mpiddp_dump_descriptor
    int mpiddp_dump_process
    int mpiddp_handles(int)
    int mpiddp_is_free(int)
    int mpiddp_set_handler(int)


def install(int number, int descriptor):
    """Write a byte to a pipe at each signal of this number; return whether that is so now.

    Not collective. A signal that somebody handles or ignores is left alone.
    """
    global mpiddp_dump_descriptor, mpiddp_dump_process
    if not mpiddp_handles(number) and not mpiddp_is_free(number):
        return False
    mpiddp_dump_descriptor = descriptor
    mpiddp_dump_process = getpid()
    return mpiddp_set_handler(number) == 0


def remove():
    """Write no more. Not collective.

    The handler stays and does nothing: what the signal does by default would end a process that is
    in MPI_Finalize, and with it the job. Programs that this one executes do not inherit that.
    """
    global mpiddp_dump_process
    mpiddp_dump_process = 0
