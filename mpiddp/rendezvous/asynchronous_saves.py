"""Give torch.distributed.checkpoint.async_save a group of its own where the group is mpiddp's.

It calls collectives from a second thread. If training used the same group meanwhile, with Gloo as
with MPI tensors would arrive in wrong places, or nowhere.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from mpiddp.torch_internals.group_twins import twin_of
from mpiddp.torch_internals.patching import when_imported

__all__ = ["install"]

_MODULE = "torch.distributed.checkpoint._async_thread_executor"

# The last save of each group.
_saves: weakref.WeakKeyDictionary[dist.ProcessGroup, Future[Any]] = weakref.WeakKeyDictionary()


def install() -> None:
    """Change what async_save runs in its thread. Not collective.

    From then on the call itself is collective over its group, as torch documents it.
    """
    when_imported(_MODULE, _change)


def _change(module: Any) -> None:
    executor = module._ThreadBasedAsyncCheckpointExecutor
    executor.execute_save = _on_a_twin(executor.execute_save)


def _on_a_twin(torchs: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    def execute_save(self: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        from mpiddp.process_group.group import ProcessGroup  # which initialises MPI

        group = kwargs.get("process_group")
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        if not isinstance(group, ProcessGroup) or kwargs.get("no_dist"):
            return torchs(self, *args, **kwargs)
        last = _saves.get(group)
        if last is not None:
            with contextlib.suppress(Exception):  # it has been told to whoever holds the future
                last.result()
        saving = torchs(self, *args, **{**kwargs, "process_group": twin_of(group)})
        _saves[group] = saving
        return saving

    return execute_save
