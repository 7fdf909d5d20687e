"""Move the jobs of all channels along: on the engine's thread, or on one that waits.

Note [Who makes progress]
~~~~~~~~~~~~~~~~~~~~~~~~~
MPI moves a nonblocking collective only while a thread is inside MPI. That is one
thread at a time, the holder of `progress_lock`:

* the engine thread, while backward runs. Between steps it naps, because a thread
  that spins takes a core from the backward that it is meant to overlap with. The
  nap doubles while nothing finishes, until waking in vain takes a hundredth of a
  core at most. It is cut short when a job is submitted.
* the thread that waits at the end of backward. It announces itself (`waiters`),
  the engine thread goes to sleep, and the waiter tests without naps at first: it
  spins briefly, then yields, then sleeps, so that ranks that outnumber the cores
  do not take time from each other.
* without an engine thread, each hook takes one step (`poke`).

Single messages that were sent or received a moment ago are left to their caller, who mostly
waits for them at once (`left_to_caller`): to be woken for each, and to take the core of another
rank that copies, would make them a third slower. While nothing is left for it, the engine
thread dozes, for longer after each time in vain.

In the node's memory, where ranks are more than cores, each step needs all ranks to have had a
turn on a core. Both the thread and the waiter then yield for a while instead of sleeping: others
get the core at once, and nobody has to be woken.

Where the network is TCP, sleeps and naps end when a message comes, see
Note [Woken by sockets] in system/sockets.pyx. Where that has proved right lately
(`hears`), the waiter need not yield before it sleeps. One that sleeps until another
rank wakes it cannot listen as well: there the engine's thread goes on (`served`).
A thread that waits asks for short time slices. Linux then gives it the core
at once when it wakes up, also from a program that uses all of it.
"""

from mpiddp.engine.chunks cimport move_chunks
from mpiddp.engine.interface cimport (
    ADVANCE_BLOCKED, ADVANCE_DONE, ADVANCE_FAILED, ADVANCE_PENDING, Advance, Transport, count_chunk,
    fail, note_end,
)
from mpiddp.mpi.calls cimport MPI_SUCCESS
from mpiddp.system.posix cimport (
    ask_for_slices, load, name_thread, now, peek, processor_time, pthread_cond_signal,
    pthread_cond_wait, pthread_mutex_lock, pthread_mutex_trylock, pthread_mutex_unlock, put,
    put_time, sched_yield, store, wait_for_signal,
)
from mpiddp.system.sockets cimport has_sockets, interrupt, listen
from mpiddp.system.waiting cimport SPIN, YIELD, give_way, sleep_after


# How long to nap and wait, in seconds: see docs/explanation/thread.md for the measurements.
cdef double NAP_SHORTEST = 50e-6
cdef double NAP_LONGEST = 200e-6
cdef double NAP_LIMIT = 1e-3
cdef double NAPS_TO_WAKING = 100
cdef double SPIN_BEFORE_SLEEP = 50e-6
cdef double SIGNAL_CHECK = 0.1
cdef double ALERT = 10e-3
# To wake up takes tens of microseconds of a core. After each time in vain it dozes twice as long.
cdef double DOZE_LONGEST = 5e-3
# Waking that takes so many times as long as others has moved something.
cdef double MOVED = 3


cdef enum:
    # Of EngineState.asleep: until woken, or for longer than a nap.
    ASLEEP = 1
    DOZING = 2


cdef enum:
    # The shortest that Linux grants: when a message has come, a backward on the same core is
    # interrupted at once instead of 3 ms later.
    SLICE_NANOSECONDS = 100000
    HAS_LISTENED = 1
    HAS_NEWS = 2
    # Sockets are believed when they have told of so many more messages than they missed, ...
    BELIEVED = 4
    # ... among so many.
    REMEMBERED = 64


cdef int hears(EngineState *state) noexcept nogil:
    return peek(&state.heard) >= peek(&state.missed) + BELIEVED


cdef int step_after_sleep(EngineState *state, int helping, int news) noexcept nogil:
    """Take one step; or two, if a socket had news: one to read them, one to go on with them."""
    cdef int advanced = step_channels(state, helping)
    if not advanced and news:
        advanced = step_channels(state, helping)
    return advanced


cdef void learn(EngineState *state, int told) noexcept nogil:
    """Count something that moved after sleeps, in which a socket told so or not.

    The caller holds `progress_lock`.
    """
    if told:
        put(&state.heard, state.heard + 1)
    else:
        put(&state.missed, state.missed + 1)
    if state.heard + state.missed == REMEMBERED:
        put(&state.heard, state.heard // 2)
        put(&state.missed, state.missed // 2)


cdef void wake_thread(EngineState *state) noexcept nogil:
    if state.listening:
        interrupt()
    else:
        pthread_cond_signal(&state.wake)


cdef int nap_for(EngineState *state, double seconds) noexcept nogil:
    """Nap, with `channels_lock` held before and after; return whether a socket had news."""
    cdef int news
    if not has_sockets():
        wait_for_signal(&state.wake, &state.channels_lock, seconds)
        return False
    state.listening = 1
    pthread_mutex_unlock(&state.channels_lock)
    news = listen(seconds)
    pthread_mutex_lock(&state.channels_lock)
    state.listening = 0
    return news


cdef int job_is_done(Job *job) noexcept nogil:
    return load(&job.done)


cdef int advance_jobs(EngineState *state, ChannelState *channel, int helping) noexcept nogil:
    """Let a transport move its jobs; return how many steps they took."""
    cdef Transport *transport = channel.transport
    cdef Job *job
    cdef Job *previous = NULL
    cdef Job *following
    cdef Advance status
    cdef int code, advanced = 0
    if transport.poll != NULL:
        code = transport.poll(transport, &advanced)
        if code != MPI_SUCCESS:
            fail(state, channel, code)
            return advanced
    pthread_mutex_lock(&state.channels_lock)
    job = channel.head
    pthread_mutex_unlock(&state.channels_lock)
    while job != NULL:
        status = transport.advance(transport, job, helping)
        if status == ADVANCE_FAILED:
            fail(state, channel, transport.code)
            return advanced
        if status == ADVANCE_BLOCKED:
            return advanced
        pthread_mutex_lock(&state.channels_lock)
        following = job.next
        if status == ADVANCE_DONE:
            if previous == NULL:
                channel.head = following
            else:
                previous.next = following
            if following == NULL:
                channel.tail = previous
            put(&channel.pending, channel.pending - 1)
            if transport.wants_thread:
                put(&state.pending, state.pending - 1)
        pthread_mutex_unlock(&state.channels_lock)
        if status == ADVANCE_DONE:
            put_time(&channel.last_progress, now())
            if not transport.quiet:
                count_chunk(state)
            note_end(job, channel.last_progress)
            store(&job.done, 1)
            if transport.finished != NULL:
                transport.finished(transport)
        else:
            previous = job
        advanced += status != ADVANCE_PENDING
        job = following
    return advanced


cdef int step_channels(EngineState *state, int helping) noexcept nogil:
    """Take one step on every channel. The caller holds `progress_lock`."""
    cdef ChannelState *channel = state.channels
    cdef int steps, advanced = 0
    while channel != NULL:
        if peek(&channel.pending) and not channel.failure:
            if channel.transport.advance != NULL:
                steps = advance_jobs(state, channel, helping)
                if steps and channel.transport.sleep != NULL and channel.transport.yields:
                    state.yields_until = now() + channel.transport.yields
                advanced += steps
            else:
                advanced += move_chunks(state, channel)
        channel = channel.next
    return advanced


cdef int is_to_wake(EngineState *state, Transport *transport) noexcept nogil:
    """Return whether a job is worth the time that it takes to wake the engine's thread."""
    if transport.left_to_caller:
        return state.asleep == ASLEEP
    return state.asleep or not transport.quiet


cdef void enqueue(EngineState *state, ChannelState *channel, Job *job) noexcept nogil:
    cdef Transport *transport = channel.transport
    job.started = 0
    job.finished = 0
    job.next = NULL
    store(&job.done, 0)
    if transport.announce != NULL:
        transport.announce(transport, job)
    pthread_mutex_lock(&state.channels_lock)
    if channel.tail == NULL:
        channel.head = job
    else:
        channel.tail.next = job
    channel.tail = job
    put(&channel.pending, channel.pending + 1)
    if transport.wants_thread:
        put(&state.pending, state.pending + 1)
        if transport.quiet:
            state.alert_until = now() + ALERT
        if state.pending == 1 and transport.left_to_caller:
            state.left_until = now() + transport.left_to_caller
        elif not transport.left_to_caller:
            state.left_until = 0
        if state.running and not state.waiters and is_to_wake(state, transport):
            wake_thread(state)
    pthread_mutex_unlock(&state.channels_lock)


cdef void *engine_thread(void *argument) noexcept nogil:
    cdef EngineState *state = <EngineState *>argument
    cdef double nap = NAP_SHORTEST
    cdef double longest = NAP_LONGEST
    cdef double ran = processor_time()
    cdef double running, waking = 0
    cdef double doze = NAP_LONGEST
    cdef int advanced, news = False, told = False
    name_thread("mpiddp engine")
    ask_for_slices(SLICE_NANOSECONDS)
    pthread_mutex_lock(&state.channels_lock)
    while not state.stop:
        if state.waiters or not state.pending or now() < state.left_until:
            if now() < state.alert_until:
                state.asleep = DOZING if doze > NAP_LONGEST else 0
                wait_for_signal(&state.wake, &state.channels_lock, doze)
                doze = min(2 * doze, DOZE_LONGEST)
            else:
                state.asleep = ASLEEP
                pthread_cond_wait(&state.wake, &state.channels_lock)
                doze = NAP_LONGEST
            state.asleep = 0
            nap = NAP_SHORTEST
            ran = processor_time()
            continue
        doze = NAP_LONGEST
        pthread_mutex_unlock(&state.channels_lock)
        advanced = 0
        if pthread_mutex_trylock(&state.progress_lock) == 0:
            state.on_thread = 1
            advanced = step_after_sleep(state, False, news)
            state.on_thread = 0
            told |= news
            if advanced and has_sockets():
                learn(state, told)
                told = False
            pthread_mutex_unlock(&state.progress_lock)
        news = False
        running = processor_time()
        # MPI does not tell what it has done inside of a collective; the time that it took does.
        if not advanced and waking:
            advanced = running - ran > MOVED * waking
        if advanced:
            nap = NAP_SHORTEST
        else:
            # What one wake-up costs in which nothing was there, averaged over the last few.
            waking += 0.2 * (running - ran - waking)
            longest = min(max(NAPS_TO_WAKING * waking, NAP_LONGEST), NAP_LIMIT)
            nap = min(2 * nap, longest)
        ran = running
        pthread_mutex_lock(&state.channels_lock)
        if state.pending and not state.waiters and now() < state.yields_until:
            put(&state.thread_yields, state.thread_yields + 1)
            pthread_mutex_unlock(&state.channels_lock)
            sched_yield()
            pthread_mutex_lock(&state.channels_lock)
        elif not state.stop and not state.waiters:
            put(&state.naps, state.naps + 1)
            news = nap_for(state, nap)
    pthread_mutex_unlock(&state.channels_lock)
    return NULL


cdef int relax(
    EngineState *state, Transport *transport, unsigned int ticket, double idle, int served
) noexcept nogil:
    """Give up the core; sleep as soon as spinning does not pay, if something wakes this thread.

    Return HAS_LISTENED if that was to sockets, with HAS_NEWS if one had news, else 0.
    """
    if transport.sleep != NULL and idle < transport.yields:
        sched_yield()
    elif transport.sleep != NULL and (served or not peek(&state.pending)):
        # Messages are none or not this thread's: another rank's bell is all that it waits for.
        if transport.crowded or idle > SPIN_BEFORE_SLEEP:
            transport.sleep(transport, ticket, SIGNAL_CHECK)
    elif transport.sleep != NULL and idle > YIELD:
        transport.sleep(transport, ticket, sleep_after(idle))
    elif transport.sleep == NULL and idle > (SPIN if hears(state) else YIELD) and has_sockets():
        return HAS_LISTENED | (HAS_NEWS if listen(sleep_after(idle)) else 0)
    elif transport.sleep == NULL and SPIN < idle < transport.yields:
        sched_yield()
    else:
        give_way(idle)
    return 0


cdef int drive(
    EngineState *state, ChannelState *channel, Job *job, double until, int served
) noexcept nogil:
    cdef Transport *transport = channel.transport
    cdef double idle_since = now()
    cdef double time
    cdef unsigned long long slices = 0
    cdef unsigned int ticket = 0
    cdef int advanced, sleep = 0, told = 0, asked = False
    while not load(&job.done) and not load(&channel.failure):
        if transport.take_ticket != NULL:
            ticket = transport.take_ticket(transport)
        # If another thread holds the lock, nothing was tested here: do not sleep.
        advanced = 1
        if pthread_mutex_trylock(&state.progress_lock) == 0:
            advanced = step_after_sleep(state, True, sleep & HAS_NEWS)
            told |= sleep
            if advanced:
                if told:
                    learn(state, told & HAS_NEWS)
                told = 0
            pthread_mutex_unlock(&state.progress_lock)
        else:
            sched_yield()
        sleep = 0
        time = now()
        if time > until:
            break
        if advanced:
            idle_since = time
            continue
        if time - idle_since > SPIN and peek(&state.pending) and not asked:
            slices = ask_for_slices(SLICE_NANOSECONDS)
            asked = True
        sleep = relax(state, transport, ticket, time - idle_since, served)
    if asked:
        ask_for_slices(slices)
    return load(&job.done) or load(&channel.failure)
