from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpiddp.bucket import Bucket
from mpiddp.engine import Channel
from mpiddp.profiling import BucketEvents
from mpiddp.python_hook import PythonHook

class Reducer:
    parameters: list[torch.Tensor]
    buckets: list[Bucket]
    process_group: Any
    channels: dict[torch.device, Channel]
    channel: Channel
    mixed_precision: tuple[torch.dtype, torch.dtype] | None
    expect_sparse: list[bool]
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    has_rebuilt_buckets: bool
    static_graph: bool
    reductions: int
    next_bucket: int
    shadowing: bool
    passes: Any
    counting: int
    out_of_step: bool
    waiting_for: int
    iterations: int
    unused: list[int]
    compression: torch.dtype | None
    python_hook: PythonHook | None
    post_backward_futures: list[torch.futures.Future[Any]]
    divisor: float
    describe_parameter: Callable[[int], str]
    missing: list[int]
    arrival_order: list[int]
    expecting: bool
    ready: int
    profile: BucketEvents | None
    forward_began: float
    backward_began: float
    communication_began: float
    backward_ended: float
    communication_ended: float
    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        process_group: Any,
        channels: dict[torch.device, Channel],
        assign_buckets: Callable[[list[int] | None], list[list[int]]],
        describe_parameter: Callable[[int], str],
        report_missing: Callable[[list[tuple[int, int]], bool], None],
        *,
        expect_sparse: Sequence[bool] | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        skip_unused: bool = False,
        mixed_precision: tuple[torch.dtype, torch.dtype] | None = None,
    ) -> None: ...
    def set_divisor(self, divisor: float) -> None: ...
    def note_error(self, error: Exception) -> None: ...
    def was_used(self, index: int) -> bool: ...
    def end_of_backward(self) -> None: ...
    def prepare_for_forward(self) -> None: ...
    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None: ...
    def watch(self, outputs: list[torch.Tensor]) -> None: ...
    def _build_buckets(self, assignment: Sequence[Sequence[int]]) -> None: ...
    def _rebuild_buckets(self) -> bool: ...
    def _remove_autograd_hooks(self) -> None: ...
    def run_hook(self, index: int) -> None: ...

class ParameterHook:
    def __call__(self, parameter: torch.Tensor) -> None: ...
