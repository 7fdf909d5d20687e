"""The numbers of two ranks combined as MPI's operations do, for data that MPI does not carry.

See Note [The largest of a NaN and a number] in combining.h.
"""

cdef extern from "combining.h":
    ctypedef struct way_t "struct mpiddp_way":
        const char *operation
        const char *dtype
        int size
        void (*combine)(const void *, void *, long) noexcept nogil
    const way_t *mpiddp_ways
    int MPIDDP_WAYS

# How numbers are combined, by names of operation and dtype, such as ("sum", "float32"); from 1.
WAYS = {
    (mpiddp_ways[index].operation.decode(), mpiddp_ways[index].dtype.decode()): index + 1
    for index in range(MPIDDP_WAYS)
}


cdef void combine(int way, const void *theirs, void *ours, size_t size) noexcept nogil:
    cdef const way_t *how = &mpiddp_ways[way - 1]
    how.combine(theirs, ours, <long>(size // <size_t>how.size))
