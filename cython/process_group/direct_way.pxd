from mpiddp.collectives.group_memory cimport GroupMemory, MemoryPending
from mpiddp.collectives.patience cimport WaitHabit
from mpiddp.process_group.call_table cimport CallPage


cdef struct Plan:
    # What the ranks compare of a call:
    unsigned long long name
    long long detail            # a number of a reduction, of a root or of both; -1: none
    size_t size                 # of each tensor, in bytes
    int times                   # how many tensors
    unsigned long long dtype    # 0 for what does not compute
    # What is done:
    int kind                    # of a MemoryJob
    char *source
    char *target
    int root
    int element                 # of the kernels; else NO_ELEMENT, and
    int way                     # how numbers are combined
    double divisor


cdef Plan plan_of(int kind, unsigned long long name, int times) noexcept


cdef class DirectWay:
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
    cdef dict ways              # by dtype and reduction: how the kernels' others are combined
    cdef bint asks_device       # a barrier may be one of a GPU
    cdef WaitHabit habit

    cdef bint has_room(self) except -1
    cdef bint may_go(self, object opts, object kind) except -1
    cdef char *plain(self, object tensor, int *dtype, size_t *size) except? NULL
    cdef list plain_parts(self, object tensors, int *dtype, list sizes)
    cdef bint reduces(self, object tensor, int dtype, object op, Plan *plan) except -1
    cdef bint fits(self, Plan *plan, list sizes) except -1
    cdef object go(
        self, str name, object detail, object tensors, object opts, Plan *plan, list sources,
        list targets, list sizes, object kept, object result,
    )
    cdef MemoryPending begin(
        self, Plan *plan, list sources, list targets, list sizes, object kept)
    cdef object work_of(
        self, MemoryPending pending, str name, object result, object opts, long long number,
        long long record,
    )


cdef class AtItsEnd:
    cdef object result
