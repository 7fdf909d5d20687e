from mpiddp.collectives.lane_jobs cimport LaneState
from mpiddp.collectives.memory_jobs cimport MemoryJob
from mpiddp.engine.engine cimport Channel, Engine
from mpiddp.transports.shared_memory cimport Mapping
from mpiddp.transports.wire cimport Wire


cdef class GroupLanes:
    cdef LaneState state
    cdef Mapping mapping
    cdef Engine engine
    cdef object requests        # kept: `state` has its address
    cdef Wire wire
    cdef object lane            # mpi4py's communicators, this one the wire's, ...
    cdef object moves           # ... and this one for the rest
    cdef char *rooms
    cdef Channel channel        # None until something is submitted
    cdef public bint later      # whether what is made next begins later

    cdef LanePending start(self, LanePending pending, object memory)
    cdef int submit(self, LanePending pending) except -1
    cdef void give_up(self)


cdef class LanePending:
    cdef MemoryJob job_state
    cdef GroupLanes lanes
    cdef object memory          # what is read and written
    cdef object error           # with which it could not begin
    cdef bint waits             # for its turn to begin
    cdef bint submitted
    cdef bint dropped           # before it began

    cdef bint check_result(self) except -1
