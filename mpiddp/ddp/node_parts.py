"""Which rank of a node owns which elements of the parameters.

A rank owns the chunks of each bucket whose mean the transport inside the node gives to it, see
Note [Who reduces a chunk] in shared.pyx. So what it averages is what it steps.

Note [The same cuts on all nodes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch computes most of a tensor with vectors, and the last elements one by one. In 16 bits the two
round at different moments (seen with SGD and Adam), so an element's bits depend on where the tensor
ends that is stepped. Nodes with other numbers of ranks have other owners. Therefore each node cuts
wherever any of them does.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import torch

from mpiddp.reducer.bucket import bytes_needed
from mpiddp.transports.shared_buckets import SharedBuckets

if TYPE_CHECKING:
    from mpiddp.reducer.bucket import Bucket

# Of a bucket's bytes, where the transport does not say how much it gives to a rank at once.
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Slice:
    """Elements of one parameter that one rank owns.

    Attributes:
        number: counts the slices, the same on all ranks.
        parameter: index of the parameter in the reducer.
        bucket: index of its bucket.
        start: first element in the bucket.
        stop: the element behind the last one.
        owner: rank in the node.
    """

    number: int
    parameter: int
    bucket: int
    start: int
    stop: int
    owner: int


@dataclass(frozen=True)
class BucketLayout:
    """Where the parameters of a bucket lie in its memory, and to whom the parts of it belong.

    Attributes:
        dtype: of the parameters.
        starts: first element of each parameter, by its index in the reducer.
        sizes: number of elements of each parameter, by its index in the reducer.
        chunk_bytes: what belongs to one rank at least.
        owners: rank in the node of each chunk.
        borders: chunks that begin with another owner than the one before, on some node.
    """

    dtype: torch.dtype
    starts: dict[int, int]
    sizes: dict[int, int]
    chunk_bytes: int
    owners: tuple[int, ...]
    borders: frozenset[int]

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(self.sizes.values())

    @property
    def chunk_elements(self) -> int:
        """Number of elements in a chunk."""
        return self.chunk_bytes // self.dtype.itemsize

    def stop(self, index: int) -> int:
        """Return the element behind the last one of a parameter."""
        return self.starts[index] + self.sizes[index]

    def neighbours(self, wanted: Container[int]) -> Iterator[list[int]]:
        """Yield those of the wanted parameters that lie beside each other, in order."""
        # A parameter without elements begins where the next one does.
        ordered = sorted(self.starts, key=lambda index: (self.starts[index], self.stop(index)))
        for among, indices in groupby(ordered, key=wanted.__contains__):
            if among:
                yield list(indices)

    def parts(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Yield start, stop and owner of what belongs to one rank on each node, in order.

        Args:
            start: first element.
            stop: the element behind the last one; None is the end.
        """
        stop = self.elements if stop is None else stop
        size = self.chunk_elements
        while start < stop:
            chunk = start // size
            owner = self.owners[chunk]
            while (chunk + 1) * size < stop and chunk + 1 not in self.borders:
                chunk += 1
            end = min((chunk + 1) * size, stop)
            yield start, end, owner
            start = end


def owner_of(chunk: int, chunks: int, bucket: int, ranks: int) -> int:
    """Return the rank of the node that owns a chunk, as `owner_of` in shared.pyx does it.

    Not collective.
    """
    if chunks < ranks:
        return (bucket + chunk) % ranks
    return ((chunk + 1) * ranks - 1) // chunks


def lay_out(
    bucket: Bucket, parameters: Sequence[torch.Tensor], ranks: int, sizes: Iterable[int]
) -> BucketLayout:
    """Return the layout of a bucket. Not collective.

    Args:
        bucket: a bucket on the CPU that is not sparse.
        parameters: of the reducer.
        ranks: how many the node has.
        sizes: how many each node has.
    """
    members = [parameters[index] for index in bucket.parameter_indices]
    memory = bucket.memory.owner if bucket.memory is not None else None
    has_owners = isinstance(memory, SharedBuckets) and memory.has_owners
    chunk_bytes = memory.chunk_bytes if isinstance(memory, SharedBuckets) and has_owners else 0
    chunk_bytes = chunk_bytes or CHUNK_BYTES
    chunks = -(-bytes_needed(members) // chunk_bytes)
    starts, lengths, start = {}, {}, 0
    for index, member in zip(bucket.parameter_indices, members, strict=True):
        starts[index], lengths[index] = start, member.numel()
        start += member.numel()
    owners = _owners(chunks, bucket.index, ranks)
    borders = frozenset(
        chunk
        for each in {ranks, *sizes}
        for chunk, (before, owner) in enumerate(pairwise(_owners(chunks, bucket.index, each)), 1)
        if before != owner
    )
    return BucketLayout(members[0].dtype, starts, lengths, chunk_bytes, owners, borders)


def _owners(chunks: int, bucket: int, ranks: int) -> tuple[int, ...]:
    return tuple(owner_of(chunk, chunks, bucket, ranks) for chunk in range(chunks))


def cut(
    layouts: Sequence[BucketLayout], indices: Iterable[int], most: int | None, first: int = 0
) -> list[list[Slice]]:
    """Return the slices of some parameters, of all owners. Not collective.

    Args:
        layouts: of all buckets.
        indices: of the parameters.
        most: elements that a block has at most; None: no limit.
        first: number of the first slice.

    Returns:
        blocks of neighbouring slices of one owner. In the order of the buckets, which is that of
        the numbers, too.
    """
    wanted = set(indices)
    blocks: list[list[Slice]] = []
    for bucket, layout in enumerate(layouts):
        for members in layout.neighbours(wanted):
            begin = layout.starts[members[0]]
            for start, stop, owner in layout.parts(begin, layout.stop(members[-1])):
                # Of equal size, and none that is tiny.
                pieces = 1 if most is None else -(-(stop - start) // most)
                size = -(-(stop - start) // pieces)
                for low in range(start, stop, size):
                    high = min(low + size, stop)
                    block = []
                    for index in members:
                        ends = max(low, layout.starts[index]), min(high, layout.stop(index))
                        if ends[0] < ends[1]:
                            block.append(Slice(first, index, bucket, *ends, owner))
                            first += 1
                    blocks.append(block)
    return blocks
