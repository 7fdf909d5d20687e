"""Cut works into chunks, for a transport that sends them: a window of chunks is in flight at once.

Chunks start strictly in order of work and place, so that all ranks match them alike.
"""

from mpi4py.libmpi cimport MPI_SUCCESS

from mpiddp.kernels cimport ELEMENT_FLOAT64
from mpiddp.queues cimport ChannelState, EngineState, Transport, Work, fail
from mpiddp.system cimport now, pthread_mutex_lock, pthread_mutex_unlock, store


cdef void finish_chunk(EngineState *state, ChannelState *channel, size_t slot) noexcept nogil:
    cdef Work *work = channel.slot_work[slot]
    work.finished += channel.slot_count[slot]
    channel.slot_work[slot] = NULL
    channel.slots_used -= 1
    channel.last_progress = now()
    state.chunks += 1
    state.thread_chunks += state.on_thread
    if work.finished == work.count:
        pthread_mutex_lock(&state.queue_lock)
        channel.pending -= 1
        state.pending -= 1
        pthread_mutex_unlock(&state.queue_lock)
        # Last: from here on the bucket may reuse or free the work.
        store(&work.done, 1)


cdef int finish_chunks(EngineState *state, ChannelState *channel) noexcept nogil:
    """Test what is in flight; return how many chunks finished."""
    cdef Transport *transport = channel.transport
    cdef size_t slot
    cdef int finished, code, advanced = 0
    for slot in range(transport.slots):
        if channel.slot_work[slot] == NULL:
            continue
        finished = 0
        code = transport.test(transport, slot, &finished)
        if code != MPI_SUCCESS:
            fail(channel, code)
            return advanced
        if finished:
            finish_chunk(state, channel, slot)
            advanced += 1
    return advanced


cdef int start_chunks(EngineState *state, ChannelState *channel) noexcept nogil:
    """Fill the window from the head of the queue; return how many chunks started."""
    cdef Transport *transport = channel.transport
    cdef Work *work
    cdef size_t slot, count, bytes_sent
    cdef int code, advanced = 0
    for slot in range(transport.slots):
        if channel.slot_work[slot] != NULL:
            continue
        pthread_mutex_lock(&state.queue_lock)
        work = channel.head
        pthread_mutex_unlock(&state.queue_lock)
        if work == NULL:
            return advanced
        # 16-bit elements travel as float32, see Note [Sums of 16-bit gradients].
        bytes_sent = 8 if work.element == ELEMENT_FLOAT64 else 4
        count = min(work.count - work.started, transport.chunk_bytes // bytes_sent)
        code = transport.start(transport, slot, work, work.started, count)
        if code != MPI_SUCCESS:
            fail(channel, code)
            return advanced
        channel.slot_work[slot] = work
        channel.slot_count[slot] = count
        channel.slots_used += 1
        work.started += count
        advanced += 1
        if work.started == work.count:
            pthread_mutex_lock(&state.queue_lock)
            channel.head = work.next
            if channel.head == NULL:
                channel.tail = NULL
            pthread_mutex_unlock(&state.queue_lock)
    return advanced


cdef int move_chunks(EngineState *state, ChannelState *channel) noexcept nogil:
    cdef int advanced = 0
    if channel.slots_used:
        advanced = finish_chunks(state, channel)
    if channel.head != NULL and not channel.failure:
        advanced += start_chunks(state, channel)
    return advanced
