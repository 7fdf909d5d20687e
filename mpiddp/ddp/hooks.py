"""Validate communication hooks, and recognise those that the reducer runs without Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket

from mpiddp import compression
from mpiddp.ddp.python_hook import hook_name

Hook = Callable[..., Any]


def check_hook(hook: object) -> None:
    """Refuse what torch's class refuses as a communication hook. Not collective.

    Raises:
        TypeError: `hook` is not callable.
        ValueError: it is annotated as something other than a communication hook.
    """
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    if not _is_recognised(hook):
        _check_annotations(hook)


def runs_in_python(hook: Hook, state: object, group: dist.ProcessGroup) -> bool:
    """Return whether `hook` must be called; else it runs without Python. Not collective.

    Args:
        hook: a hook that `check_hook` accepts.
        state: the state to register it with.
        group: of the module; its reducer runs recognised hooks.

    Raises:
        ValueError: `state` is not what a recognised hook takes.
    """
    if not _is_recognised(hook):
        return True
    if state is None or state is group:
        return False
    if isinstance(state, dist.ProcessGroup):
        return True
    raise ValueError(
        f"the state of {hook_name(hook)} must be None or a process group, not {state!r}"
    )


def wire_dtype(hook: Hook) -> torch.dtype | None:
    """Return the dtype in which a recognised hook lets gradients travel, None for their own.

    Not collective.
    """
    return dict(_recognised())[hook]


def builtin_hook(comm_hook_type: object) -> Hook:
    """Return the hook that does what one of torch's built-in hooks does.

    Not collective.

    Raises:
        TypeError: it is not a ``torch.distributed.BuiltinCommHookType``.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if comm_hook_type == BuiltinCommHookType.ALLREDUCE:
        return default_hooks.allreduce_hook
    if comm_hook_type == BuiltinCommHookType.FP16_COMPRESS:
        return default_hooks.fp16_compress_hook
    raise TypeError(
        f"comm_hook_type must be a torch.distributed.BuiltinCommHookType, not {comm_hook_type!r}"
    )


def _is_recognised(hook: object) -> bool:
    return any(hook is one for one, _ in _recognised())


def _recognised() -> list[tuple[Hook, torch.dtype | None]]:
    # Not at the top: it imports much that nobody needs without a hook.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return [
        (compression.fp16, torch.float16),
        (compression.bf16, torch.bfloat16),
        (default_hooks.fp16_compress_hook, torch.float16),
        (default_hooks.bf16_compress_hook, torch.bfloat16),
        (default_hooks.allreduce_hook, None),
    ]


def _check_annotations(hook: Hook) -> None:
    """Refuse what torch's class refuses."""
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is not None and bucket.annotation not in (inspect.Parameter.empty, GradBucket):
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    future = torch.futures.Future[torch.Tensor]
    if signature.return_annotation not in (inspect.Signature.empty, future):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
        )
