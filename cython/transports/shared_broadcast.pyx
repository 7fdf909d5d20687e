"""Copy tensors from one rank of a node to the others through memory that they share.

A module's buffers are sent this way at each forward. There are two areas, used in turn:
the rank that writes need not wait for those that still read the round before.
Each counter of an area is what ranks sleep on that wait for it, so that no others are woken.
"""

from libc.string cimport memcmp, memcpy

import torch

from mpiddp.transports.shared cimport Bell, add32, ring, wait_for, wake
from mpiddp.transports.shared_memory cimport Mapping
from mpiddp.transports import shared_memory


cdef enum:
    ALIGNMENT = 16          # of each tensor, enough for any element


cdef Py_ssize_t room(Py_ssize_t size) noexcept nogil:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def bytes_needed(tensors):
    """Return the capacity that a broadcast of `tensors` takes, in bytes. Not collective."""
    cdef Py_ssize_t total = 0
    for tensor in tensors:
        total += room(tensor.numel() * tensor.element_size())
    return total


cdef class SharedBroadcast:
    """Areas of `capacity` bytes that all ranks of a node see, and whose turn it is.

    Collective over `node`. In each round one rank calls `begin`, fills the area and calls
    `publish`; every other rank calls `wait`, reads the area and calls `consume`.

    Args:
        node: an mpi4py communicator whose ranks share memory.
        capacity: in bytes, the same on all ranks.
        crowded: there are more ranks than cores; a waiting rank sleeps at once.

    Raises:
        OSError: the ranks cannot share memory; raised on all ranks.
    """

    def __init__(self, node, Py_ssize_t capacity, *, bint crowded=False):
        cdef Mapping mapping
        self.capacity = room(max(capacity, 1))
        self.readers = node.Get_size() - 1
        self.crowded = crowded
        mapping = shared_memory.allocate(node, AREAS * (sizeof(Counters) + self.capacity))[0]
        self.mapping = mapping
        self.counters = <Counters *>mapping.address
        self.bytes = mapping.address + AREAS * sizeof(Counters)
        everything = torch.frombuffer(mapping, dtype=torch.uint8)
        self.areas = everything[AREAS * sizeof(Counters):].view(AREAS, self.capacity)

    def begin(self, double timeout):
        """Start a round as the rank that writes; return whether the area is free in time.

        Collective.
        """
        cdef Counters *counters
        self.area = (self.area + 1) % AREAS
        counters = &self.counters[self.area]
        self.rounds[self.area] += 1
        return bool(wait_for(
            &counters.consumed, (self.rounds[self.area] - 1) * self.readers, timeout, self.crowded
        ))

    def publish(self):
        """Let the other ranks read what was put. Not collective."""
        ring(&self.counters[self.area].published)

    def wait(self, double timeout):
        """Take part in a round as a rank that reads; return whether its bytes came in time.

        Collective.
        """
        self.area = (self.area + 1) % AREAS
        self.rounds[self.area] += 1
        return bool(wait_for(
            &self.counters[self.area].published, self.rounds[self.area], timeout, self.crowded
        ))

    def consume(self):
        """Say that this rank has read the area. Not collective."""
        cdef Bell *consumed = &self.counters[self.area].consumed
        # Only the last one lets the rank that writes go on.
        if add32(&consumed.rung, 1) == self.rounds[self.area] * self.readers:
            wake(consumed)

    def memory(self, Py_ssize_t size):
        """Return the first `size` bytes of the round's area, as a tensor. Not collective."""
        return self.areas[self.area, :size]

    def put(self, tensors):
        """Copy `tensors` into the area. Not collective."""
        cdef Py_ssize_t size, offset = 0
        cdef char *area = self.bytes + self.area * self.capacity
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if tensor.is_contiguous():
                memcpy(area + offset, <char *><size_t>tensor.data_ptr(), size)
            else:
                self._in_area(tensor, offset, size).copy_(tensor)
            offset += room(size)

    def get(self, tensors):
        """Copy the area into `tensors`, where they differ. Not collective.

        A tensor that has the same bits is not touched: autograd may have saved it.
        """
        cdef Py_ssize_t size, offset = 0
        cdef char *area = self.bytes + self.area * self.capacity
        cdef char *address
        changed = []
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if tensor.is_contiguous():
                address = <char *><size_t>tensor.data_ptr()
                if memcmp(address, area + offset, size):
                    memcpy(address, area + offset, size)
                    changed.append(tensor)
            else:
                there = self._in_area(tensor, offset, size)
                if not torch.equal(tensor, there):
                    tensor.copy_(there)
            offset += room(size)
        if changed:
            torch.autograd.graph.increment_version(changed)

    def _in_area(self, tensor, offset, size):
        return self.areas[self.area, offset:offset + size].view(tensor.dtype).view(tensor.shape)
