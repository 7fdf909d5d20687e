from cpython.object cimport PyObject

from mpiddp.reducer.state cimport ReducerState


cdef class Reducer(ReducerState):
    cdef _register_hook(self, Py_ssize_t index)
    cdef int parameter_ready(self, Py_ssize_t index, object parameter, bint last) except -1
    cdef int count_hook(self, Py_ssize_t index) except -1
    cdef int queue_callback(self) except -1
    cdef int note_hook(self, Py_ssize_t index, object parameter) except -1
    cdef int launch_full_buckets(self, bint must=*) except -1


cdef class ParameterHook:
    cdef PyObject *reducer          # borrowed: the reducer clears it when it goes
    cdef Py_ssize_t index
    cdef object hooks               # all hooks of the parameter: a dictionary, by number
    cdef object key                 # the number of this one

    cdef bint is_last(self) except -1
    cdef int move_to_end(self) except -1
