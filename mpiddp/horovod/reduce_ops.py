"""The reductions of Horovod, by its names and numbers."""

from __future__ import annotations

import warnings
from enum import IntEnum

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "ReduceOp", "Sum", "chosen_op"]


class ReduceOp(IntEnum):
    """How tensors of several ranks become one. The numbers are those of Horovod 0.28."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


def chosen_op(op: int | None, average: bool | None) -> ReduceOp:
    """Return the reduction that the arguments `op` and `average` ask for. Not collective.

    Args:
        op: one of this file's reductions; None leaves it to `average`.
        average: deprecated: True is Average, False is Sum. None, with no op, is Average.

    Raises:
        ValueError: both are given, or there is no such reduction.
    """
    if op is not None:
        if average is not None:
            raise ValueError("give either op or average, not both; average is the older name")
        return ReduceOp(op)
    if average is None:
        return Average
    warnings.warn(
        "the argument average of Horovod's operations is deprecated: say op=hvd.Average or "
        "op=hvd.Sum",
        DeprecationWarning,
        stacklevel=3,
    )
    return Average if average else Sum
