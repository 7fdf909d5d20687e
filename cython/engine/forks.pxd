# Whether this process was forked from a rank: asked before each step that leads to MPI.
cdef int is_child() noexcept nogil
