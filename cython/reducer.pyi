from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpiddp.bucket import Bucket
from mpiddp.engine import Channel

class Reducer:
    parameters: list[torch.Tensor]
    buckets: list[Bucket]
    process_group: Any
    channel: Channel
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    has_rebuilt_buckets: bool
    static_graph: bool
    reductions: int
    iterations: int
    compression: torch.dtype | None
    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        process_group: Any,
        channel: Channel,
        assign_buckets: Callable[[list[int] | None], list[list[int]]],
        describe_parameter: Callable[[int], str],
        report_missing: Callable[[list[tuple[int, int]], bool], None],
        *,
        expect_sparse: Sequence[bool] | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        skip_unused: bool = False,
    ) -> None: ...
    def compress(self, dtype: torch.dtype | None) -> None: ...
    def end_of_backward(self) -> None: ...
    def prepare_for_forward(self) -> None: ...
    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None: ...
    def watch(self, outputs: list[torch.Tensor]) -> None: ...
    def set_logger(self, logger: Any) -> None: ...
    def _rebuild_buckets(self) -> bool: ...
    def _remove_autograd_hooks(self) -> None: ...
    def _check_reducer_finalized(self) -> None: ...
    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None: ...
    def _push_all_rebuilt_params(self) -> None: ...
    def _set_static_graph(self) -> None: ...
    def _autograd_hook(self, index: int) -> None: ...

class ParameterHook:
    def __call__(self, parameter: torch.Tensor) -> None: ...
