# Combine `size` bytes of another rank with those of this one, in a way of `WAYS`.
cdef void combine(int way, const void *theirs, void *ours, size_t size) noexcept nogil
