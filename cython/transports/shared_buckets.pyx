"""The memory of a set of buckets on all ranks of a node, where they meet and reduce.

Note [Means that lie once]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Where ranks share parameters they share the means, too. A rank lays what is to be reduced into its
stage, and the mean goes to a piece of memory that all of them see. A node may have several domains
of such ranks: the mean goes to the memory of each. It is written
when all ranks have come with that bucket again, so whoever reads it is done by then. A rank sees it
through a mapping in which what it writes stays its own until `forget_writes`. A rank has one stage:
a bucket is laid there when the one before it is reduced. Meanwhile autograd makes the gradients of
the next one.
"""

from libc.stdint cimport uint32_t, uintptr_t
from libc.stdlib cimport calloc, free

import torch

from mpiddp.engine.memory cimport BucketMemory
from mpiddp.transports.shared_memory cimport Mapping
from mpiddp.engine.memory import CommonMemory
from mpiddp.transports import shared_memory


cdef enum:
    PAGE_BYTES = 4096


cdef size_t owner_of(SharedBucket *bucket, size_t chunk, size_t ranks) noexcept nogil:
    """Return the rank whose chunk it is; also of a bucket with fewer chunks than ranks."""
    if bucket.chunks < ranks:
        return (bucket.index + chunk) % ranks
    return ((chunk + 1) * ranks - 1) // bucket.chunks


cdef class SharedBuckets:
    """The memory of one set of buckets on all ranks of a node, and where they meet.

    Collective over `node`.

    Args:
        node: an mpi4py communicator whose ranks share memory.
        sizes: of the buckets in bytes, the same on all ranks.
        chunk_bytes: size of a chunk in bytes.
        longer: how many bytes more than that the last chunk of a bucket may have.
        has_owners: each rank averages the same chunks in every step, see `owner_of`.
        domain: the means lie once for all ranks of the node that have the same number here, see
            Note [Means that lie once]; None, on all ranks: they lie on each rank.

    Raises:
        OSError: some rank cannot make or map some memory; raised on all ranks.
    """

    def __init__(self, node, sizes, size_t chunk_bytes, size_t longer=0, *,
                 bint has_owners=False, domain=None):
        cdef size_t ranks = node.Get_size()
        cdef size_t index, rank, place, chunks
        cdef Mapping mapping
        cdef SharedBucket *bucket
        self.chunk_bytes = chunk_bytes
        self.has_owners = has_owners
        widths = [_whole_lines(size) for size in sizes]
        starts, end = _starts(widths)
        if domain is not None:
            starts, end = [0] * len(sizes), max(widths, default=0)
        chunk_counts = [max(-(-(size - longer) // chunk_bytes), size > 0) for size in sizes]
        # First the meetings, used in rank 0's piece only; then the gradients.
        meetings = [sizeof(Meeting) + _whole_lines(4 * chunks) for chunks in chunk_counts]
        self.mappings = shared_memory.allocate(
            node, sum(meetings) + end + CACHE_LINE
        )
        self.buckets = <SharedBucket *>calloc(max(len(sizes), 1), sizeof(SharedBucket))
        self.buffers = <char **>calloc(max(len(sizes), 1) * ranks, sizeof(char *))
        if self.buckets == NULL or self.buffers == NULL:
            raise MemoryError
        mapping = self.mappings[0]
        place = 0
        for index in range(len(sizes)):
            bucket = &self.buckets[index]
            bucket.meeting = <Meeting *>(mapping.address + place)
            bucket.claims = <uint32_t *>(mapping.address + place + sizeof(Meeting))
            bucket.index = index
            bucket.chunks = chunk_counts[index]
            bucket.buffers = self.buffers + index * ranks
            place += meetings[index]
        for index in range(len(sizes)):
            for rank in range(ranks):
                mapping = self.mappings[rank]
                self.buckets[index].buffers[rank] = mapping.address + place + <size_t>starts[index]
        if domain is not None:
            self._share_means(node, sizes, domain)

    cdef _share_means(self, node, sizes, domain):
        """Make the memory of the means. Collective over `node`."""
        cdef size_t index, place, rank, domains
        cdef SharedBucket *bucket
        cdef Mapping mapping
        of_ranks = node.allgather(domain)
        members = [each for each in range(len(of_ranks)) if of_ranks[each] == domain]
        rank = members.index(node.Get_rank())
        starts, end = _starts([_whole_pages(size) for size in sizes])
        ranges = []
        for index, size in enumerate(sizes):
            bucket = &self.buckets[index]
            for chunk in range(bucket.chunks):
                if owner_of(bucket, chunk, len(members)) == rank:
                    at = chunk * self.chunk_bytes
                    ranges.append(
                        (starts[index] + at, starts[index] + min(at + self.chunk_bytes, size)))
        self.others = []
        for each in sorted(set(of_ranks)):
            mapping = shared_memory.allocate_common(
                node, max(end, 1), ranges if each == domain else [])
            if each == domain:
                self.shown = mapping
                self.means = mapping.another()
            else:
                self.others.append(mapping)
        self.shown.make_private()
        domains = 1 + len(self.others)
        self.mean_places = <char **>calloc(max(len(sizes), 1) * domains, sizeof(char *))
        if self.mean_places == NULL:
            raise MemoryError
        for index in range(len(sizes)):
            bucket = &self.buckets[index]
            bucket.domains = domains
            bucket.means = self.mean_places + index * domains
            for place in range(domains):
                mapping = self.others[place - 1] if place else self.means
                bucket.means[place] = mapping.address + <size_t>starts[index]

    def __dealloc__(self):
        free(self.mean_places)
        free(self.buckets)
        free(self.buffers)

    def memories(self, sizes, Py_ssize_t rank):
        """Return the `BucketMemory` of each bucket of rank `rank`. Not collective."""
        cdef size_t index, at
        cdef Mapping own = self.mappings[rank]
        everything = torch.frombuffer(own, dtype=torch.uint8)
        result = []
        if self.means is not None:
            shown, means = (
                torch.frombuffer(mapping, dtype=torch.uint8) for mapping in (self.shown, self.means)
            )
            for index, size in enumerate(sizes):
                start = self.buckets[index].buffers[rank] - own.address
                at = self.buckets[index].means[0] - self.means.address
                result.append(
                    CommonMemory(
                        shown[at:at + size], self, <uintptr_t>&self.buckets[index],
                        everything[start:start + size], means[at:at + size],
                    )
                )
            return result
        for index, size in enumerate(sizes):
            start = self.buckets[index].buffers[rank] - own.address
            result.append(
                BucketMemory(
                    everything[start:start + size], self, <uintptr_t>&self.buckets[index],
                    <uintptr_t>&own.segment.given_out,
                )
            )
        return result

    @property
    def ranks(self):
        """How many ranks the node has. Not collective."""
        return len(self.mappings)

    def owners(self, Py_ssize_t bucket):
        """Return the rank that owns each chunk of a bucket, as a list. Not collective."""
        cdef SharedBucket *found = &self.buckets[bucket]
        return [owner_of(found, chunk, len(self.mappings)) for chunk in range(found.chunks)]

    def forget_writes(self):
        """See the means again where this rank has written. Not collective."""
        self.shown.forget_writes()

    def own_ranges(self, BucketMemory memory not None):
        """Return what this rank may have written in a bucket, as pairs of bytes. Not collective.

        Args:
            memory: of the bucket, from this object.
        """
        cdef size_t start = (<SharedBucket *>memory.context).means[0] - self.means.address
        cdef size_t end = start + <size_t>memory.buffer.numel()
        return [
            (first - start, min(last, end) - start)
            for first, last in self.shown.own_ranges(start, end)
        ]


def _whole_lines(size):
    return -(-size // CACHE_LINE) * CACHE_LINE


def _whole_pages(size):
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _starts(sizes):
    """Return where pieces of these sizes begin, one after the other, and the end of the last."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += size
    return starts, end
