"""What has been called: an operation, its arguments, and what the ranks compare of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpiddp.process_group.call_blocks import Call

if TYPE_CHECKING:
    import torch

    from mpiddp.collectives.operation import Operation

__all__ = ["OperationCall"]


class OperationCall(NamedTuple):
    """One call of an operation of a process group.

    What follows `opts` must agree across ranks, see `call_check.check`.

    Attributes:
        name: what torch calls the operation, such as "all_reduce".
        function: makes it from the group and `arguments`.
        arguments: of `function`.
        opts: torch's object with options, or None.
        tensors: if the first is on a GPU, all must be, see Note [Operations on copies].
        detail: its reduction, its root or both.
        compared: returns the tensors whose sizes must agree; None: `agreed`.
        elements: returns how many elements go to each rank and are to come from each, where these
            may differ.
        message: it goes to or comes from one rank, and is neither compared nor counted.
        agreed: the tensors whose sizes must agree; None: `tensors`, unless there are `elements`.
    """

    name: str
    function: Callable[..., Operation]
    arguments: tuple[Any, ...]
    opts: Any = None
    tensors: Sequence[torch.Tensor] = ()
    detail: object = None
    compared: Callable[[], Iterable[torch.Tensor]] | None = None
    elements: Callable[[], tuple[Sequence[int], Sequence[int]]] | None = None
    message: bool = False
    agreed: Sequence[torch.Tensor] | None = None

    @property
    def waits(self) -> bool:
        """Whether its caller waits for it at once."""
        return self.opts is not None and not self.opts.asyncOp

    def to_compare(self, limit: float | None) -> Call:
        """Return what the ranks compare of it before anything is sent.

        Args:
            limit: seconds that its caller waits at once; None: it is asynchronous.
        """
        agreed: Iterable[torch.Tensor] | None = self.agreed
        if self.compared is not None:
            agreed = self.compared()
        elif agreed is None:
            agreed = () if self.elements is not None else self.tensors
        return Call(self.name, self.detail, agreed, self.elements, self.tensors, limit)
