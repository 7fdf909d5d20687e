"""Loading into parameters that ranks share: `writing` is open while a load_state_dict runs.

However the load ends: a layer may refuse what it is given, and the program may catch that and go
on. Where a load raises on all ranks, what was loaded before stays, as in a plain module.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mpiddp.ddp.shared_parameters import SharedParameters

__all__ = ["begin", "install", "refuse_in_join"]


class _Loads(threading.local):
    """The loads that are going on in a thread, each within the one before it."""

    def __init__(self) -> None:
        # Of each, whose parameters it writes.
        self.written: list[list[SharedParameters]] = []


_loads = _Loads()


@functools.cache
def install() -> None:
    """Let each load_state_dict of a module end what it has begun. Once a process."""
    module: Any = torch.nn.Module
    load_state_dict: Callable[..., Any] = module.load_state_dict

    @functools.wraps(load_state_dict)
    def loading(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        mine: list[SharedParameters] = []
        _loads.written.append(mine)
        raised = True
        try:
            result = load_state_dict(self, *args, **kwargs)
            raised = False
            return result
        finally:
            _loads.written.pop()
            for shared in reversed(mine):
                shared.end_writing(raised)

    module.load_state_dict = loading


def begin(shared: SharedParameters) -> None:
    """Let the load that is going on write these parameters. Collective.

    Raises:
        RuntimeError: no load_state_dict is going on, which could end it.
    """
    if shared.is_writing:
        return
    if not _loads.written:
        raise RuntimeError(
            f"rank {shared.group.me}: parameters that the ranks of a node share are loaded by "
            f"load_state_dict, or by other functions within `with model.writing():`"
        )
    refuse_in_join(shared)
    shared.begin_writing()
    _loads.written[-1].append(shared)


def refuse_in_join(shared: SharedParameters) -> None:
    """Raise RuntimeError where other ranks may be without inputs. Not collective."""
    if shared.is_uneven():
        raise RuntimeError(
            f"rank {shared.group.me}: writing() changes parameters on all ranks, and "
            f"within join() some may be without inputs: do it before or after"
        )
