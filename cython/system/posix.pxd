# What the compiled modules need from the operating system: threads, locks, clocks. Nothing of
# MPI, Python or torch.

from posix.time cimport (
    CLOCK_MONOTONIC,
    CLOCK_THREAD_CPUTIME_ID,
    clock_gettime,
    nanosleep,
    timespec,
)


cdef extern from "<sched.h>" nogil:
    ctypedef struct cpu_set_t:
        pass
    void CPU_ZERO(cpu_set_t *)
    void CPU_SET(int, cpu_set_t *)      # does nothing for a core that the set has no bit for
    int sched_yield()

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    ctypedef struct pthread_condattr_t:
        pass
    int pthread_atfork(
        void (*)() noexcept nogil, void (*)() noexcept nogil, void (*)() noexcept nogil
    )
    int pthread_create(pthread_t *, const void *, void *(*)(void *) noexcept nogil, void *)
    int pthread_join(pthread_t, void **)
    int pthread_setaffinity_np(pthread_t, size_t, const cpu_set_t *)
    int pthread_mutex_init(pthread_mutex_t *, const void *)
    int pthread_mutex_destroy(pthread_mutex_t *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_trylock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)
    int pthread_condattr_init(pthread_condattr_t *)
    int pthread_condattr_setclock(pthread_condattr_t *, int)
    int pthread_condattr_destroy(pthread_condattr_t *)
    int pthread_cond_init(pthread_cond_t *, const pthread_condattr_t *)
    int pthread_cond_destroy(pthread_cond_t *)
    int pthread_cond_broadcast(pthread_cond_t *)
    int pthread_cond_signal(pthread_cond_t *)
    int pthread_cond_wait(pthread_cond_t *, pthread_mutex_t *)
    int pthread_cond_timedwait(pthread_cond_t *, pthread_mutex_t *, const timespec *)

cdef extern from "<unistd.h>" nogil:
    int getpid()

cdef extern from *:
    """
    #include <signal.h>
    #include <pthread.h>
    static inline int mpiddp_load(const int *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline void mpiddp_store(int *p, int v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    static inline size_t mpiddp_peek(const size_t *p)
    { return __atomic_load_n(p, __ATOMIC_RELAXED); }
    static inline void mpiddp_put(size_t *p, size_t v)
    { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
    static inline long long mpiddp_peek_id(const long long *p)
    { return __atomic_load_n(p, __ATOMIC_RELAXED); }
    static inline void mpiddp_put_id(long long *p, long long v)
    { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
    static inline double mpiddp_peek_time(const double *p)
    {
        double value;
        __atomic_load(p, &value, __ATOMIC_RELAXED);
        return value;
    }
    static inline void mpiddp_put_time(double *p, double v)
    { __atomic_store(p, &v, __ATOMIC_RELAXED); }

    /* A new thread inherits the signal mask: signals belong to Python's main thread. */
    static inline int mpiddp_create_thread_without_signals(
        pthread_t *thread, void *(*entry)(void *), void *argument)
    {
        sigset_t all, before;
        int code;
        sigfillset(&all);
        code = pthread_sigmask(SIG_SETMASK, &all, &before);
        if (code) return code;
        code = pthread_create(thread, NULL, entry, argument);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return code;
    }

    #include <stdint.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    /* The kernel's struct sched_attr in its first form. */
    struct mpiddp_scheduling {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    };

    static inline uint64_t mpiddp_ask_for_slices(uint64_t nanoseconds)
    {
        struct mpiddp_scheduling attributes;
        uint64_t before;
        if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0
            || attributes.policy != 0)
            return 0;
        before = attributes.runtime;
        attributes.runtime = nanoseconds;
        syscall(SYS_sched_setattr, 0, &attributes, 0);
        return before;
    }

    static inline void mpiddp_name_thread(const char *name)
    { pthread_setname_np(pthread_self(), name); }
    """
    # Give the calling thread time slices of this length; return what it had before, or 0 for the
    # default. Linux grants shorter slices sooner. Kernels before 6.12 ignore it, and so do other
    # policies than SCHED_OTHER.
    unsigned long long ask_for_slices "mpiddp_ask_for_slices"(
        unsigned long long nanoseconds) noexcept nogil
    void name_thread "mpiddp_name_thread"(const char *name) noexcept nogil
    int load "mpiddp_load"(const int *) noexcept nogil
    void store "mpiddp_store"(int *, int) noexcept nogil
    # For a number that one thread changes at a time, and others look at without a lock: they see
    # the old one or the new one, and nothing about other memory. Plain moves on all processors.
    size_t peek "mpiddp_peek"(const size_t *) noexcept nogil
    void put "mpiddp_put"(size_t *, size_t) noexcept nogil
    long long peek_id "mpiddp_peek_id"(const long long *) noexcept nogil
    void put_id "mpiddp_put_id"(long long *, long long) noexcept nogil
    double peek_time "mpiddp_peek_time"(const double *) noexcept nogil
    void put_time "mpiddp_put_time"(double *, double) noexcept nogil
    int create_thread_without_signals "mpiddp_create_thread_without_signals"(
        pthread_t *, void *(*)(void *) noexcept nogil, void *) nogil


cdef inline double now() noexcept nogil:
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return <double>time.tv_sec + 1e-9 * <double>time.tv_nsec


cdef inline double processor_time() noexcept nogil:
    """Return the seconds that this thread has run."""
    cdef timespec time
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time)
    return <double>time.tv_sec + 1e-9 * <double>time.tv_nsec


cdef inline timespec as_timespec(double seconds) noexcept nogil:
    cdef timespec time
    time.tv_sec = <long>seconds
    time.tv_nsec = <long>((seconds - <double>time.tv_sec) * 1000000000)
    return time


cdef inline void sleep_for(double seconds) noexcept nogil:
    cdef timespec time = as_timespec(seconds)
    nanosleep(&time, NULL)


cdef inline int wait_for_signal(
    pthread_cond_t *cond, pthread_mutex_t *lock, double seconds
) noexcept nogil:
    """Wait for a condition on the monotonic clock; return 0 if it was signalled in time."""
    cdef timespec until = as_timespec(now() + seconds)
    return pthread_cond_timedwait(cond, lock, &until)
