"""What happens to tensors before and after MPI has moved their bytes. Nothing is collective."""

from __future__ import annotations

import torch
import torch.distributed as dist


def write_back(dense: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy `dense` to `tensor` unless both are the same memory."""
    if dense.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(dense)


def bytes_of(dense: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    return dense.reshape(-1).view(torch.uint8)


def unpack(flat: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Copy bytes that lie one behind the other into tensors of any dtypes and strides."""
    counts = [part.numel() * part.element_size() for part in parts]
    with torch.no_grad():
        for part, piece in zip(parts, torch.split(flat, counts) if parts else (), strict=True):
            if part.numel():
                # Viewing bytes as a wider dtype needs them aligned: copy.
                part.copy_(piece.clone().view(part.dtype).view(part.shape))


def divide(total: torch.Tensor, divisor: int) -> None:
    """Divide in place; integers towards zero."""
    if total.dtype.is_floating_point or total.dtype.is_complex:
        total.div_(divisor)
    elif total.dtype.is_signed or total.dtype is torch.uint8:
        total.div_(divisor, rounding_mode="trunc")
    else:
        # torch has no division of the wider unsigned integers. The clone, because a tensor whose
        # memory numpy has seen cannot be resized any more.
        total.copy_(torch.from_numpy(total.clone().numpy() // divisor))


def multiply(contribution: torch.Tensor, op: dist.ReduceOp) -> None:
    """Multiply in place by the factor of a PREMUL_SUM."""
    factor = getattr(op, "factor", None)
    if factor is None:
        raise TypeError("ReduceOp.PREMUL_SUM needs a factor: ReduceOp.PREMUL_SUM(factor)")
    try:
        contribution.mul_(factor)
    except RuntimeError as error:
        raise TypeError(f"ReduceOp.PREMUL_SUM of {contribution.dtype}: {error}") from error
