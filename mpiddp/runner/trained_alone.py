"""Say at the end of a job that trained on several ranks, and averaged no gradient over them.

A program that wraps nothing, because of a name or a test that it did not expect, trains N models
beside each other and ends as if all were well. What averages is a reducer, or operations of
torch.distributed that reduce at least as many elements as the first optimizer's gradients have. Of
groups of other backends, and of Horovod's operations, nothing is known here: nothing is said then.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpiddp.ddp.torch_reducer import TorchReducer

__all__ = ["note_other_group", "say", "watch", "watch_groups"]

_watching = False
_stepped = 0  # elements of the gradients in the first step of an optimizer
_reduced = 0  # elements that operations of torch.distributed have reduced
_other_groups = False


def watch() -> None:
    """Notice the first step of an optimizer. Not collective."""
    global _watching
    _watching = True

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        global _stepped
        if _stepped:  # it stays: torch is going through the hooks, of which others may follow
            return
        gradients = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        _stepped = sum(gradient.numel() for gradient in gradients)

    register_optimizer_step_post_hook(after_step)


def watch_groups() -> None:
    """Count what groups of mpiddp reduce, until it is as much as a step. Not collective."""
    from mpiddp.process_group.group import ProcessGroup  # which initialises MPI

    if not _watching or "_enter" in vars(ProcessGroup):
        return

    def enter(self: ProcessGroup, name: str, tensors: Any = (), detail: object = None) -> int:
        global _reduced
        if "reduce" in name:
            _reduced += sum(tensor.numel() for tensor in tensors if _is_gradient_like(tensor))
            if 0 < _stepped <= _reduced and "_enter" in vars(ProcessGroup):
                del ProcessGroup._enter
        return super(ProcessGroup, self)._enter(name, tensors, detail)

    ProcessGroup._enter = enter  # type: ignore[assignment, method-assign]


def _is_gradient_like(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _horovod_has_begun() -> bool:
    module = sys.modules.get("mpiddp.horovod.world")
    return module is not None and bool(module.has_begun)


def note_other_group() -> None:
    """Take note of a group of another backend. Not collective."""
    global _other_groups
    _other_groups = True


def say(rank: int, world_size: int) -> None:
    """Say on rank 0 that each rank has trained alone, if it is so. Not collective."""
    if (
        rank == 0
        and _watching
        and _stepped > _reduced
        and not (TorchReducer.has_averaged or _other_groups or _horovod_has_begun())
    ):
        print(
            f"mpiddp: {world_size} ranks have trained, and no gradient was averaged over them: "
            f"each has trained a model of its own, unless the program averages by means that "
            f"mpiddp does not see. Wrap the model in torch.nn.parallel.DistributedDataParallel, "
            f"after init_process_group",
            file=sys.stderr,
            flush=True,
        )
