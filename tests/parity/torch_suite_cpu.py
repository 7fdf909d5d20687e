"""Let those tests of torch's suite that ask for a GPU a rank run on CPUs.

Most tests of DistributedDataParallel there move a module to GPU number `rank`, although nothing
in them needs one. Here such moves change nothing, `device_ids` are left out, and streams and events
do nothing. Large images are cut: their convolutions take minutes on CPUs. What does need a GPU
fails on Gloo then as well, and is not asked of others.
"""

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal import common_distributed

__all__ = ["enable_tests", "stand_in", "without_devices"]


def enable_tests() -> None:
    """Let tests for several GPUs be run. Call it before the suite is imported."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: keep
    common_distributed.skip_if_no_gpu = keep
    common_distributed.init_multigpu_helper = lambda size, _: {rank: [rank] for rank in range(size)}


def stand_in(suite: types.ModuleType) -> None:
    """Keep on the CPU what the tests of `suite` would move to a GPU."""
    suite.torch = _Torch()  # type: ignore[attr-defined]
    torch.cuda.set_device = lambda *_: None  # for init_device_mesh
    for holder in (torch.Tensor, torch.nn.Module):
        holder.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
        holder.to = _without_gpus(holder.to)  # type: ignore[method-assign, assignment]
    # What torch's wrapper uses for mixed precision.
    torch.Stream = _Stream  # type: ignore[misc, assignment]
    torch.Event = _Stream  # type: ignore[misc, assignment]
    torch.accelerator.current_stream = _Stream  # type: ignore[assignment]
    base = suite.DistributedTest._DistTestBase
    base._run_uneven_inputs_test = _with_small_images(base._run_uneven_inputs_test)


def without_devices(init: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of a wrapper that does not look at GPUs it is given."""

    @functools.wraps(init)
    def initialise(*args: Any, **kwargs: Any) -> None:
        init(*args, **{**kwargs, "device_ids": None, "output_device": None})

    return initialise


def _with_small_images(run: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(run)
    def run_smaller(self: Any, test_case: Any, *args: Any, **kwargs: Any) -> None:
        images = test_case.inp
        if isinstance(images, torch.Tensor) and images.dim() == 4:
            test_case = test_case._replace(inp=images[..., :64, :64])
        run(self, test_case, *args, **kwargs)

    return run_smaller


class _Stream:
    """A stream, or an event, of a device that does everything at once."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def record(self, *_: object, **__: object) -> None:
        pass

    wait = wait_stream = wait_event = synchronize = record


class _Cuda:
    """torch.cuda, where it says which GPU is used or waits for one."""

    Stream = Event = _Stream

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def set_device(self, *_: object, **__: object) -> None:
        pass

    manual_seed = synchronize = set_device

    def current_device(self) -> int:
        return 0

    def device(self, *_: object) -> Any:
        return contextlib.nullcontext()

    stream = device


class _Torch:
    """The module torch whose functions make tensors on the CPU."""

    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _without_gpus(value) if isinstance(value, types.BuiltinFunctionType) else value

    @staticmethod
    def device(*_: object) -> torch.device:
        return torch.device("cpu")


def _without_gpus(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_gpu(kwargs["device"]):
            kwargs["device"] = "cpu"
        # The first is what is moved; numbers and names elsewhere are devices of `to` alone.
        if function.__name__ == "to":
            args = (*args[:1], *("cpu" if _is_gpu(given) else given for given in args[1:]))
        return function(*args, **kwargs)

    return on_cpu


def _is_gpu(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)
