from mpiddp.transports.shared_memory cimport Mapping


cdef class NodeMemory:
    cdef Mapping mapping
    cdef readonly Py_ssize_t ranks
    cdef readonly bint is_readable
    cdef public object direct_from
