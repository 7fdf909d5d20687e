# Return the first byte of each page of memory that is this process's own, between two bytes that
# count from an address at the begin of a page; of each page if Linux does not tell. Memory of a
# private mapping of a file is a process's own where it has written.
cdef object own_pages(size_t address, Py_ssize_t start, Py_ssize_t end)
