from collections.abc import Sequence

import torch

from mpiddp.reducer.bucket import Bucket

def views_by_parameter(buckets: Sequence[Bucket] | None) -> dict[int, torch.Tensor]: ...
def move_gradient(
    parameter: torch.Tensor, old_view: torch.Tensor, bucket: Bucket, position: int
) -> None: ...
