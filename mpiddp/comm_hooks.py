"""Which communication hooks DistributedDataParallel serves, and what each means for its reducer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket

from mpiddp import compression

Hook = Callable[..., Any]

_SERVED = (
    "mpiddp.compression.fp16 and bf16, and fp16_compress_hook, bf16_compress_hook and "
    "allreduce_hook of torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
)


def wire_dtype(hook: object) -> torch.dtype | None:
    """Return the dtype in which `hook` lets gradients travel, None for their own.

    Not collective.

    Raises:
        TypeError: `hook` is not callable.
        ValueError: it is annotated as something else than a communication hook.
        NotImplementedError: it is none of those served: hooks in Python are still to come.
    """
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    for served, dtype in _served():
        if hook is served:
            return dtype
    _check_annotations(hook)
    name = getattr(hook, "__qualname__", repr(hook))
    raise NotImplementedError(  # hooks in Python are still to come
        f"register_comm_hook() with the hook {name} is not served by this version of mpiddp; "
        f"served are {_SERVED}"
    )


def builtin_hook(comm_hook_type: object) -> Hook:
    """Return the hook that does what one of torch's built-in hooks does.

    Not collective.

    Raises:
        TypeError: it is no ``torch.distributed.BuiltinCommHookType``.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if comm_hook_type == BuiltinCommHookType.ALLREDUCE:
        return default_hooks.allreduce_hook
    if comm_hook_type == BuiltinCommHookType.FP16_COMPRESS:
        return default_hooks.fp16_compress_hook
    raise TypeError(
        f"comm_hook_type must be a torch.distributed.BuiltinCommHookType, not {comm_hook_type!r}"
    )


def _served() -> list[tuple[Hook, torch.dtype | None]]:
    # Here and not at the top: it brings much that nobody needs without a hook.
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
