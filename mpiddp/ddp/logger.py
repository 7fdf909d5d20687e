"""The logger that torch's wrapper expects: facts about a wrapped module, by torch's names.

Times are in nanoseconds, as in torch; points in time are on the monotonic clock.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mpiddp.reducer.reducer import Reducer
from mpiddp.torch_internals.compiler import skip_compilation
from mpiddp.torch_internals.patching import replace_function

__all__ = ["Logger", "LoggingData", "install", "logs_errors"]

Method = TypeVar("Method", bound=Callable[..., Any])

# As torch writes them.
_DTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
    torch.complex32: "c10::complex<c10::Half>",
}

_ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG")

# Statistics are taken in each of the first iterations, then now and then, as torch does.
_FIRST_ITERATIONS = 10
_SAMPLE_RATE = 100

_AVERAGED = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)


@dataclass
class LoggingData:
    """The two maps that torch's ``_get_ddp_logging_data`` merges."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


@skip_compilation
class Logger:
    """Collects logging data of one reducer.

    Not collective.

    Args:
        reducer: the reducer to describe.
        bucket_cap_bytes: size limit of a bucket, in bytes.
    """

    def __init__(self, reducer: Reducer, bucket_cap_bytes: int) -> None:
        self._reducer = reducer
        self._data = LoggingData()
        self._data.ints_map["bucket_cap_bytes"] = bucket_cap_bytes
        self._sample_rate = _SAMPLE_RATE
        self._recorded = 0
        self._totals = dict.fromkeys(_AVERAGED, 0)

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Sequence[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Record what is known when the wrapper has been constructed."""
        reducer = self._reducer
        group = reducer.process_group
        parameters = reducer.parameters
        self._data.strs_map.update(
            module_name=module_name,
            device_ids=", ".join(map(str, device_ids)),
            backend_name=group.getBackendName(),
            dtypes=", ".join(sorted({_DTYPES[p.dtype] for p in parameters})),
            bucket_sizes=self._bucket_sizes(),
            **{name.lower(): os.environ.get(name, "N/A") for name in _ENVIRONMENT},
        )
        self._data.ints_map.update(
            world_size=group.size(),
            rank=group.rank(),
            iteration=0,
            output_device=output_device,
            broadcast_buffers=int(broadcast_buffers),
            has_sync_bn=int(has_sync_bn),
            find_unused_parameters=int(reducer.find_unused_parameters),
            gradient_as_bucket_view=int(reducer.gradient_as_bucket_view),
            num_parameter_tensors=len(parameters),
            total_parameter_size_bytes=self._bytes(range(len(parameters))),
            is_multi_device_module=int(len({p.device for p in parameters}) > 1),
        )

    def set_sample_rate(self, iterations: int) -> None:
        """Record statistics every `iterations` iterations, after the first ones."""
        self._sample_rate = iterations

    def set_runtime_stats_and_log(self) -> None:
        """Record the statistics of the iteration that has ended."""
        reducer = self._reducer
        iteration = reducer.iterations
        if not reducer.reductions or (
            iteration > _FIRST_ITERATIONS and iteration % self._sample_rate
        ):
            return
        self._recorded += 1
        self._data.ints_map.update(
            iteration=iteration,
            has_rebuilt_buckets=int(reducer.has_rebuilt_buckets),
            num_buckets_reduced=sum(not bucket.skipped for bucket in reducer.buckets),
            unused_parameter_size=self._bytes(reducer.unused),
        )
        self._note_times()
        # Buckets are laid out in the order in which gradients came.
        self._data.strs_map["prev_iteration_grad_ready_order_indices"] = ", ".join(
            str(index)
            for bucket in reducer.buckets
            for index in bucket.parameter_indices
            if index not in reducer.unused
        )
        if reducer.has_rebuilt_buckets and "rebuilt_bucket_sizes" not in self._data.strs_map:
            self._note_rebuilt_buckets()

    def _note_rebuilt_buckets(self) -> None:
        self._data.strs_map["rebuilt_bucket_sizes"] = self._bucket_sizes()
        self._data.strs_map["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(map(str, bucket.parameter_indices)) for bucket in self._reducer.buckets
        )

    def _note_times(self) -> None:
        forward, backward, launched, ended, reduced = (
            int(seconds * 1e9) for seconds in self._reducer.last_moments()
        )
        times = {
            "forward_compute_time_start": forward,
            "backward_compute_time_start": backward,
            "backward_comm_time_start": launched,
            "backward_compute_time_end": ended,
            "backward_comm_time_end": reduced,
            "forward_compute_time": backward - forward,
            "backward_compute_time": ended - backward,
            "backward_comm_time": reduced - launched,
            "backward_compute_comm_overlap_time": ended - launched,
        }
        for name in _AVERAGED:
            # Of two forwards before one backward, the second began after the first.
            times[name] = max(times[name], 0)
            self._totals[name] += times[name]
            times[f"avg_{name}"] = self._totals[name] // self._recorded
        self._data.ints_map.update(times)

    def _set_uneven_input_join(self) -> None:
        self._data.ints_map["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self._data.ints_map["static_graph"] = 1

    def _set_comm_hook_name(self, name: str) -> None:
        self._data.strs_map["comm_hook"] = name

    def set_tuned_buckets(self, bucket_cap_bytes: int, words: str) -> None:
        """Record which bucket size was chosen, and why."""
        self._data.ints_map["bucket_cap_bytes"] = bucket_cap_bytes
        self._data.strs_map["bucket_tuning"] = words
        if self._reducer.has_rebuilt_buckets:
            self._note_rebuilt_buckets()

    def set_error_and_log(self, message: str) -> None:
        """Record an error that the wrapper is about to raise."""
        self._data.strs_map["error"] = message
        self._data.ints_map["has_error"] = 1

    def _get_ddp_logging_data(self) -> LoggingData:
        return self._data

    def _bucket_sizes(self) -> str:
        return ", ".join(
            str(self._bytes(bucket.parameter_indices)) for bucket in self._reducer.buckets
        )

    def _bytes(self, indices: Sequence[int]) -> int:
        parameters = self._reducer.parameters
        return sum(parameters[i].numel() * parameters[i].element_size() for i in indices)


def logs_errors(method: Method) -> Method:
    """Let a method of a wrapper record in its logging data what it raises. Not collective."""

    @functools.wraps(method)
    def logging(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.logger.set_error_and_log(f"{type(error)}: {error}")
            raise

    return logging  # type: ignore[return-value]


def install() -> None:
    """Let functions of torch that record errors in a logger accept ours too. Not collective."""
    for name in ("_compute_bucket_assignment_by_size", "_verify_params_across_processes"):
        replace_function(getattr(dist, name), _with_our_logger)


def _with_our_logger(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def calling(*args: Any, **kwargs: Any) -> Any:
        logger = kwargs.get("logger", args[-1] if args else None)
        if not isinstance(logger, Logger):
            return torchs(*args, **kwargs)
        kwargs.pop("logger", None)
        try:
            return torchs(*(each for each in args if each is not logger), **kwargs)
        except RuntimeError as error:
            logger.set_error_and_log(str(error))
            raise

    return calling
