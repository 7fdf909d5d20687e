"""What the first step shows of gradients: in which order they come, and which are sparse."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from mpiddp.horovod.optimizer_reducer import TOO_MANY_PASSES
from mpiddp.process_group.group import ProcessGroup
from mpiddp.torch_internals.compiler import skip_compilation


@skip_compilation
class FirstStep:
    """Watches the gradients of the backward passes before buckets are made. Not collective.

    An optimizer does not know which layers its parameters are of, hence not whose gradients are
    sparse. So buckets are made when the first gradients are there, in the order in which these
    came; only the first step does not overlap with backward.

    Args:
        parameters: which require a gradient.
        passes: how many backward passes each may have.

    Attributes:
        passes: the same, may be changed.
        in_flight: whether a backward pass has run.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], passes: int) -> None:
        self.parameters = parameters
        self.passes = passes
        self.in_flight = False
        self._counts = [0] * len(parameters)
        self._arrived: dict[int, None] = {}
        self._works: list[dist.Work | None] = []
        self._agreed = self._kinds = torch.empty(0, dtype=torch.int64, device="cpu")
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def count(parameter: torch.Tensor) -> None:
            self.in_flight = True
            if self._counts[index] == self.passes:
                raise AssertionError(TOO_MANY_PASSES)
            self._counts[index] += 1
            self._arrived.pop(index, None)
            self._arrived[index] = None

        return count

    def begin_end(self, group: ProcessGroup) -> None:
        """Stop watching, and begin to tell all ranks what was seen. Collective, as `end`."""
        for handle in self._handles:
            handle.remove()
        count = len(self.parameters)
        order = list(self._arrived)
        order += [index for index in reversed(range(count)) if index not in self._arrived]
        self._agreed = torch.tensor(order, dtype=torch.int64, device="cpu")
        self._kinds = torch.zeros(2, count, dtype=torch.int64, device="cpu")
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self._kinds[int(parameter.grad.layout is torch.strided), index] = 1
        self._works = [
            dist.broadcast(self._agreed, group=group, group_src=0, async_op=True),
            dist.all_reduce(self._kinds, group=group, async_op=True),
        ]

    def is_agreed(self) -> bool:
        """Return whether `end` would not wait. Not collective."""
        return all(work is None or work.is_completed() for work in self._works)

    def end(self) -> tuple[list[int], list[bool], list[bool]]:
        """Return what all ranks know now. Collective: the second half of `begin_end`.

        Returns:
            The parameter indices in the order in which gradients came on rank 0, those without any
            at the end; for each parameter whether some rank has a sparse gradient; and whether
            some rank has a dense one.
        """
        for work in self._works:
            if work is not None:
                work.wait()
        sparse, dense = (self._kinds > 0).tolist()
        return self._agreed.tolist(), sparse, dense
