from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpiddp.engine.engine import Channel
from mpiddp.reducer.bucket import Bucket
from mpiddp.reducer.step_times import StepTimes

class ReducerState:
    parameters: list[torch.Tensor]
    buckets: list[Bucket]
    process_group: Any
    channels: dict[torch.device, Channel]
    channel: Channel
    mixed_precision: tuple[torch.dtype, torch.dtype] | None
    expect_sparse: list[bool]
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    ends_by_hand: bool
    has_rebuilt_buckets: bool
    layout: int
    static_graph: bool
    reductions: int
    agreement: Any
    next_bucket: int
    shadowing: bool
    passes: Any
    counting: int
    out_of_step: bool
    waiting_for: int
    iterations: int
    record_source: int
    unused: list[int]
    compression: torch.dtype | None
    python_hook: Any
    post_backward_futures: list[torch.futures.Future[Any]]
    divisor: float
    describe_parameter: Callable[[int], str]
    missing: list[int]
    arrival_order: list[int]
    expecting: bool
    callback_queued: bool
    ready: int
    profile: Any
    forward_began: float
    backward_began: float
    communication_began: float
    backward_ended: float
    communication_ended: float
    times: StepTimes
    comparison: Any
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
        lazy_buckets: bool = False,
        mixed_precision: tuple[torch.dtype, torch.dtype] | None = None,
        domain: int | None = None,
    ) -> None: ...
    @property
    def domain(self) -> int | None: ...
    @property
    def assign_buckets(self) -> Any: ...
    def note_error(self, error: Exception) -> None: ...
    def set_divisor(self, divisor: float) -> None: ...
    def keep_buckets(self) -> None: ...
    def was_used(self, index: int) -> bool: ...
    def was_used_anywhere(self, index: int) -> bool: ...
    def describe_bucket(self, bucket: Bucket) -> str: ...
    def without_gradient(self) -> list[int]: ...
    def last_moments(self) -> list[float]: ...
