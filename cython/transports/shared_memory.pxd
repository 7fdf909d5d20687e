cdef struct Segment:
    # What forked children must know of a mapping.
    char *address
    size_t size
    int descriptor              # of the file of this rank's own piece, else -1
    unsigned long long device   # which file that is
    unsigned long long inode
    int given_out               # the user has tensors there, see Note [Memory in forked children]
    int private                 # this process was forked: nobody shares it any more
    int own_writes              # what this process writes there stays its own
    Segment *previous
    Segment *next


cdef class Mapping:
    cdef char *address
    cdef readonly Py_ssize_t size
    cdef Segment segment

    cdef void _enlist(self) noexcept nogil
    cdef void _strike_off(self) noexcept nogil
    cdef _map_private(self, int descriptor)
