from collections.abc import Mapping, Sequence

import torch

from mpiddp.reducer.bucket import Bucket

def views_by_parameter(buckets: Sequence[Bucket] | None) -> dict[int, torch.Tensor]: ...
def hold_gradients(
    parameters: Sequence[torch.Tensor], views: Mapping[int, torch.Tensor]
) -> bool: ...
def move_gradient(
    parameter: torch.Tensor, old_view: torch.Tensor, bucket: Bucket, position: int
) -> None: ...
