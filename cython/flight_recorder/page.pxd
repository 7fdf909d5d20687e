from cpython.ref cimport PyObject

from mpiddp.engine.interface cimport JobRecord


# Where the last operation's and the last bucket's ends are noted. Valid as long as the process.
cdef JobRecord *last_operation() noexcept
cdef JobRecord *last_bucket() noexcept

# All of these need the GIL.
cdef void show_bucket(long long id_, int source, long long number, double began) noexcept
cdef int show_operation(
    long long id_, int source, long long number, double began, PyObject *name, PyObject *detail,
    PyObject *dtype, int tensors, int dimensions, const long long *shape
) except -1
cdef void show_end(long long id_, double time) noexcept

# Of a wrapped module, in one of few places.
cdef int take_place() noexcept
cdef void leave_place(int place) noexcept
cdef void show_step(int place, int source, double ended, double step, double exposed) noexcept
cdef void show_comparison(
    int place, long long slowest, long long late, long long compared, double waited,
    double mean_step
) noexcept
