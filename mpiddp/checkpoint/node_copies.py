"""Move parts of files between the memories of nodes: which ranks share one, and who sends what."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mpiddp.checkpoint.ranks import Ranks, raise_together

__all__ = ["Memories", "Part", "move"]

# One message: MPI counts in ints, and training's messages pass between two of them.
_MESSAGE = 1 << 26


class Memories:
    """Which ranks see the same folder of node memory. Collective.

    Attributes:
        members: the ranks of this rank's node, in order.
        first: whether this rank is the first of them.
        next: the rank of the next node that keeps this rank's copies; None if there is one node.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
        keys = ranks.gather((socket.gethostname(), status.st_dev, status.st_ino))
        nodes = [[r for r in range(ranks.count) if keys[r] == key] for key in dict.fromkeys(keys)]
        number = next(i for i, members in enumerate(nodes) if ranks.rank in members)
        self.members = nodes[number]
        self.first = ranks.rank == self.members[0]
        self.next: int | None = None
        if len(nodes) > 1:
            neighbours = nodes[(number + 1) % len(nodes)]
            self.next = neighbours[self.members.index(ranks.rank) % len(neighbours)]


class Part(NamedTuple):
    """Some bytes of a file that one rank sends to another."""

    source: int
    target: int
    name: str
    offset: int
    length: int


def move(parts: Sequence[Part], from_folder: Path, to_folder: Path, ranks: Ranks) -> None:
    """Move parts of files, each to its place in a file of the same name. Collective.

    Args:
        parts: the same on all ranks.
        from_folder: where this rank reads what it sends.
        to_folder: where it writes what it receives.
        ranks: who takes part.

    Raises:
        OSError: there is no memory for what comes here.
        RuntimeError: that is so on another rank.
    """
    outgoing: list[tuple[int, Tensor]] = []
    incoming: list[tuple[int, Tensor]] = []
    error = None
    try:
        for part in parts:
            if part.length and part.source == ranks.rank:
                outgoing.append((part.target, _mapped(from_folder, part, shared=False)))
            elif part.target == ranks.rank:
                _reserve(to_folder, part)
                if part.length:
                    incoming.append((part.source, _mapped(to_folder, part, shared=True)))
    except (OSError, RuntimeError) as failure:
        error = failure
    raise_together(ranks, error, "copy a snapshot between nodes")
    works = [
        begin(tensor[first : first + _MESSAGE], rank)
        for begin, tensors in ((ranks.begin_receive, incoming), (ranks.begin_send, outgoing))
        for rank, tensor in tensors
        for first in range(0, len(tensor), _MESSAGE)
    ]
    for work in works:
        if work is not None:
            work.wait()


def _reserve(folder: Path, part: Part) -> None:
    # Writing to mapped memory that there is not would kill the process.
    descriptor = os.open(folder / part.name, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if part.length:
            os.posix_fallocate(descriptor, part.offset, part.length)
    finally:
        os.close(descriptor)


def _mapped(folder: Path, part: Part, shared: bool) -> Tensor:
    end = part.offset + part.length
    file = str(folder / part.name)
    return torch.from_file(file, shared=shared, size=end, dtype=torch.uint8)[part.offset :]
