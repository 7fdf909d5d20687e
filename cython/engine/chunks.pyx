"""Cut jobs into chunks, for a transport that sends them: a window of chunks is in flight at once.

Chunks start strictly in order of job and offset, so that they match on all ranks.
"""

from mpiddp.engine.interface cimport (
    CHUNK_FINISHED, CHUNK_WAITS, ChannelState, ChunkProgress, EngineState, Job, Transport,
    chunk_of, count_chunk, fail, note_chunk, note_end,
)
from mpiddp.mpi.calls cimport MPI_SUCCESS
from mpiddp.system.kernels cimport element_bytes
from mpiddp.system.posix cimport (
    now, pthread_mutex_lock, pthread_mutex_unlock, put, put_time, store,
)


cdef void finish_chunk(EngineState *state, ChannelState *channel, size_t slot) noexcept nogil:
    cdef Job *job = channel.slot_job[slot]
    job.finished += channel.slot_count[slot]
    channel.slot_job[slot] = NULL
    channel.slots_used -= 1
    put_time(&channel.last_progress, now())
    count_chunk(state)
    if job.finished == job.count:
        pthread_mutex_lock(&state.channels_lock)
        put(&channel.pending, channel.pending - 1)
        put(&state.pending, state.pending - 1)
        pthread_mutex_unlock(&state.channels_lock)
        note_end(job, channel.last_progress)
        # Last: from here on the bucket may reuse or free the job.
        store(&job.done, 1)


cdef int finish_chunks(EngineState *state, ChannelState *channel) noexcept nogil:
    """Test what is in flight; return how many chunks finished or moved."""
    cdef Transport *transport = channel.transport
    cdef size_t slot
    cdef int code, advanced = 0
    cdef ChunkProgress progress = CHUNK_WAITS
    for slot in range(transport.slots):
        if channel.slot_job[slot] == NULL:
            continue
        code = transport.test(transport, slot, &progress)
        if code != MPI_SUCCESS:
            fail(state, channel, code)
            return advanced
        if progress == CHUNK_FINISHED:
            finish_chunk(state, channel, slot)
        advanced += progress != CHUNK_WAITS
    return advanced


cdef int start_chunks(EngineState *state, ChannelState *channel) noexcept nogil:
    """Fill the window from the head of the channel; return how many chunks started."""
    cdef Transport *transport = channel.transport
    cdef Job *job
    cdef size_t slot, count, bytes_of_element
    cdef int code, advanced = 0
    for slot in range(transport.slots):
        if channel.slot_job[slot] != NULL:
            continue
        pthread_mutex_lock(&state.channels_lock)
        job = channel.head
        pthread_mutex_unlock(&state.channels_lock)
        if job == NULL:
            return advanced
        bytes_of_element = max(element_bytes(job.element), transport.least_bytes)
        count = chunk_of(job.count - job.started, transport.chunk_bytes // bytes_of_element)
        code = transport.start(transport, slot, job, job.started, count)
        if code != MPI_SUCCESS:
            fail(state, channel, code)
            return advanced
        channel.slot_job[slot] = job
        channel.slot_count[slot] = count
        channel.slots_used += 1
        note_chunk(job, count)
        job.started += count
        advanced += 1
        if job.started == job.count:
            pthread_mutex_lock(&state.channels_lock)
            channel.head = job.next
            if channel.head == NULL:
                channel.tail = NULL
            pthread_mutex_unlock(&state.channels_lock)
    return advanced


cdef int move_chunks(EngineState *state, ChannelState *channel) noexcept nogil:
    cdef int advanced = 0
    if channel.slots_used:
        advanced = finish_chunks(state, channel)
    if not channel.failure:
        advanced += start_chunks(state, channel)
    return advanced
