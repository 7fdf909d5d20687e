"""Sum sparse tensors over ranks: their entries are gathered, and added in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

if TYPE_CHECKING:
    from mpiddp.collectives.operation import Group


def all_reduce(group: Group, tensors: Sequence[torch.Tensor], op: dist.ReduceOp, opts: Any) -> None:
    """Sum tensors of which some are sparse, in place. Collective, in several steps.

    Args:
        group: the process group.
        tensors: sparse COO ones and dense ones.
        op: SUM.
        opts: those of torch's all_reduce, or None.

    Raises:
        TypeError: `op` is another one.
        ValueError: the ranks' tensors differ in their sparse dimensions.
    """
    if getattr(op, "op", op) != dist.ReduceOp.SUM:
        raise TypeError("sparse tensors can only be summed over ranks, with ReduceOp.SUM")
    with torch.no_grad():
        for tensor in tensors:
            if tensor.layout is torch.sparse_coo:
                _all_reduce_one(group, tensor, opts)
            else:
                group.allreduce([tensor], opts).wait()


def _all_reduce_one(group: Group, tensor: torch.Tensor, opts: Any) -> None:
    """Sum sparse COO tensors of all ranks in place."""
    gathering = AllgatherOptions()
    gathering.asyncOp = False
    if opts is not None:
        gathering.timeout = opts.timeout
    own = tensor.detach().coalesce()
    everyone = torch.zeros(2 * group.size(), dtype=torch.int64, device="cpu")
    sizes = torch.tensor([own._nnz(), own.sparse_dim()], device="cpu")
    group.all_gather_single(everyone, sizes, gathering).wait()
    counts, sparse_dims = everyone.view(-1, 2).t().tolist()
    # A tensor without entries may have any split into sparse and dense dimensions.
    splits = {dim for count, dim in zip(counts, sparse_dims, strict=True) if count}
    if not splits:
        return
    if len(splits) > 1:
        raise ValueError(f"the ranks' sparse tensors differ in sparse_dim: {sorted(splits)}")
    sparse_dim = splits.pop()
    indices, values = own.indices().contiguous(), own.values().contiguous()
    if not own._nnz():
        indices = indices.new_empty(sparse_dim, 0)
        values = values.new_empty(0, *tensor.shape[sparse_dim:])
    all_indices = [indices.new_empty(sparse_dim, count) for count in counts]
    all_values = [values.new_empty(count, *values.shape[1:]) for count in counts]
    group.allgather([all_indices, all_values], [indices, values], gathering).wait()
    # coalesce() sums in the order of ranks, so all ranks get the same bits.
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices, dim=1),
        torch.cat(all_values),
        tensor.shape,
        check_invariants=False,
    ).coalesce()
    tensor.copy_(total)
