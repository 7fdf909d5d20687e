from libc.stdint cimport uint32_t

from mpiddp.transports.shared_memory cimport Mapping


cdef enum:
    CACHE_LINE = 64


cdef struct Meeting:
    # One per bucket, in shared memory, followed by a claim for each chunk. All numbers only
    # grow: in the n-th round of a bucket they are compared with n times what a round adds.
    uint32_t arrived        # ranks that have filled the bucket
    char padding[CACHE_LINE - 4]
    uint32_t finished       # chunks that hold the mean
    char padding_behind[CACHE_LINE - 4]


cdef struct SharedBucket:
    # What one process knows of a bucket.
    Meeting *meeting
    uint32_t *claims        # the round in which a chunk was last taken by some rank
    char **buffers          # of each rank
    size_t index            # in its set of buckets
    uint32_t round          # how often the bucket was submitted
    uint32_t chunks
    uint32_t next_own       # chunk of its own that this rank takes next
    uint32_t end_of_own
    char **means            # where the mean goes, once a domain, this rank's first
    size_t domains          # how many; 0: the mean goes to each rank's buffer
    int swept               # all chunks of this round are taken


cdef class SharedBuckets:
    cdef SharedBucket *buckets
    cdef char **buffers
    cdef char **mean_places             # of each bucket, in each domain
    cdef list mappings
    cdef Mapping shown                  # of the domain's means; what a rank writes is its own
    cdef Mapping means                  # the same, as all ranks see it
    cdef list others                    # the means of the other domains
    cdef readonly size_t chunk_bytes
    cdef readonly bint has_owners       # each rank averages the same chunks in every step

    cdef _share_means(self, node, sizes, domain)


cdef size_t owner_of(SharedBucket *bucket, size_t chunk, size_t ranks) noexcept nogil
