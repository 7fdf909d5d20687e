from mpiddp.collectives.memory_jobs cimport MemoryJob, MemoryState
from mpiddp.engine.engine cimport Channel, Engine
from mpiddp.engine.interface cimport Job
from mpiddp.transports.shared_memory cimport Mapping


cdef char **addresses_of(addresses, size_t ranks) except NULL
cdef void clear_regions(char *regions, size_t ranks) noexcept
cdef GroupMemory make_group(
    Mapping mapping, char *regions, unsigned int ranks, unsigned int rank, requests)


cdef class GroupMemory:
    cdef MemoryState state
    cdef Mapping mapping
    cdef Engine engine
    cdef object requests        # kept: `state` has its address
    cdef Channel channel        # None until something is submitted
    cdef list under_way         # what the engine moves along
    cdef MemoryPending awaited  # its caller moves it along, None if nothing is left so
    cdef bint thread_has_core   # the engine's, see Note [Who carries a collective out]
    cdef public bint at_once    # whether the caller waits for what is begun next

    cdef bint is_free(self)
    cdef void give_up(self)
    cdef bint may_leave(self, MemoryJob *job) noexcept nogil
    cdef int submit(self, MemoryPending pending) except -1
    cdef int settle(self) except -1
    cdef void let_drive(self)
    cdef MemoryPending start(self, MemoryPending pending, object memory)


cdef class MemoryPending:
    cdef MemoryJob job_state
    cdef GroupMemory group
    cdef object memory          # what is read and written
    cdef bint ended             # without the engine
    cdef bint submitted
    cdef bint driven            # by its caller, just now

    cdef bint drives(self, bint patiently)
    cdef bint step(self)
    cdef int check(self) except -1
    cdef bint result(self) except -1
