"""What torch's wrapper asks of its logger: facts about a wrapped module, by torch's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mpiddp.compilation import run_as_it_is
from mpiddp.reducer import Reducer


@dataclass
class LoggingData:
    """The two maps that torch's ``_get_ddp_logging_data`` merges."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


@run_as_it_is
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

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Sequence[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Note what is known when the wrapper has been constructed."""
        reducer = self._reducer
        group = reducer.process_group
        parameters = reducer.parameters
        self._data.strs_map.update(
            module_name=module_name,
            device_ids=", ".join(map(str, device_ids)),
            backend_name=group.getBackendName(),
            dtypes=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
            initial_bucket_sizes=self._bucket_sizes(),
        )
        self._data.ints_map.update(
            world_size=group.size(),
            rank=group.rank(),
            output_device=output_device,
            broadcast_buffers=int(broadcast_buffers),
            has_sync_bn=int(has_sync_bn),
            static_graph=int(static_graph),
            find_unused_parameters=int(reducer.find_unused_parameters),
            gradient_as_bucket_view=int(reducer.gradient_as_bucket_view),
            num_parameter_tensors=len(parameters),
            total_parameter_size_bytes=sum(p.numel() * p.element_size() for p in parameters),
            is_multi_device_module=int(len({p.device for p in parameters}) > 1),
        )

    def set_runtime_stats_and_log(self) -> None:
        """Note what changes while training."""
        reducer = self._reducer
        self._data.ints_map.update(
            iteration=reducer.reductions,
            has_rebuilt_buckets=int(reducer.has_rebuilt_buckets),
        )
        if reducer.has_rebuilt_buckets and "rebuilt_bucket_sizes" not in self._data.strs_map:
            self._data.strs_map["rebuilt_bucket_sizes"] = self._bucket_sizes()

    def _set_comm_hook_name(self, name: str) -> None:
        self._data.strs_map["comm_hook"] = name

    def set_error_and_log(self, message: str) -> None:
        """Note an error that the wrapper is about to raise."""
        self._data.strs_map["error"] = message
        self._data.ints_map["has_error"] = 1

    def _get_ddp_logging_data(self) -> LoggingData:
        return self._data

    def _bucket_sizes(self) -> str:
        sizes = [
            sum(self._bytes(self._reducer.parameters[index]) for index in bucket.parameter_indices)
            for bucket in self._reducer.buckets
        ]
        return ", ".join(map(str, sizes))

    @staticmethod
    def _bytes(parameter: torch.Tensor) -> int:
        return parameter.numel() * parameter.element_size()
