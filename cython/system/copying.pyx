"""Copy and convert much memory at once: past the caches if they cannot hold it, and with helpers.

A usual store reads the line that it writes to. For memory that is in no cache that is a third of
the traffic, and for nothing: all of the line is overwritten. Stores past the cache do not, but then
whoever reads the copy next finds it in memory only. So they are used where it would be there
anyway.
"""

from libc.string cimport memmove

from mpiddp.system.helpers cimport share
from mpiddp.system.kernels cimport copy_past_cache, element_bytes, selected_kernels


cdef enum:
    SMALL_BYTES = 1 << 16
    PART_BYTES = 1 << 18
    PART_ELEMENTS = 1 << 16

# How much fits into the caches that this process uses.
cdef size_t _cached = <size_t>-1


cdef struct Copy:
    char *to
    const char *from_
    size_t bytes_
    bint past_cache


cdef struct Conversion:
    ElementType to
    ElementType from_
    char *out
    const char *array
    size_t count


cdef void copy_part(void *argument, size_t part) noexcept nogil:
    cdef Copy *work = <Copy *>argument
    cdef size_t first = part * PART_BYTES
    cdef size_t bytes_ = min(<size_t>PART_BYTES, work.bytes_ - first)
    if work.past_cache:
        copy_past_cache(work.to + first, work.from_ + first, bytes_)
    else:
        memmove(work.to + first, work.from_ + first, bytes_)


cdef void copy(char *to, const char *from_, size_t bytes_, size_t total) noexcept nogil:
    cdef Copy work
    if bytes_ < SMALL_BYTES or (to < from_ + bytes_ and from_ < to + bytes_):
        memmove(to, from_, bytes_)
        return
    work.to, work.from_, work.bytes_, work.past_cache = to, from_, bytes_, 2 * total > _cached
    share(copy_part, &work, (bytes_ + PART_BYTES - 1) // PART_BYTES, bytes_)


cdef void convert_part(void *argument, size_t part) noexcept nogil:
    cdef Conversion *work = <Conversion *>argument
    cdef size_t first = part * PART_ELEMENTS
    selected_kernels().convert(
        work.to, work.from_, work.out + first * element_bytes(work.to),
        work.array + first * element_bytes(work.from_),
        min(<size_t>PART_ELEMENTS, work.count - first),
    )


cdef void convert(
    ElementType to, ElementType from_, char *out, const char *array, size_t count
) noexcept nogil:
    cdef Conversion work
    work.to, work.from_, work.out, work.array, work.count = to, from_, out, array, count
    share(
        convert_part, &work, (count + PART_ELEMENTS - 1) // PART_ELEMENTS,
        count * (element_bytes(to) + element_bytes(from_)) // 2,
    )


def keep_in_cache(size_t bytes_):
    """Say how much memory the caches of this process hold. Not collective.

    Args:
        bytes_: copies that belong to more than this go past the caches.
    """
    global _cached
    _cached = bytes_


def copy_tensor(to, from_):
    """Copy a contiguous CPU tensor to another one of its size, for tests. Not collective."""
    cdef char *target = <char *><size_t>to.data_ptr()
    cdef const char *source = <const char *><size_t>from_.data_ptr()
    cdef size_t bytes_ = from_.nbytes
    with nogil:
        copy(target, source, bytes_, bytes_)
