"""What programs import from horovod.common.elastic: a state of plain values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mpiddp.elastic.state import State
from mpiddp.horovod.elastic import TorchState, run
from mpiddp.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run_fn"]

Training = TypeVar("Training", bound=Callable[..., Any])


class ObjectState(TorchState):
    """Values of a training: a commit copies them, and a loss of ranks goes back to that.

    Collective where its methods say so. See `TorchState`.

    Args:
        bcast_object: without effect, as `get_rank`: the state knows its ranks.
        get_rank: see `bcast_object`.
        kwargs: the values. Each becomes an attribute.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any) -> None:
        super().__init__(None, None, **kwargs)


def run_fn(func: Training, reset: Any = None) -> Training:
    """Return a training function that goes on when ranks are lost: `hvd.elastic.run(func)`.

    Collective when it is called.

    Args:
        func: takes a state, and whatever else.
        reset: without effect: the ranks that are left form their world here.
    """
    return run(func)
