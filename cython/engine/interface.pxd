# The C interface between the engine, its clients and the transports. No Python.

from mpiddp.system.kernels cimport ElementType
from mpiddp.system.posix cimport (
    now, peek_id, pthread_cond_t, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock,
    pthread_t, put, put_time, store,
)


cdef struct JobRecord:
    # What the flight recorder keeps of a job.
    long long id
    double ended            # seconds on the monotonic clock; 0: not yet
    # While a trace is on: whether to note the moments below, which are 0 where they are not known.
    int traced
    double filled           # the first gradient came
    double full             # the last one came
    double waited           # a thread began to wait for it
    double first_chunk      # was handed to the transport, as was
    double last_chunk


cdef struct Job:
    # The all-reduce of one bucket. Owned by the bucket, lent to the engine from
    # submit until `done`.
    char *data              # summed and divided in place; on a device, without the tail
    size_t count            # elements
    ElementType element
    double divisor          # what the sum over ranks is divided by
    size_t started          # elements handed to the transport so far
    size_t finished         # elements that hold the mean
    void *context           # what the transport keeps with the bucket's memory
    void *stream            # the device's stream that fills `data`; NULL is the default one
    int done                # read and written with load/store of posix.pxd
    JobRecord *record       # where its end is noted, NULL for nowhere, ...
    JobRecord *shown        # ... and here, if `record` is not NULL, for other processes, ...
    long long record_id     # ... unless these are another job's by then
    Job *next


cdef enum Advance:
    # What `advance` says about a job.
    ADVANCE_BLOCKED         # other ranks have not reached this job, nor any later one
    ADVANCE_PENDING         # waiting for others
    ADVANCE_SOME            # something was done, more is left
    ADVANCE_DONE            # the bucket holds the mean
    ADVANCE_FAILED          # MPI returned an error: `code` and `call` of the transport


cdef enum ChunkProgress:
    # What `test` says about a chunk.
    CHUNK_WAITS             # for messages
    CHUNK_MOVED             # its next collective has started
    CHUNK_FINISHED          # its elements hold the mean


cdef struct Transport:
    # What the engine knows of a transport. Each transport's own struct has this one as
    # its first member. A transport either sends chunks (`start`, `test`: they return an MPI
    # error code and leave the call's name in `call`), and the engine cuts the job and keeps
    # the window; or it moves whole jobs by itself (`announce`, `poll`, `advance`).
    size_t slots            # chunks that may be in flight at once, at most MAX_SLOTS
    size_t chunk_bytes      # size of one chunk as it is sent; the last of a job may be longer
    size_t least_bytes      # what an element has at least when it is sent
    const char *call
    int (*start)(
        Transport *transport, size_t slot, Job *job, size_t offset, size_t count
    ) noexcept nogil
    int (*test)(Transport *transport, size_t slot, ChunkProgress *progress) noexcept nogil
    int code                # of a call that failed in `advance`
    # See which messages have arrived; called before `advance`. May be NULL.
    int (*poll)(Transport *transport, int *advanced) noexcept nogil
    # Tell the other ranks that this one has filled the bucket; on the submitting thread.
    void (*announce)(Transport *transport, Job *job) noexcept nogil
    # `helping`: this rank has nothing else to do, so take over what others have not begun.
    Advance (*advance)(Transport *transport, Job *job, int helping) noexcept nogil
    # Called when a job that was advanced is done; the job itself may be gone. May be NULL.
    void (*finished)(Transport *transport) noexcept nogil
    # How to wait for other ranks: take a ticket, look, and if nothing has moved, sleep until
    # something has since the ticket was taken, or the time is over. NULL: by the clock only.
    unsigned int (*take_ticket)(Transport *transport) noexcept nogil
    void (*sleep)(Transport *transport, unsigned int ticket, double seconds) noexcept nogil
    # Whether the engine thread may finish its nap first: by then a thread waits for most jobs.
    int quiet
    # Seconds in which the engine's thread leaves a job to its caller, who may wait for it at once.
    double left_to_caller
    # Seconds for which one who waits yields before it sleeps; 0: YIELD. Where other ranks wake
    # those who wait (`sleep`), the engine's thread yields as well, instead of napping.
    double yields
    int wants_thread        # whether the engine thread serves it, if there is one
    int crowded             # whether there are fewer cores than waiting ranks


cdef enum:
    MAX_SLOTS = 16


cdef struct ChannelState:
    # One ordered channel of jobs, with its own communicator below the transport:
    # chunks start strictly in order, so that they match on all ranks.
    Transport *transport    # NULL in a world of one: a job is done when submitted
    Job *head              # oldest job that has chunks to start
    Job *tail
    Job *slot_job[MAX_SLOTS]
    size_t slot_count[MAX_SLOTS]
    size_t slots_used
    size_t pending          # jobs submitted and not done; peek
    int failure             # first MPI error code, 0 while all is well; load
    const char *failed_call
    double last_progress    # seconds on the monotonic clock; peek_time
    ChannelState *next


cdef struct EngineState:
    pthread_mutex_t channels_lock      # guards channels and counts; held for nanoseconds
    pthread_mutex_t progress_lock   # held by whoever calls MPI
    pthread_cond_t wake             # there are jobs, a waiter left, or stop
    pthread_t thread
    int running
    int stop
    int waiters
    int asleep                      # it sleeps until woken, or dozes; a short nap does not count
    int listening                   # it naps until a socket has news, see Note [Woken by sockets]
    double alert_until              # until then, after a quiet job, it naps instead of sleeping
    double left_until               # until then all jobs are left to their callers
    double yields_until             # until then the thread yields instead of napping
    size_t pending                  # jobs submitted and not done, all channels; peek
    ChannelState *channels
    size_t submitted                # the rest: counters, for tests and debugging; peek
    size_t chunks
    size_t naps
    size_t thread_yields
    size_t thread_chunks
    int on_thread                   # whether the current step runs on the engine thread
    size_t heard                    # steps that moved something after news from a socket, lately
    size_t missed                   # and after a sleep that no socket ended


cdef inline size_t chunk_of(size_t left, size_t chunk) noexcept nogil:
    """How many of the elements that are left the next chunk has; a short rest joins the last one.

    Small buckets are often a little longer than a chunk, and each chunk costs a round of messages.
    """
    return left if left <= longest_chunk(chunk) else chunk


cdef inline size_t longest_chunk(size_t chunk) noexcept nogil:
    return chunk + chunk // 4


cdef inline void note_end(Job *job, double time) noexcept nogil:
    if job.record != NULL and peek_id(&job.record.id) == job.record_id:
        put_time(&job.record.ended, time)
        if peek_id(&job.shown.id) == job.record_id:
            put_time(&job.shown.ended, time)


cdef inline void note_chunk(Job *job, size_t count) noexcept nogil:
    # Before `count` is added to `started`.
    cdef double time
    if job.record != NULL and job.record.traced and peek_id(&job.record.id) == job.record_id:
        time = now()
        if job.started == 0:
            put_time(&job.record.first_chunk, time)
        if job.started + count == job.count:
            put_time(&job.record.last_chunk, time)


cdef inline void note_wait(Job *job) noexcept nogil:
    if (
        job.record != NULL and job.record.traced and job.record.waited == 0
        and peek_id(&job.record.id) == job.record_id
    ):
        job.record.waited = now()


cdef inline void count_chunk(EngineState *state) noexcept nogil:
    put(&state.chunks, state.chunks + 1)
    put(&state.thread_chunks, state.thread_chunks + state.on_thread)


cdef inline void fail(EngineState *state, ChannelState *channel, int code) noexcept nogil:
    channel.failed_call = channel.transport.call
    if channel.failed_call == NULL:  # it has called nothing so far
        channel.failed_call = "the wait for other ranks"
    store(&channel.failure, code)
    if channel.transport.wants_thread:
        # Its jobs move no more: the engine's thread need not look for them.
        pthread_mutex_lock(&state.channels_lock)
        put(&state.pending, state.pending - channel.pending)
        pthread_mutex_unlock(&state.channels_lock)
