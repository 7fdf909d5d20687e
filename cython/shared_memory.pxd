cdef class Mapping:
    cdef char *address
    cdef readonly Py_ssize_t size
