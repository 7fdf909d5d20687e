"""Threads that help with copies and sums while backward does not compute.

Note [Helpers]
~~~~~~~~~~~~~~
When a rank has several threads, one of them alone cannot move memory as fast as the machine can.
So what a thread of ours does with much memory at once is cut into parts, and helpers, which sleep
otherwise, do some of them. Each part is done once, by whoever comes first, and writes memory of its
own: no result depends on who does it.
The caller does not wait for helpers that have not begun: a core that backward or another program
has kept costs nothing. It waits only for parts that are being done.
Helpers are started when first of use. There are none in a forked child.
"""

from libc.string cimport memset
from posix.mman cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_POPULATE, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap,
)

from mpiddp.system.kernels cimport copy_past_cache
from mpiddp.system.posix cimport (
    ask_for_slices, create_thread_without_signals, load, name_thread, now, pthread_atfork,
    pthread_cond_broadcast, pthread_cond_init, pthread_cond_signal, pthread_cond_t,
    pthread_cond_wait, pthread_join, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_trylock, pthread_mutex_unlock, pthread_t, store,
)


cdef extern from *:
    """
    static inline size_t mpiddp_take_part(size_t *next)
    { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); }

    /* Keep threads off the core that this thread runs on, `core`, if they are not yet. Return 0
     * if this thread may use no other one. */
    #include <sched.h>
    static inline int mpiddp_keep_off(const pthread_t *threads, int number, int *core)
    {
        cpu_set_t cores;
        int here = sched_getcpu();
        if (here < 0 || here == *core)
            return 1;
        if (pthread_getaffinity_np(pthread_self(), sizeof cores, &cores) == 0) {
            CPU_CLR(here, &cores);
            if (CPU_COUNT(&cores) == 0)
                return 0;
            while (number--)
                pthread_setaffinity_np(threads[number], sizeof cores, &cores);
        }
        *core = here;
        return 1;
    }
    """
    size_t take_part "mpiddp_take_part"(size_t *) noexcept nogil
    int keep_off "mpiddp_keep_off"(const pthread_t *, int, int *) noexcept nogil


cdef enum:
    MOST_HELPERS = 15
    # The shortest: threads of OpenMP, which spin for a while after backward, give way at once.
    SLICE_NANOSECONDS = 100000
    TRIAL_BYTES = 16 << 20
    TRIAL_PART = 1 << 18

# Another doubling of the threads must speed a copy up by so much.
cdef double WORTH = 1.15
# How long to look for the end of others' parts before sleeping: about what a wake-up takes.
cdef double SPIN = 50e-6


cdef struct Pool:
    pthread_mutex_t busy        # held by the thread whose work is shared
    pthread_mutex_t lock        # guards what follows
    pthread_cond_t wake         # there is work, or `stop`
    pthread_cond_t left         # no helper is inside any more
    pthread_t threads[MOST_HELPERS]
    int running
    int core                    # which they are kept off
    int allowed                 # how many of them take part
    int stop
    int open                    # helpers may begin with the work
    int inside                  # helpers that are at it; read without the lock
    Part do_part
    void *argument
    size_t parts
    size_t next                 # part to be taken, without the lock


cdef Pool pool
# For how many helpers it was found out how many are of use, and the answer.
cdef int _tried = -1
cdef int _useful = 0


cdef void make_pool() noexcept nogil:
    """Start with no helpers: at first, and in a forked child, where threads and locks are lost."""
    memset(&pool, 0, sizeof(Pool))
    pthread_mutex_init(&pool.busy, NULL)
    pthread_mutex_init(&pool.lock, NULL)
    pthread_cond_init(&pool.wake, NULL)
    pthread_cond_init(&pool.left, NULL)


cdef void do_parts(Part do_part, void *argument, size_t parts) noexcept nogil:
    cdef size_t part = take_part(&pool.next)
    while part < parts:
        do_part(argument, part)
        part = take_part(&pool.next)


cdef void *helper_thread(void *number) noexcept nogil:
    name_thread("mpiddp helper")
    ask_for_slices(SLICE_NANOSECONDS)
    pthread_mutex_lock(&pool.lock)
    while not pool.stop:
        if not pool.open or <size_t>number >= <size_t>pool.allowed:
            pthread_cond_wait(&pool.wake, &pool.lock)
            continue
        store(&pool.inside, pool.inside + 1)
        pthread_mutex_unlock(&pool.lock)
        do_parts(pool.do_part, pool.argument, pool.parts)
        pthread_mutex_lock(&pool.lock)
        pool.open = 0
        store(&pool.inside, pool.inside - 1)
        if pool.inside == 0:
            pthread_cond_signal(&pool.left)
    pthread_mutex_unlock(&pool.lock)
    return NULL


cdef bint take_pool() noexcept nogil:
    """Have all helpers ready, and `busy` held, if they are free and have a core."""
    if pthread_mutex_trylock(&pool.busy) != 0:
        return False
    while pool.running < pool.allowed and create_thread_without_signals(
        &pool.threads[pool.running], helper_thread, <void *><size_t>pool.running
    ) == 0:
        pool.running += 1
        pool.core = -1
    # Linux may wake a helper on this thread's core, where it would only take turns with it.
    if keep_off(pool.threads, pool.running, &pool.core):
        return True
    pthread_mutex_unlock(&pool.busy)
    return False


cdef void share(Part do_part, void *argument, size_t parts, size_t bytes_) noexcept nogil:
    cdef size_t part
    cdef double limit
    if pool.allowed == 0 or parts < 2 or bytes_ < SHARED_BYTES or not take_pool():
        for part in range(parts):
            do_part(argument, part)
        return
    pthread_mutex_lock(&pool.lock)
    pool.do_part, pool.argument, pool.parts, pool.next = do_part, argument, parts, 0
    pool.open = 1
    pthread_cond_broadcast(&pool.wake)
    pthread_mutex_unlock(&pool.lock)
    do_parts(do_part, argument, parts)
    limit = now() + SPIN
    while load(&pool.inside) and now() < limit:
        pass
    pthread_mutex_lock(&pool.lock)
    pool.open = 0
    while pool.inside:
        pthread_cond_wait(&pool.left, &pool.lock)
    pthread_mutex_unlock(&pool.lock)
    pthread_mutex_unlock(&pool.busy)


cdef void copy_for_trial(void *memory, size_t part) noexcept nogil:
    cdef char *from_ = <char *>memory + part * TRIAL_PART
    copy_past_cache(from_ + TRIAL_BYTES, from_, TRIAL_PART)


cdef int find_useful(int most) except -1:
    cdef void *memory = mmap(
        NULL, 2 * TRIAL_BYTES, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0)
    cdef int best = 0, number = 0
    cdef double began, seconds, shortest = 0
    if memory == MAP_FAILED:
        return most
    while number <= min(most, MOST_HELPERS):
        pool.allowed = number
        seconds = 1
        with nogil:
            for _ in range(4):      # the first one starts threads
                began = now()
                share(
                    copy_for_trial, memory, TRIAL_BYTES // TRIAL_PART, TRIAL_BYTES)
                seconds = min(seconds, now() - began)
        if number and seconds * WORTH > shortest:
            break
        best, shortest, number = number, seconds, 2 * number + 1
    munmap(memory, 2 * TRIAL_BYTES)
    return best


cdef bint has_helpers() noexcept nogil:
    return pool.allowed != 0


def useful(int most):
    """Return how many helpers, `most` at most, speed up what the memory must feed.

    Not collective. Of more than one, that is measured: once, in some 20 ms.
    """
    global _tried, _useful
    if most > 1 and _tried != most:
        before = pool.allowed
        _tried, _useful = most, find_useful(most)
        pool.allowed = before
    return _useful if most > 1 else most


def allow(int number):
    """Let so many helpers take part from now on, 0 for none. Not collective."""
    pool.allowed = min(max(number, 0), MOST_HELPERS)


def allowed():
    """Return how many helpers take part. Not collective."""
    return pool.allowed


def stop():
    """End the helpers; they are started again when they are of use. Not collective."""
    cdef int number
    if not pool.running:
        return
    with nogil:
        pthread_mutex_lock(&pool.busy)
        pthread_mutex_lock(&pool.lock)
        pool.stop = 1
        pthread_cond_broadcast(&pool.wake)
        pthread_mutex_unlock(&pool.lock)
        for number in range(pool.running):
            pthread_join(pool.threads[number], NULL)
        pool.running = 0
        pool.stop = 0
        pthread_mutex_unlock(&pool.busy)


make_pool()
if pthread_atfork(NULL, NULL, make_pool):
    raise MemoryError
