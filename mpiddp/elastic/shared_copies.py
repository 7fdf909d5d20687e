"""What commits keep of parameters and optimizer states that ranks share: one copy for all of them.

Note [A commit in shared memory]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All ranks of a node (or domain) write one copy, each a part of it. A rank may be lost in any moment
of that, and then the copy may be neither of the last commit nor of this one. So the ranks meet
before they write: whoever has come has ended its step, and nobody begins another one before all
have written. While a copy is written the parameters themselves are whole. Each rank says in the
same memory that it begins to write, and that it has written. After a loss these words say from
where training goes on, to all ranks that are left alike:
* nobody had begun: from the copy, as of the last commit;
* all have written: from the copy, as of this one;
* else: from the parameters themselves, which become the copy. They are those of this commit.

Nobody writes to a copy whose tensors were handed out, as parameters that are about to be wrapped
again: the next world makes a new one. Those tensors lie in a private mapping. What the program
writes there costs its own pages, and until then nothing is copied.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpiddp.checkpoint.trees import leaves, map_leaves
from mpiddp.ddp.shared_parameters import SharedParameters, all_of_process, leave_all
from mpiddp.ddp.shared_piece import Piece, at, bytes_of, on_its_own
from mpiddp.transports.shared_memory import Mapping

__all__ = ["Held", "SharedCopies"]

_PAGE = 4096
# For each rank: the commit that it has begun to write, and the one that it has written.
_BEGUN, _WRITTEN, _WORDS = 0, 1, 2


class Held:
    """A tensor of which a commit keeps the content in a shared copy.

    Args:
        source: of the copy.
        number: of the piece there.
        tensor: as the program has it.
        start: its first byte in the piece.
    """

    def __init__(self, source: _Copy, number: int, tensor: Tensor, start: int) -> None:
        self.source, self._number, self._start = source, number, start
        self._like = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
        )

    def __deepcopy__(self, memo: Any) -> Held:
        return self

    def handed_out(self) -> Tensor:
        """Return a tensor with the content, on memory that is this process's where it writes."""
        return on_its_own(at(self.source.handed_out(self._number), self._start, self._like))


class _Copy:
    """The copy of what some ranks share for one module.

    Collective over all ranks of the module's group, as `begin` and `end` are over those that share.

    Args:
        shared: the parameters.
        pieces: of which there is to be a copy.
    """

    def __init__(self, shared: SharedParameters, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self._shared: SharedParameters | None = shared
        rank, ranks = shared.rank, shared.ranks
        self._rank = rank
        self._parts = [
            (pages * rank // ranks * _PAGE, min(pages * (rank + 1) // ranks * _PAGE, piece.size))
            for piece in pieces
            for pages in [-(-piece.size // _PAGE)]
        ]
        self._copies = [
            shared.allocate(piece.size, [part])
            for piece, part in zip(pieces, self._parts, strict=True)
        ]
        self._words = memoryview(shared.allocate(8 * _WORDS * ranks, ())).cast("B").cast("q")
        self._round = 0
        # By piece: where its content was handed out last.
        self._handed_out: dict[int, tuple[Mapping, Tensor]] = {}

    def begin(self) -> bool:
        """Meet before anybody writes; return whether the ranks see the same content. Collective.

        What all ranks have changed in the same way becomes what they share, as in a step.
        """
        shared = self._shared
        assert shared is not None
        self._round += 1
        shared.put_in_place()
        changes = [piece.changes() for piece in self.pieces]
        found = shared.exchange(zlib.crc32(repr(changes).encode()), "a commit")
        if len(set(found)) > 1:
            return False
        if any(changes):
            if shared.rank == 0:
                for piece in self.pieces:
                    piece.shown.keep_writes(piece.file)
            shared.exchange(0, "a commit")
            for piece in self.pieces:
                piece.shown.forget_writes()
        return True

    def say_begun(self) -> None:
        """Say that this rank writes from now on."""
        self._words[_WORDS * self._rank + _BEGUN] = self._round

    def write(self) -> None:
        """Write this rank's part."""
        for piece, copy, (low, high) in zip(self.pieces, self._copies, self._parts, strict=True):
            if low < high:
                bytes_of(copy)[low:high].copy_(bytes_of(piece.file)[low:high])
        self._words[_WORDS * self._rank + _WRITTEN] = self._round

    def end(self) -> None:
        """Wait until all have written. Collective."""
        assert self._shared is not None
        self._shared.exchange(0, "the end of a commit")

    @property
    def was_begun(self) -> bool:
        """Whether some rank has begun to write this commit."""
        return self._round in self._words[_BEGUN::_WORDS].tolist()

    def decide(self) -> None:
        """Take the parameters themselves for the copy, unless all have written it.

        After a loss, when nobody writes any more.
        """
        if set(self._words[_WRITTEN::_WORDS].tolist()) != {self._round}:
            self._copies = [piece.shown for piece in self.pieces]

    def is_of(self, shared: SharedParameters, pieces: list[Piece]) -> bool:
        """Return whether it is the copy of these pieces, and nothing of it was handed out."""
        return self._shared is shared and self.pieces == pieces and not self._handed_out

    def let_go(self) -> None:
        """Let the parameters go, of which nobody makes a copy any more."""
        self._shared, self.pieces = None, []

    # What is handed out.

    def begin_handing_out(self) -> None:
        """Hand out from now on what nobody has written to."""
        self._handed_out.clear()

    def handed_out(self, number: int) -> Tensor:
        """Return the memory of a piece in a mapping that is this process's where it writes."""
        if number not in self._handed_out:
            mapping = self._copies[number].another(private=True)
            self._handed_out[number] = mapping, bytes_of(mapping)
        return self._handed_out[number][1]

    def find(self, tensor: Tensor) -> Held | None:
        """Return what stands for a tensor that was handed out, if it is as it was."""
        for number, (mapping, memory) in self._handed_out.items():
            start = tensor.data_ptr() - memory.data_ptr()
            if 0 <= start < mapping.size:
                end = start + tensor.nbytes
                own = mapping.own_ranges(start - start % _PAGE, end)
                if not any(low < end and start < high for low, high in own):
                    return Held(self, number, tensor, start)
        return None


class SharedCopies:
    """The copies of a state's commits. Not collective, but `begin` and `finish`."""

    def __init__(self) -> None:
        # Of the last commit; of the one that is under way; and those that have handed out tensors.
        self._last: list[_Copy] = []
        self._coming: list[_Copy] = []
        self._handing_out: list[_Copy] = []

    def begin(self, everything: Callable[[], Any]) -> None:
        """Begin a commit: what was kept before is there until this returns.

        Collective over the ranks that share some of it, if there are any.

        Args:
            everything: returns what a commit keeps.
        """
        there = all_of_process()
        if not there:
            self._last = []
            return
        tensors = [leaf for leaf in leaves(everything()) if _may_lie_in_a_piece(leaf)]
        coming = []
        for shared in there:
            pieces = [piece for piece in shared.pieces if any(map(piece.has, tensors))]
            if pieces:
                last = (copy for copy in self._last if copy.is_of(shared, pieces))
                coming.append(next(last, None) or _Copy(shared, pieces))
        self._coming = coming
        # Where ranks see something else each keeps its own, and the next step tells them so.
        self._coming = [copy for copy in coming if copy.begin()]
        for copy in self._coming:
            copy.say_begun()

    def finish(self) -> None:
        """Write the copies. Collective as `begin`."""
        for copy in self._coming:
            copy.write()
        for copy in self._coming:
            copy.end()
        self._last, self._coming = self._coming, []

    def held(self, leaf: Any) -> Any:
        """Return what stands for a tensor that is kept in a copy; anything else as it is."""
        if not _may_lie_in_a_piece(leaf):
            return leaf
        for copy in self._coming:
            for number, piece in enumerate(copy.pieces):
                if piece.has(leaf):
                    return Held(copy, number, leaf, leaf.data_ptr() - piece.start)
        found = (copy.find(leaf) for copy in self._handing_out)
        return next((held for held in found if held is not None), leaf)

    # After a loss.

    def take_interrupted(self) -> bool:
        """Return whether the commit that was under way is to be kept again, and is then whole.

        See Note [A commit in shared memory]. From now on parameters are not shared any more.
        """
        leave_all()
        if not any(copy.was_begun for copy in self._coming):
            self._coming = []
        for copy in self._coming:
            copy.decide()
        return bool(self._coming)

    def let_go(self) -> None:
        """Let the memory of parameters go that are not shared any more."""
        for copy in (*self._last, *self._coming):
            copy.let_go()
        self._last, self._coming = [], []

    def handed_out(self, kept: Any) -> Any:
        """Return what was kept, with tensors for what stands for some."""
        return map_leaves(kept, lambda leaf: self._hand_out(leaf) if type(leaf) is Held else leaf)

    def begin_handing_out(self) -> None:
        """Hand out from now on what nobody has written to."""
        for copy in self._handing_out:
            copy.begin_handing_out()
        self._handing_out = []

    def _hand_out(self, held: Held) -> Tensor:
        if held.source not in self._handing_out:
            self._handing_out.append(held.source)
        return held.handed_out()

    def was_handed_out(self, leaf: Any) -> bool:
        """Return whether a leaf is a tensor that was handed out, and is as it was."""
        return _may_lie_in_a_piece(leaf) and any(copy.find(leaf) for copy in self._handing_out)


def _may_lie_in_a_piece(leaf: Any) -> bool:
    return (
        type(leaf) in (Tensor, torch.nn.Parameter)
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and leaf.numel() > 0
    )
