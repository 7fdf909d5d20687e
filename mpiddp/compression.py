"""Communication hooks with which float32 and float64 gradients travel in 16 bits.

    model = DistributedDataParallel(model)
    model.register_comm_hook(None, mpiddp.compression.bf16)

With mpiddp's class no Python runs for a bucket: gradients are converted while they are copied into
its buckets and back. The same holds for the equivalent hooks in
`torch.distributed.algorithms.ddp_comm_hooks.default_hooks`.

- Each rank's gradient is rounded to 16 bits. They are added and divided in float32; the mean is
  rounded once to 16 bits and widened into ``.grad``. All ranks get the same bits.
- A sum cannot overflow, as it can in torch's hooks; but a gradient that is itself beyond the 16-bit
  range becomes infinite: from 65,520 on with float16, from about 3.4e38 on with bfloat16.
- float16, bfloat16, complex and sparse gradients travel as they do without a hook.
- Buckets take 2 bytes an element, instead of as much as the gradients. With
  ``gradient_as_bucket_view`` that is on top of the gradients, which keep their own dtype.
"""

# Annotations must be objects, not strings: torch's class compares those of a hook with its types.

from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

__all__ = ["bf16", "fp16"]


def fp16(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as float16.

    Not meant to be called: give it to ``register_comm_hook``. Collective if it is called all the
    same, as by torch's own class: then it is torch's `fp16_compress_hook`, which divides before it
    adds, and adds as the process group does.

    Args:
        state: the process group, None for the world.
        bucket: torch's bucket of gradients.

    Returns:
        A future of the bucket's averaged gradients, in their own dtype.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return fp16_compress_hook(state, bucket)


def bf16(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as bfloat16: the range of float32, 8 bits of precision.

    Not meant to be called: give it to ``register_comm_hook``. Collective if it is called all the
    same, as by torch's own class: then it is torch's `bf16_compress_hook`.

    Args:
        state: the process group, None for the world.
        bucket: torch's bucket of gradients.

    Returns:
        A future of the bucket's averaged gradients, in their own dtype.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return bf16_compress_hook(state, bucket)
