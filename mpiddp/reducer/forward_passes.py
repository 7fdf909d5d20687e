"""Detect ranks that have left out a step: else wrong gradients are averaged in silence.

Note [Out of step]
~~~~~~~~~~~~~~~~~~
A rank that does not call backward for some forward pass, or catches an exception of one, gets out
of step: its next backward is reduced with the others' previous one, and so on until the end, where
they wait for it. The number of reductions does not show it: it is the same on all ranks by
construction. Nor does the number of forward passes: a correct program may run two forward passes
before a backward on some ranks only, say for sequences of different lengths. What travels with the
gradients (Note [A number in flags] in bucket.pyx) is the number of *lost* forward passes: those in
training mode, outside of no_grad and no_sync, that raised, or whose outputs no backward reached
before the next reduction's last bucket was full.

A difference is an error on all ranks. Some programs would work for a while all the same: one rank
prints a sample without no_grad, or draws another batch after a loss of NaN. The reducer cannot tell
them from faulty ones, and the ranks diverge at the latest when data run out. So they are refused
too, and the error says how to do it right. It says whether the parameters are still the same on all
ranks: then the means were right so far. All ranks raise in the same backward and start counting
anew, so a program that catches the error on all ranks may continue.
The parameters are compared bit by bit. With a communication hook in Python they may differ on
purpose (post-localSGD), and are not compared. While some rank has joined (`join`) nothing is
compared: its parameters stay behind, and the forward passes of the others are collective.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.torch_internals.compiler import skip_compilation

if TYPE_CHECKING:
    from mpiddp.process_group.group import ProcessGroup
    from mpiddp.reducer.state import ReducerState

__all__ = ["ForwardPasses", "report", "warn_of_higher_orders"]

_warned_of_higher_orders = False


class _Pass:
    """One forward pass; autograd calls it when backward reaches one of its outputs."""

    __slots__ = ("passes", "reached", "reductions")

    def __init__(self, passes: ForwardPasses) -> None:
        self.passes = passes
        self.reached = False
        self.reductions = passes.reductions

    def __call__(self, *gradients: Any) -> None:
        if not self.reached:
            self.reached = True
            if self.reductions == self.passes.reductions:
                self.passes.unreached -= 1


@skip_compilation
class ForwardPasses:
    """Counts the forward passes of one wrapped module that may be lost.

    Not collective.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.lost = 0  # without a backward, up to the last reduction
        self.unreached = 0  # since then, until now
        self.reductions = 0
        self._current: _Pass | None = None

    def begin(self) -> None:
        """Count a forward pass, whatever becomes of it."""
        self.begun += 1
        self.unreached += 1
        self._current = _Pass(self)

    def end(self, outputs: Sequence[torch.Tensor]) -> None:
        """Watch whether backward reaches one of the tensors that forward has returned.

        Call it before the reducer has its own hooks there, which may launch all buckets.
        """
        current, self._current = self._current, None
        if current is None:
            return
        inner = [tensor for tensor in outputs if tensor.grad_fn is not None]
        for tensor in inner:
            tensor.register_hook(current)  # type: ignore[no-untyped-call]
        if not inner:
            current()  # nothing that a backward could begin at

    def settle(self) -> int:
        """Return how many forward passes are lost: all that no backward has reached by now."""
        self.lost += self.unreached
        self.unreached = 0
        self.reductions += 1
        return self.lost


def report(reducer: ReducerState) -> None:
    """Raise because ranks have lost different numbers of forward passes; start counting anew.

    Collective: all ranks know it from the reduced flags. See Note [Out of step].

    Raises:
        RuntimeError: always.
    """
    passes, group = reducer.passes, reducer.process_group
    # With a hook in Python the parameters may differ.
    compared = reducer.python_hook is None
    digest = _digest(reducer.parameters) if compared else b""
    everyone = group.allgather_objects((passes.lost, passes.begun, digest))
    passes.lost = 0
    others = [rank for rank, (_, _, theirs) in enumerate(everyone) if theirs != everyone[0][2]]
    if others:
        parameters = (
            f"The parameters of {group.describe_ranks(others)} differ from those of "
            f"rank {group.world_ranks[0]}: gradients of different iterations have been averaged. "
        )
    elif compared:
        parameters = (
            "The parameters are still the same on all ranks, but in the end some ranks would wait "
            "for a backward that does not come. "
        )
    else:
        parameters = ""
    raise RuntimeError(
        f"rank {group.me}: the ranks are out of step. Forward passes without a backward: "
        f"{_losses(group, [(lost, begun) for lost, begun, _ in everyone])}. "
        f"{parameters}A rank that leaves a step out (it catches an exception of forward, or does "
        f"not call backward) is out of step from then on: leave a step out on all ranks or on "
        f"none, the optimizer's step as well. Run a forward pass that needs no backward under "
        f"torch.no_grad(), or by the module itself, model.module."
    )


def warn_of_higher_orders() -> None:
    """Warn, once a process, of a backward with create_graph=True, as torch's class does."""
    global _warned_of_higher_orders
    if not _warned_of_higher_orders:
        _warned_of_higher_orders = True
        warnings.warn(
            "Using DistributedDataParallel with create_graph=True is not well-supported: gradients "
            "of higher order are not averaged over ranks, and there is no backward through the "
            "all-reduce. torch.autograd.grad(..., create_graph=True) inside of a loss, as for a "
            "gradient penalty, is no problem.",
            stacklevel=2,
        )


def _digest(parameters: Sequence[torch.Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for parameter in parameters:
        plain = parameter.detach().cpu().contiguous().resolve_conj().resolve_neg()
        # Not by reshape: one element that is contiguous may have any stride.
        flat = plain.as_strided((plain.numel(),), (1,))
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()


def _losses(group: ProcessGroup, counts: Sequence[tuple[int, int]]) -> str:
    """Return words such as "1 of 3 on rank 1; 0 of 2 on ranks 0 and 2"."""
    ranks: dict[tuple[int, int], list[int]] = {}
    for rank, count in enumerate(counts):
        ranks.setdefault(count, []).append(rank)
    return "; ".join(
        f"{lost} of {begun} on {group.describe_ranks(members)}"
        for (lost, begun), members in sorted(ranks.items(), reverse=True)
    )
