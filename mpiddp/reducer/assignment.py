"""Which gradient goes into which bucket, decided the same way on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from mpiddp.torch_internals.compiler import skip_compilation

if TYPE_CHECKING:
    from mpiddp.process_group.group import ProcessGroup


@skip_compilation
class BucketAssignment:
    """Assigns parameters to buckets by size, in the order in which gradients come.

    A bucket is of one dtype and on one device.

    Before the first backward that order is guessed: the reverse of registration. Afterwards it
    is the order in which gradients arrived on rank 0.

    Args:
        parameters: the parameters, by index.
        expect_sparse: for each, whether its gradient is sparse; a sparse one has its own bucket.
        size_limits: bytes of the first bucket, the second, and so on; the last one holds for
            all others. A bucket is closed by the gradient that reaches its limit.
        process_group: the ranks that must agree.

    Attributes:
        order: that of the gradients, as it was last assumed or agreed on.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        expect_sparse: Sequence[bool],
        size_limits: Sequence[int],
        process_group: ProcessGroup,
    ) -> None:
        self.parameters = list(parameters)
        self.expect_sparse = list(expect_sparse)
        self.size_limits = list(size_limits)
        self.process_group = process_group
        self.order = list(reversed(range(len(self.parameters))))

    def __call__(self, arrival_order: Sequence[int] | None) -> list[list[int]]:
        """Return the parameter indices of each bucket, in launch order.

        Collective if `arrival_order` is given.

        Args:
            arrival_order: all parameter indices as their gradients arrived here; rank 0's
                order is used. None before the first backward.
        """
        if arrival_order is not None:
            self.order = self._order_of_rank_0(arrival_order)
        return self.in_order(self.order)

    def in_order(self, order: Sequence[int]) -> list[list[int]]:
        """Return the parameter indices of each bucket for gradients that come in this order.

        Not collective, but all ranks give the same order.
        """
        buckets, _ = _compute_bucket_assignment_by_size(
            [self.parameters[index] for index in order],
            self.size_limits,
            self.expect_sparse,
            list(order),
        )
        # In the order in which they fill. torch leaves the last bucket of each dtype and device in
        # an order of its own, which may differ on a rank with other devices.
        last = {index: place for place, index in enumerate(order)}
        buckets.sort(key=lambda bucket: max(last[index] for index in bucket))
        return buckets

    def _order_of_rank_0(self, arrival_order: Sequence[int]) -> list[int]:
        order = torch.tensor(arrival_order, dtype=torch.int64, device="cpu")
        dist.broadcast(order, group=self.process_group, group_src=0)
        return [int(index) for index in order]
