# Long collectives of a node's ranks, which read each other's memory. No Python.

from mpiddp.collectives.memory_jobs cimport MemoryJob, MemoryState
from mpiddp.engine.interface cimport Advance, Job, Transport


# What `Transport.advance` is for a group with memory: in halves what is short.
cdef Advance advance(Transport *transport, Job *job, int helping) noexcept nogil
cdef bint goes_directly(MemoryState *state, MemoryJob *job) noexcept nogil
# Let no other rank write into this one's memory any more.
cdef void leave(MemoryState *state) noexcept nogil
# Read or write another process's memory; return an errno.
cdef int read_memory(int process, const char *theirs, char *ours, size_t size) noexcept nogil
