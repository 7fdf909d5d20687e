"""What optimizers remember, in memory that the ranks of a node share.

Each rank writes what belongs to its slices. All can read all of it, so a state_dict needs nobody
else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from mpiddp.ddp.shared_parameters import ALIGNMENT, AREA_BYTES
from mpiddp.ddp.shared_piece import bytes_of
from mpiddp.reducer.bucket import view_like

if TYPE_CHECKING:
    from mpiddp.ddp.node_parts import Slice
    from mpiddp.ddp.shared_parameters import SharedParameters
    from mpiddp.optim.elementwise import StateKind

# Of a number: any dtype fits.
SLOT_BYTES = 16


class StateMemory:
    """The state of some parameters.

    Collective.

    Args:
        shared: the parameters of the module.
        slices: of these parameters, those of all ranks.
        kinds: what is kept, for each parameter's index, by key.

    Raises:
        OSError: some rank has too little memory; raised on all ranks.
    """

    def __init__(
        self,
        shared: SharedParameters,
        slices: Sequence[Slice],
        kinds: Mapping[int, Mapping[str, StateKind]],
    ) -> None:
        self._shared = shared
        self._kinds = kinds
        self._first_number = slices[0].number if slices else 0
        self._first: dict[int, Slice] = {}
        for part in slices:
            self._first.setdefault(part.parameter, part)
        self._starts: dict[tuple[str, torch.dtype, int], int] = {}
        size, ranges = 0, []
        keys = {
            (key, kind.dtype, part.bucket): kind
            for part in slices
            for key, kind in kinds[part.parameter].items()
            if kind.per_element
        }
        for (key, dtype, bucket), _ in sorted(keys.items(), key=lambda item: str(item[0])):
            self._starts[key, dtype, bucket] = size
            ranges += [
                (size + part.start * dtype.itemsize, size + part.stop * dtype.itemsize)
                for part in slices
                if part.owner == shared.rank
                and part.bucket == bucket
                and kinds[part.parameter].get(key) == keys[key, dtype, bucket]
            ]
            size += -(-shared.layouts[bucket].elements * dtype.itemsize // AREA_BYTES) * AREA_BYTES
        # What has another shape is of parameters that one rank steps.
        self._apart: dict[tuple[int, str], int] = {}
        for part in slices:
            for key, kind in sorted(kinds[part.parameter].items()):
                if not kind.per_element and not kind.is_number:
                    self._apart[part.parameter, key] = size
                    needed = math.prod(kind.shape) * kind.dtype.itemsize
                    if part.owner == shared.rank:
                        ranges.append((size, size + needed))
                    size += -(-needed // ALIGNMENT) * ALIGNMENT
        numbers = dict.fromkeys(
            key
            for of_parameter in kinds.values()
            for key, kind in of_parameter.items()
            if kind.is_number
        )
        self._number_keys = {key: place for place, key in enumerate(sorted(numbers))}
        self._numbers_start = size
        # In slots of its own for each rank's slices: they are in one row, and small.
        total = len(slices) * len(self._number_keys) * SLOT_BYTES
        if total and shared.rank == 0:
            ranges.append((size, size + total))
        # What users see, and may change as Note [Changes of the program] says of parameters.
        self._piece = shared.share(size + total, ranges)
        self._mapping, self._file = self._piece.shown, self._piece.file
        self._mapping.make_private()
        self._bytes, self._shown = bytes_of(self._file), bytes_of(self._mapping)

    def changes(self) -> str:
        """Return what the user has changed in place, in words; "" for nothing. Not collective.

        Equal words stand for equal changes.
        """
        digest = self._piece.changes()
        return f"digest {digest:016x}" if digest else ""

    def keep_changes(self) -> None:
        """Let all ranks have what this one has changed. Not collective."""
        self._mapping.keep_writes(self._file)

    def forget_changes(self) -> None:
        """See what all ranks have. Not collective."""
        self._mapping.forget_writes()

    def of_slices(self, slices: Sequence[Slice], key: str) -> torch.Tensor:
        """Return the memory of one key for neighbouring slices. Not collective.

        A number is that of the first one.
        """
        first = slices[0]
        kind = self._kinds[first.parameter][key]
        if kind.is_number:
            return self.numbers(slices, key)[0].view(kind.shape)
        if not kind.per_element:
            return self._other(first.parameter, key, self._bytes)
        return self._flat(key, kind, first.bucket, self._bytes)[first.start : slices[-1].stop]

    def numbers(self, slices: Sequence[Slice], key: str) -> torch.Tensor:
        """Return the memory of a number for each of slices that are numbered in a row.

        Not collective.
        """
        return self._numbers(slices, key, self._bytes)

    def _numbers(self, slices: Sequence[Slice], key: str, memory: torch.Tensor) -> torch.Tensor:
        kind = self._kinds[slices[0].parameter][key]
        row = memory[self._numbers_start :].view(kind.dtype)
        each = SLOT_BYTES // kind.dtype.itemsize
        place = (slices[0].number - self._first_number) * len(self._number_keys)
        start = (place + self._number_keys[key]) * each
        step = len(self._number_keys) * each
        return row[start : start + (len(slices) - 1) * step + 1 : step]

    def of_parameter(self, index: int, key: str) -> torch.Tensor:
        """Return the memory of one key for a whole parameter, as users see it. Not collective."""
        kind, first = self._kinds[index][key], self._first[index]
        if kind.is_number:
            return self._numbers([first], key, self._shown)[0].view(kind.shape)
        if not kind.per_element:
            return self._other(index, key, self._shown)
        start = self._shared.layouts[first.bucket].starts[index]
        parameter = self._shared.parameters[index]
        return view_like(
            self._flat(key, kind, first.bucket, self._shown), start, parameter
        ).detach()

    def _other(self, index: int, key: str, memory: torch.Tensor) -> torch.Tensor:
        kind, start = self._kinds[index][key], self._apart[index, key]
        size = math.prod(kind.shape) * kind.dtype.itemsize
        return memory[start : start + size].view(kind.dtype).view(kind.shape)

    def _flat(self, key: str, kind: StateKind, bucket: int, memory: torch.Tensor) -> torch.Tensor:
        start = self._starts[key, kind.dtype, bucket]
        size = self._shared.layouts[bucket].elements * kind.dtype.itemsize
        return memory[start : start + size].view(kind.dtype)
