"""What the ranks of a checkpoint's group tell each other; without torch.distributed, one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpiddp import shown_progress
from mpiddp.checkpoint import progress
from mpiddp.checkpoint.trees import leaves, map_leaves

__all__ = ["Ranks", "raise_together", "raise_told", "told_of"]

# Smaller tensors travel with the pickled rest of the state.
_LARGE = 1 << 16


class Ranks:
    """The ranks of `group`, or this process alone where torch.distributed is not initialised.

    Attributes:
        rank: this process's, in the group.
        count: how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank(group)
        self.count = 1 if alone else dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the group that it saves or loads with"
            )

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. Collective."""
        if self.count == 1:
            return [value]
        values = [None] * self.count
        dist.all_gather_object(values, value, group=self._group)
        return values

    def from_first(self, value: Any) -> Any:
        """Return the first rank's value. Collective."""
        return self.from_rank(0, value)

    def read_on(self, source: int, file: Path | None, weights_only: bool) -> Any:
        """Return what `torch.save` has written to a file that one rank sees. Collective.

        Raises what `torch.load` does there, and RuntimeError on the other ranks.
        """
        state, error = None, None
        if self.rank == source:
            assert file is not None
            try:
                with progress.reading(file) as source_file:
                    state = torch.load(source_file, map_location="cpu", weights_only=weights_only)
            except Exception as failure:
                error = failure
        raise_together(self, error, f"load what {self.name(source)} reads")
        return self.state_from(source, state)

    def state_from(self, source: int, state: Any) -> Any:
        """Return the state of one rank, with tensors of its own on each rank. Collective."""
        if self.count == 1:
            return state
        large = iter([leaf for leaf in leaves(state) if _travels_alone(leaf)])
        described = self.from_rank(
            source,
            map_leaves(state, lambda leaf: _Absent(leaf) if _travels_alone(leaf) else leaf),
        )

        absent = [leaf for leaf in leaves(described) if isinstance(leaf, _Absent)]

        def arrived(leaf: Any) -> Any:
            if not isinstance(leaf, _Absent):
                return leaf
            tensor = next(large) if self.rank == source else leaf.empty()
            flat = tensor.detach().contiguous().reshape(-1)
            dist.broadcast(flat.view(torch.uint8), src=self._in_world(source), group=self._group)
            shown_progress.advance(flat.nbytes)
            return tensor if self.rank == source else flat.view(tensor.shape)

        with shown_progress.shown(
            f"state of {self.name(source)}: to the other ranks",
            lambda: sum(each.nbytes for each in absent),
            shows=self._in_world(self.rank) == 0,
        ):
            return map_leaves(described, arrived)

    def from_rank(self, source: int, value: Any) -> Any:
        """Return one rank's value. Collective."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=self._in_world(source), group=self._group)
        return values[0]

    def begin_send(self, tensor: Tensor, target: int) -> dist.Work | None:
        """Begin to send a tensor of host memory to another rank. Not collective."""
        return dist.isend(tensor, self._in_world(target), group=self._group)

    def begin_receive(self, tensor: Tensor, source: int) -> dist.Work | None:
        """Begin to receive a tensor in host memory from another rank. Not collective."""
        return dist.irecv(tensor, self._in_world(source), group=self._group)

    def name(self, *ranks: int) -> str:
        """Return what ranks are called in messages: by their numbers in the world."""
        numbers = [str(self._in_world(rank)) for rank in ranks]
        return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"

    def _in_world(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


class _Absent:
    """Stands for a tensor in what is pickled."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu")


def _travels_alone(value: object) -> bool:
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and value.nbytes >= _LARGE
    )


def raise_together(ranks: Ranks, error: BaseException | None, what: str) -> None:
    """Raise on all ranks if one has an error: its own, or one that names the others. Collective.

    Args:
        ranks: who is asked.
        error: of this rank, None where all went well.
        what: that could not be done, such as "save a checkpoint".

    Raises:
        RuntimeError: another rank has an error.
    """
    raise_told(ranks, error, ranks.gather(told_of(error)), what)


def told_of(error: BaseException | None) -> str | None:
    """Return what other ranks are told of an error. Not collective."""
    return None if error is None else f"{type(error).__name__}: {error}"


def raise_told(
    ranks: Ranks, error: BaseException | None, told: Sequence[str | None], what: str
) -> None:
    """Raise as `raise_together`, where all ranks have gathered what is told. Not collective."""
    if error is not None:
        raise error
    failed = [f"{ranks.name(rank)}: {text}" for rank, text in enumerate(told) if text is not None]
    if failed:
        raise RuntimeError(f"{ranks.name(ranks.rank)} cannot {what}: {failed[0]}")
