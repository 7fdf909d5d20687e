"""Sleep until a message comes by TCP, whichever library has opened the socket.

Note [Woken by sockets]
~~~~~~~~~~~~~~~~~~~~~~~
MPI has no call that sleeps until a message comes. It has to be asked again and again, and a thread
that sleeps in between hears of a message late. But where MPI's network is TCP, the kernel knows. So
the connected sockets of this process are put into a queue of ours (epoll), beside MPI's own.
Nothing is read from them, so MPI is not disturbed. Only changes are reported (edge-triggered): what
came since the last sleep ends the next one at once, and what MPI leaves unread does not.

Sockets tell nothing of shared memory and of other networks, and those that others have opened may
end a sleep in vain. So each sleep has an end, and whoever sleeps looks at how often it helped.
Closed sockets leave the queue by themselves.
"""

from mpiddp.system.posix cimport (
    now, pthread_mutex_init, pthread_mutex_t, pthread_mutex_trylock, pthread_mutex_unlock,
)


cdef extern from *:
    """
    #include <dirent.h>
    #include <poll.h>
    #include <stdint.h>
    #include <stdlib.h>
    #include <sys/epoll.h>
    #include <sys/eventfd.h>
    #include <sys/socket.h>
    #include <time.h>
    #include <unistd.h>

    static int mpiddp_queue = -1, mpiddp_interrupts = -1;

    static int mpiddp_is_connected_tcp(int descriptor)
    {
        int domain, type;
        socklen_t size = sizeof domain;
        struct sockaddr_storage peer;
        if (getsockopt(descriptor, SOL_SOCKET, SO_DOMAIN, &domain, &size) != 0
            || (domain != AF_INET && domain != AF_INET6))
            return 0;
        size = sizeof type;
        if (getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_STREAM)
            return 0;
        size = sizeof peer;
        return getpeername(descriptor, (struct sockaddr *)&peer, &size) == 0;
    }

    /* Those that are in the queue stay as they are. */
    static int mpiddp_watch(int descriptor)
    {
        struct epoll_event event = {EPOLLIN | EPOLLOUT | EPOLLET, {.fd = descriptor}};
        return epoll_ctl(mpiddp_queue, EPOLL_CTL_ADD, descriptor, &event);
    }

    static void mpiddp_open_queue(void)
    {
        mpiddp_queue = epoll_create1(EPOLL_CLOEXEC);
        mpiddp_interrupts = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (mpiddp_queue >= 0 && mpiddp_interrupts >= 0)
            mpiddp_watch(mpiddp_interrupts);
    }

    /* Return how many sockets there are. */
    static int mpiddp_watch_sockets(void)
    {
        DIR *descriptors = mpiddp_queue < 0 ? NULL : opendir("/proc/self/fd");
        struct dirent *entry;
        int found = 0;
        if (descriptors == NULL)
            return 0;
        while ((entry = readdir(descriptors)) != NULL) {
            int descriptor = atoi(entry->d_name);
            if (entry->d_name[0] != '.' && mpiddp_is_connected_tcp(descriptor)) {
                mpiddp_watch(descriptor);
                found++;
            }
        }
        closedir(descriptors);
        return found;
    }

    static int mpiddp_listen(double seconds)
    {
        struct epoll_event events[16];
        struct pollfd queue = {.fd = mpiddp_queue, .events = POLLIN};
        struct timespec limit = {.tv_nsec = (long)(seconds * 1e9)};
        int count, news = 0;
        if (ppoll(&queue, 1, &limit, NULL) <= 0)
            return 0;
        for (count = epoll_wait(mpiddp_queue, events, 16, 0); count > 0; count--)
            news |= events[count - 1].data.fd != mpiddp_interrupts;
        return news;
    }

    static void mpiddp_interrupt(void)
    {
        /* Each write is a change, though nobody ever reads. */
        const uint64_t one = 1;
        if (write(mpiddp_interrupts, &one, sizeof one) < 0)
            return;
    }
    """
    void open_queue "mpiddp_open_queue"() noexcept nogil
    int watch_sockets "mpiddp_watch_sockets"() noexcept nogil
    int listen_to_queue "mpiddp_listen"(double) noexcept nogil
    void write_interrupt "mpiddp_interrupt"() noexcept nogil


# Seconds between looks at all descriptors of the process: doubled at each.
cdef double BETWEEN_LOOKS = 5e-3
cdef double BETWEEN_LOOKS_LONGEST = 1

cdef pthread_mutex_t _looking
cdef double _between = BETWEEN_LOOKS
cdef double _next_look = 0
cdef int _found = 0


cdef int has_sockets() noexcept nogil:
    global _between, _next_look, _found
    cdef double time = now()
    if time > _next_look and pthread_mutex_trylock(&_looking) == 0:
        _found = watch_sockets()
        _between = min(2 * _between, BETWEEN_LOOKS_LONGEST)
        _next_look = time + _between
        pthread_mutex_unlock(&_looking)
    return _found > 0


cdef int listen(double seconds) noexcept nogil:
    return listen_to_queue(seconds)


cdef void interrupt() noexcept nogil:
    write_interrupt()


pthread_mutex_init(&_looking, NULL)
open_queue()
