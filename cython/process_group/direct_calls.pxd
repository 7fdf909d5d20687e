from mpiddp.collectives.group_memory cimport GroupMemory, MemoryPending
from mpiddp.collectives.patience cimport WaitHabit
from mpiddp.process_group.call_table cimport CallPage


cdef struct Told:
    # What the ranks compare of a call.
    unsigned long long name
    long long detail            # a number of a reduction, or a root; -1: none
    size_t size                 # of each tensor, in bytes
    int times                   # how many tensors
    unsigned long long dtype    # 0 for what does not compute


cdef class DirectCalls:
    cdef object group
    cdef dict attributes        # of the group
    cdef object members         # of its class
    cdef object state
    cdef object lock            # under which operations start
    cdef GroupMemory memory
    cdef CallPage page
    cdef int source             # of its records
    cdef dict elements          # by torch's number for a dtype: what the kernels call it, ...
    cdef dict codes             # ... and its part of a digest
    cdef bint asks_device       # a barrier may be one of a GPU
    cdef WaitHabit habit

    cdef bint has_room(self) except -1
    cdef bint may_go(self, object opts, object kind) except -1
    cdef char *plain(self, object tensor, int *dtype, size_t *size) except? NULL
    cdef bint reduces(self, int dtype, object op, Told *told) except -1
    cdef bint fits(self, Told *told) except -1
    cdef object go(
        self, int kind, str name, object detail, object tensors, object opts, Told *told,
        char *source, char *target, list addresses, int dtype, object kept, object result,
    )
    cdef object work_of(
        self, MemoryPending pending, str name, object result, object opts, long long number,
        long long record,
    )


cdef class AtItsEnd:
    cdef object result
