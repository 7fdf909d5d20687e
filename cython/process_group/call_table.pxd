from mpiddp.transports.shared_memory cimport Mapping


cdef class CallTable:
    cdef Mapping mapping
    cdef readonly frozenset ranks


cdef class CallPage:
    cdef CallTable table
    cdef unsigned long long *words
    cdef bint released

    cdef int compare_word(
        self, unsigned long long *word, long long number, unsigned long long digest
    ) noexcept
    cdef int compare(self, long long number, unsigned long long digest) noexcept
