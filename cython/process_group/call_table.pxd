from mpiddp.transports.shared_memory cimport Mapping


# What `call_digest` returns for `times` tensors of `size` bytes. Below zero is a detail that is
# None; 0 is the dtype of what does not compute.
cdef unsigned long long digest_of(
    unsigned long long name, long long detail, size_t size, int times, unsigned long long dtype,
    long long number,
) noexcept


cdef class CallTable:
    cdef Mapping mapping
    cdef readonly frozenset ranks
    cdef readonly object memory


cdef class CallPage:
    cdef CallTable table
    cdef unsigned long long *words
    cdef bint released

    cdef int compare_word(
        self, unsigned long long *word, long long number, unsigned long long digest
    ) noexcept
    cpdef int enter(self, long long number, unsigned long long digest)
    cdef int compare(self, long long number, unsigned long long digest) noexcept
