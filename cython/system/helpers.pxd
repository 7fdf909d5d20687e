# Do part number `part` of some work.
ctypedef void (*Part)(void *argument, size_t part) noexcept nogil

# Do `parts` parts, each once, on this thread and on helpers; return when all are done. Work on
# fewer than SHARED_BYTES of memory is done on this thread alone, and so is what comes while the
# helpers are busy. May be called on any thread.
cdef void share(Part do_part, void *argument, size_t parts, size_t bytes_) noexcept nogil

# Whether there are any.
cdef bint has_helpers() noexcept nogil

cdef enum:
    # Less is nearly done before a helper is awake: see benchmarks/helpers.py.
    SHARED_BYTES = 1 << 21
