"""The direct exchange of one chunk: every node adds one slice of it, in an order of its own.

Note [Direct exchange]
~~~~~~~~~~~~~~~~~~~~~~
A chunk is cut into one slice a node. MPI_Ialltoallv brings each node all copies of its slice but
its own, which stays where it is (MPI_Ialltoall would copy it). The node adds them in float32
(float64 for float64), always in the order of the nodes, and divides. MPI_Iallgather hands the
means round (MPI_Iallgatherv, where slices are not equally long). So MPI adds nothing: elements
travel in their own type, 16-bit ones in 16 bits, and the bits of the result depend on no MPI. A
node sends as many bytes as in any other good all-reduce, in 2 (nodes - 1) messages.

With two levels these are fewer: the nodes form groups of equal size. The slices of a group's sum
are exchanged among the nodes that have the same place in their groups, each cut into one slice
a group; then both are gathered. All slices are equally long there, the last ones with zeros behind
their elements. The order of the sum is: in the group by node, then by group.

A 16-bit element is rounded where it is sent: as a rank's gradient (by the hook or by the model),
as the sum of a node's ranks if there are several, as the sum of a group if there are two levels,
and as the mean.

Note [Order of collectives]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Collectives must start in the same order on all ranks of a communicator, and chunks arrive in an
order that depends on timing. So each step of a chunk has a communicator of its own, on which
chunks start in order: each when all earlier chunks have begun theirs.

Note [Sums that overflow on the way]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A sum of a part of the ranks may be rounded to infinity where the mean is a number: in float16
beyond 65504. All ranks get the same means; where these are not all finite, the chunk goes through
all steps a second time, with its elements scaled, and means that were not finite are replaced: see
Note [Sums that overflow] in kernels_values.h. Whether an earlier chunk needs that must be known
before a later one begins its second pass. Where each slice is a rank's own, the node that adds
them sees an overflow by itself, and nothing travels twice.
"""

from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from mpiddp.engine.interface cimport CHUNK_FINISHED, CHUNK_MOVED, CHUNK_WAITS
from mpiddp.mpi.calls cimport MPI_SUCCESS, mpi
from mpiddp.system.kernels cimport element_bytes, scale_of, selected_kernels


cdef inline size_t slice_of(size_t count, size_t members) noexcept nogil:
    """How many elements a member adds; the last ones may have fewer to add, or none."""
    return (count + members - 1) // members


cdef inline size_t rounded_up(size_t bytes_, size_t members) noexcept:
    # Elements have up to 8 bytes, and members up to 7 bytes too many each.
    return (bytes_ + 16 * members + 63) // 64 * 64


cdef size_t room_needed(ChunkExchange *exchange, size_t bytes_) noexcept:
    cdef size_t outer = rounded_up(bytes_, exchange.levels[0].members)
    if exchange.level_count == 1:
        return 2 * outer
    return 2 * outer + 2 * rounded_up(
        outer // exchange.levels[0].members, exchange.levels[1].members)


cdef int set_up(
    ChunkExchange *exchange, Transport *transport, char *memory, size_t window, size_t stride,
    size_t bytes_,
) noexcept:
    cdef size_t outer = rounded_up(bytes_, exchange.levels[0].members)
    cdef size_t inner = room_needed(exchange, bytes_) // 2 - outer
    cdef size_t members = 0, slot, level
    cdef ExchangedChunk *chunk
    for level in range(exchange.level_count):
        members = max(members, exchange.levels[level].members)
    exchange.transport = transport
    for slot in range(window):
        chunk = &exchange.slots[slot]
        chunk.room = memory + slot * stride
        chunk.other_room = chunk.room + outer
        chunk.inner_room = chunk.other_room + outer
        chunk.other_inner_room = chunk.inner_room + inner
        chunk.request = mpi.request_null
        chunk.slices = <char **>calloc(members, sizeof(char *))
        chunk.sizes = <int *>calloc(members, sizeof(int))
        chunk.own_sizes = <int *>calloc(members, sizeof(int))
        chunk.places = <int *>calloc(members, sizeof(int))
        if (
            chunk.slices == NULL or chunk.sizes == NULL or chunk.own_sizes == NULL
            or chunk.places == NULL
        ):
            return -1
    return 0


cdef void clear(ChunkExchange *exchange) noexcept:
    cdef size_t slot
    for slot in range(MAX_SLOTS):
        free(exchange.slots[slot].slices)
        free(exchange.slots[slot].sizes)
        free(exchange.slots[slot].own_sizes)
        free(exchange.slots[slot].places)


cdef size_t slice_at(ChunkExchange *exchange, ExchangedChunk *chunk, size_t level) noexcept nogil:
    """How many elements lie between the slices of two members; nearly all have so many."""
    cdef size_t outer = slice_of(chunk.count, exchange.levels[0].members)
    return outer if level == 0 else slice_of(outer, exchange.levels[1].members)


cdef size_t added_by(
    ChunkExchange *exchange, ExchangedChunk *chunk, size_t level, size_t member
) noexcept nogil:
    """How many elements a member of a level adds."""
    cdef size_t slice_ = slice_at(exchange, chunk, level)
    if exchange.level_count > 1:
        return slice_
    return min(slice_, chunk.count - min(member * slice_, chunk.count))


cdef void pad(
    char *array, size_t count, size_t whole, size_t bytes_of_element
) noexcept nogil:
    memset(array + count * bytes_of_element, 0, (whole - count) * bytes_of_element)


cdef int may_start(ChunkExchange *exchange, ExchangedChunk *chunk) noexcept nogil:
    """Whether all earlier chunks have begun this step; see Note [Order of collectives]."""
    cdef ExchangedChunk *other
    cdef size_t slot
    for slot in range(MAX_SLOTS):
        other = &exchange.slots[slot]
        if other.phase == EXCHANGE_NONE or other.number >= chunk.number:
            continue
        if other.again != chunk.again:
            if chunk.again:
                return False        # nobody knows yet whether that one comes again
        elif other.step + (other.phase == EXCHANGE_TRAVELS) <= chunk.step:
            return False
    return True


cdef int begin_step(ChunkExchange *exchange, ExchangedChunk *chunk) noexcept nogil:
    """Start the collective of this step; return an MPI error code."""
    cdef size_t levels = exchange.level_count
    cdef int gathers = chunk.step >= levels
    cdef size_t number = 2 * levels - 1 - chunk.step if gathers else chunk.step
    cdef size_t member
    cdef Level *level = &exchange.levels[number]
    cdef int width = <int>element_bytes(chunk.job.element)
    cdef int bytes_ = <int>slice_at(exchange, chunk, number) * width
    cdef int own = <int>added_by(exchange, chunk, number, level.member) * width
    cdef int equal = True
    chunk.phase = EXCHANGE_TRAVELS
    for member in range(level.members):
        chunk.sizes[member] = <int>added_by(exchange, chunk, number, member) * width
        chunk.own_sizes[member] = own
        chunk.places[member] = <int>member * bytes_
        equal = equal and chunk.sizes[member] == bytes_
    if gathers and equal:
        exchange.transport.call = "MPI_Iallgather"
        return mpi.iallgather(
            mpi.in_place, 0, mpi.datatype_null, chunk.inner_room if number else chunk.means,
            bytes_, mpi.byte, level.gather[chunk.again], &chunk.request,
        )
    if gathers:
        exchange.transport.call = "MPI_Iallgatherv"
        return mpi.iallgatherv(
            mpi.in_place, 0, mpi.datatype_null, chunk.inner_room if number else chunk.means,
            chunk.sizes, chunk.places, mpi.byte, level.gather[chunk.again], &chunk.request,
        )
    chunk.sizes[level.member] = chunk.own_sizes[level.member] = 0
    exchange.transport.call = "MPI_Ialltoallv"
    return mpi.ialltoallv(
        chunk.inner_room if number else chunk.sent, chunk.sizes, chunk.places, mpi.byte,
        chunk.other_inner_room if number else chunk.received, chunk.own_sizes, chunk.places,
        mpi.byte, level.exchange[chunk.again], &chunk.request,
    )


cdef void add_slices(ChunkExchange *exchange, ExchangedChunk *chunk, size_t number) noexcept nogil:
    """Add what has arrived at this level, and put it where the next collective sends it from."""
    cdef Level *level = &exchange.levels[number]
    cdef size_t bytes_of_element = element_bytes(chunk.job.element)
    cdef size_t count = added_by(exchange, chunk, number, level.member)
    cdef size_t bytes_ = slice_at(exchange, chunk, number) * bytes_of_element
    cdef char *received = chunk.other_inner_room if number else chunk.received
    cdef char *target = chunk.inner_room
    cdef double divisor = 1
    cdef size_t member
    if number == exchange.level_count - 1:
        target = (chunk.inner_room if number else chunk.means) + level.member * bytes_
        divisor = chunk.job.divisor
        if chunk.again:
            divisor *= scale_of(divisor)
    else:
        pad(target, count, exchange.levels[1].members * slice_at(exchange, chunk, 1),
            bytes_of_element)
    for member in range(level.members):
        chunk.slices[member] = received + member * bytes_
    chunk.slices[level.member] = (
        (chunk.inner_room if number else chunk.sent) + level.member * bytes_)
    selected_kernels().mean_to(
        chunk.job.element, target, chunk.slices, level.members, 0, count, divisor)


cdef void repeat(ChunkExchange *exchange, ExchangedChunk *chunk) noexcept nogil:
    """Prepare the second pass; the buffers hold the means of the first one until its end."""
    cdef size_t bytes_of_element = element_bytes(chunk.job.element)
    cdef size_t rank
    selected_kernels().scaled_sum_as_element(
        chunk.job.element, chunk.other_room, chunk.buffers, chunk.ranks, chunk.first,
        chunk.count, chunk.job.divisor)
    pad(chunk.other_room, chunk.count,
        exchange.levels[0].members * slice_at(exchange, chunk, 0), bytes_of_element)
    for rank in range(chunk.ranks):
        memcpy(chunk.buffers[rank] + chunk.first * bytes_of_element, chunk.means,
               chunk.count * bytes_of_element)
    chunk.received = chunk.means
    chunk.sent = chunk.means = chunk.other_room
    chunk.again = 1
    chunk.step = 0
    chunk.phase = EXCHANGE_WAITS


cdef int finish(ChunkExchange *exchange, ExchangedChunk *chunk) noexcept nogil:
    """Write the means to all buffers; return whether the chunk is finished."""
    cdef size_t offset = chunk.first * element_bytes(chunk.job.element)
    cdef size_t bytes_ = chunk.count * element_bytes(chunk.job.element)
    cdef size_t rank
    if exchange.repeats and not chunk.again and not selected_kernels().are_finite(
        chunk.job.element, chunk.means, chunk.count
    ):
        repeat(exchange, chunk)
        return False
    for rank in range(chunk.ranks):
        if chunk.again:
            selected_kernels().replace_special(
                chunk.job.element, chunk.buffers[rank] + offset, chunk.means, chunk.count)
        elif chunk.means != chunk.buffers[rank] + offset:
            memcpy(chunk.buffers[rank] + offset, chunk.means, bytes_)
    chunk.phase = EXCHANGE_NONE
    return True


cdef int end_step(ChunkExchange *exchange, ExchangedChunk *chunk) noexcept nogil:
    """Do what follows a collective that has ended; return whether the chunk is finished."""
    cdef size_t levels = exchange.level_count
    cdef size_t outer
    if chunk.step < levels:
        add_slices(exchange, chunk, chunk.step)
    elif chunk.step < 2 * levels - 1:
        # A group's slice is complete.
        outer = slice_at(exchange, chunk, 0) * element_bytes(chunk.job.element)
        memcpy(chunk.means + exchange.levels[0].member * outer, chunk.inner_room, outer)
    else:
        return finish(exchange, chunk)
    chunk.step += 1
    chunk.phase = EXCHANGE_WAITS
    return False


cdef int start_exchange(
    ChunkExchange *exchange, size_t slot, Job *job, char **buffers, size_t ranks, size_t first,
    size_t count,
) noexcept nogil:
    cdef ExchangedChunk *chunk = &exchange.slots[slot]
    cdef size_t bytes_of_element = element_bytes(job.element)
    cdef size_t whole
    chunk.job = job
    chunk.buffers = buffers
    chunk.ranks = ranks
    chunk.first = first
    chunk.count = count
    chunk.number = exchange.started
    chunk.step = 0
    chunk.again = 0
    exchange.started += 1
    chunk.sent = chunk.means = chunk.room
    chunk.received = chunk.other_room
    whole = exchange.levels[0].members * slice_at(exchange, chunk, 0)
    # Without levels nothing stands behind the elements, so no copy is needed.
    if ranks == 1 and (whole == count or exchange.level_count == 1):
        chunk.sent = buffers[0] + first * bytes_of_element
        if not exchange.repeats:
            chunk.means = chunk.sent
    else:
        if ranks == 1:
            memcpy(chunk.sent, buffers[0] + first * bytes_of_element, count * bytes_of_element)
        else:
            selected_kernels().mean_to(job.element, chunk.sent, buffers, ranks, first, count, 1)
        pad(chunk.sent, count, whole, bytes_of_element)
    # All earlier chunks have begun this step: they have started in order.
    return begin_step(exchange, chunk)


cdef int test_exchange(
    ChunkExchange *exchange, size_t slot, ChunkProgress *progress
) noexcept nogil:
    cdef ExchangedChunk *chunk = &exchange.slots[slot]
    cdef int code, arrived = 0
    progress[0] = CHUNK_WAITS
    if chunk.phase == EXCHANGE_TRAVELS:
        exchange.transport.call = "MPI_Test"
        code = mpi.test(&chunk.request, &arrived, NULL)
        if code != MPI_SUCCESS or not arrived:
            return code
        if end_step(exchange, chunk):
            progress[0] = CHUNK_FINISHED
            return MPI_SUCCESS
        progress[0] = CHUNK_MOVED
    if may_start(exchange, chunk):
        progress[0] = CHUNK_MOVED
        return begin_step(exchange, chunk)
    return MPI_SUCCESS
