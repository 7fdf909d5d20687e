"""Check the arguments of DistributedDataParallel before anything is sent."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch
import torch.distributed as dist
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from mpiddp import settings
from mpiddp.ddp import memory_domains
from mpiddp.gpu.runtime import runtime_of
from mpiddp.reducer import model_check
from mpiddp.reducer.bucket import supported_dtypes

if TYPE_CHECKING:
    from mpiddp.process_group.group import ProcessGroup

_FLAGS = (
    "broadcast_buffers",
    "init_sync",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
    "forward_sync_buffers",
    "lazy_bucket_allocation",
)


def check_module(module: object) -> None:
    """Check that a module's parameters and buffers can be replicated. Not collective.

    Raises:
        TypeError: it is not a module, or some tensor cannot be replicated or averaged.
        ValueError: some tensor is neither on the CPU nor on a GPU of CUDA or ROCm.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    named = [
        *(
            (f"parameter {name!r}", p)
            for name, p in module.named_parameters()
            if name not in ignored
        ),
        *((f"buffer {name!r}", b) for name, b in module.named_buffers() if name not in ignored),
    ]
    for name, tensor in named:
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            continue  # torch says what to do about these
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"mpiddp trains on the CPU and on GPUs of CUDA and ROCm, which torch calls cuda; "
                f"{name} is on {tensor.device}"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name} has layout {tensor.layout}; only dense tensors are replicated")
        if tensor.requires_grad and tensor.dtype not in supported_dtypes():
            raise TypeError(
                f"{name} has dtype {tensor.dtype}, whose gradients cannot be averaged; supported "
                f"are {', '.join(map(str, supported_dtypes()))}"
            )


def check_flags(arguments: Mapping[str, object]) -> None:
    """Check the arguments that must be true, false or None. Not collective.

    Raises:
        TypeError: one of them is something else.
    """
    for name in _FLAGS:
        value = arguments[name]
        # numpy's bool is not Python's, and many scripts use 0 and 1 as flags.
        if value is not None and not isinstance(value, bool | int | numpy.bool_):
            raise TypeError(f"{name} must be a bool, not {value!r}")


def wanted_bucket_cap(size: float | str | None, sizes: Sequence[int] | None) -> Any:
    """Return the size of a bucket in MiB, "auto", or None for the default. Not collective.

    Args:
        size: the argument `bucket_cap_mb`; None: what MPIDDP_BUCKET_CAP_MB says, unless there is
            a list.
        sizes: the argument `bucket_cap_mb_list`.

    Raises:
        TypeError: one is not a number, or `sizes` is not a list.
        ValueError: one is negative, not finite, or another word than "auto"; or there are both
            "auto" and a list.
    """
    if size is None and not sizes:
        size = settings.BUCKET_CAP_MB.read()
    if isinstance(size, str):
        if size != "auto":
            raise ValueError(f'bucket_cap_mb must be a number of MiB or "auto", not {size!r}')
        if sizes:
            raise ValueError('bucket_cap_mb="auto" does not work together with bucket_cap_mb_list')
        return size
    _check_bucket_sizes(size, sizes)
    return size


def _check_bucket_sizes(size: float | None, sizes: Sequence[int] | None) -> None:
    if sizes is not None and not isinstance(sizes, list | tuple):
        raise TypeError(f"bucket_cap_mb_list must be a list of numbers of MiB, not {sizes!r}")
    for name, value in [("bucket_cap_mb", size), *(("bucket_cap_mb_list", s) for s in sizes or ())]:
        if value is None and name == "bucket_cap_mb":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} must be a number of MiB, not {value!r}")
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be a finite number of MiB, not negative: {value!r}")


def check_devices(module: torch.nn.Module, device_ids: object, output_device: object) -> None:
    """Check that no device is asked for if a module is on the CPU. Not collective.

    torch's class checks them for a module on GPUs.

    Raises:
        ValueError: one is asked for.
    """
    if not _is_on_cpu(module):
        return
    for name, value in (("device_ids", device_ids), ("output_device", output_device)):
        if value is not None and value != []:
            raise ValueError(
                f"{name} must be None for a module on the CPU, as in torch's class, not {value!r}"
            )


def _is_on_cpu(module: torch.nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters())


def has_streams(module: torch.nn.Module) -> bool:
    """Whether some parameter is on a GPU. Not collective."""
    return any(runtime_of(parameter.device) for parameter in module.parameters())


def wants_sharing(module: torch.nn.Module, arguments: Mapping[str, Any]) -> str:
    """Return which ranks are to share the module's parameters, as in `memory_domains`.

    Not collective. What only the variable asks for, and what cannot be, is told by rank 0.

    Raises:
        ValueError: the argument asks for what cannot be.
    """
    asked = arguments["shared_parameters"]
    if asked is None:
        wanted = settings.SHARED_PARAMETERS.read()
        try:
            check_shared_parameters(module, {**arguments, "shared_parameters": wanted})
        except ValueError as error:
            warn_of_replicas(type(module).__name__, error)
            return ""
        return wanted
    wanted = memory_domains.normalized(asked)
    check_shared_parameters(module, {**arguments, "shared_parameters": wanted})
    return wanted


def warn_of_replicas(name: str, reason: object) -> None:
    """Tell on rank 0 that parameters are not shared though the variable says so. Not collective."""
    if dist.is_initialized() and dist.get_rank() == 0:
        warnings.warn(
            f"each rank keeps parameters of {name} of its own, in spite of "
            f"MPIDDP_SHARED_PARAMETERS: {reason}",
            stacklevel=4,
        )


def check_shared_parameters(module: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
    """Check that a module's parameters can be shared within a node. Not collective.

    Raises:
        ValueError: something else was asked for that does not go with it, a parameter is on a GPU,
            or its gradient is sparse.
    """
    if not arguments["shared_parameters"]:
        return
    for name in (
        "mixed_precision",
        "delay_all_reduce_named_params",
        "skip_all_reduce_unused_params",
        "lazy_bucket_allocation",
    ):
        if arguments[name]:
            raise ValueError(f"shared_parameters does not work together with {name}")
    for name, parameter in module.named_parameters():
        if parameter.device.type != "cpu":
            raise ValueError(
                f"shared_parameters works on the CPU only, and parameter {name} is on "
                f"{parameter.device}"
            )
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"shared_parameters does not work together with an optimizer in backward, which "
                f"parameter {name} has"
            )
    for name, layer in module.named_modules():
        if getattr(layer, "max_norm", None) is not None and isinstance(
            layer, torch.nn.Embedding | torch.nn.EmbeddingBag
        ):
            raise ValueError(
                f"shared_parameters does not work together with max_norm, which changes the "
                f"parameters of {name or 'the module'} in forward, on each rank"
            )
        if getattr(layer, "sparse", False) and isinstance(
            layer, torch.nn.Embedding | torch.nn.EmbeddingBag
        ):
            raise ValueError(
                f"shared_parameters needs dense gradients, and those of {name or 'the module'} "
                f"are sparse"
            )


def compare(
    group: ProcessGroup | None, module: torch.nn.Module, arguments: Mapping[str, Any]
) -> None:
    """Compare the arguments with which ranks send different things in construction. Collective.

    Args:
        group: the ranks; None: nothing is compared.
        module: to be wrapped.
        arguments: of the constructor.

    Raises:
        RuntimeError: they differ; the error names both values.
    """
    if group is None:
        return
    delayed = arguments["delay_all_reduce_named_params"]
    last = arguments["param_to_hook_all_reduce"]
    asked = arguments["bucket_cap_mb"]
    settings = {
        # Numbers are compared with the models.
        "bucket_cap_mb": asked if asked == "auto" else "not auto",
        "init_sync": bool(arguments["init_sync"]),
        "static_graph": bool(arguments["static_graph"]),
        "delay_all_reduce_named_params": delayed and [str(name) for name, *_ in delayed],
        "param_to_hook_all_reduce": next(
            (name for name, parameter in module.named_parameters() if parameter is last), None
        ),
    }
    with group.recorded(f"construction of DistributedDataParallel({type(module).__name__})"):
        model_check.verify_equal_models(
            group,
            model_check.describe_settings(settings),
            "construct DistributedDataParallel in different ways",
        )


def check_process_group(process_group: object, device_mesh: Any) -> ProcessGroup | None:
    """Return the given group, the mesh's or the world, if it is of mpiddp. Not collective.

    None for a mesh that torch's class refuses.

    Raises:
        TypeError: it is another backend's.
        RuntimeError: there is no group at all.
    """
    if device_mesh is not None:
        if process_group is not None or device_mesh.ndim != 1:
            return None  # torch says what is wrong with these
        process_group = device_mesh.get_group(mesh_dim=0)
    if process_group is None:
        if not dist.is_initialized():
            raise RuntimeError("call mpiddp.init_process_group() before DistributedDataParallel")
        process_group = dist.group.WORLD
    from mpiddp.process_group.group import ProcessGroup

    if not isinstance(process_group, ProcessGroup):
        name = getattr(process_group, "name", lambda: type(process_group).__name__)
        raise TypeError(
            f"DistributedDataParallel of mpiddp needs a process group of mpiddp, not "
            f"{name() if callable(name) else name}: start with mpiddp.init_process_group()"
        )
    return process_group
