"""What happens to tensors before and after MPI moves their bytes. Nothing is collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mpiddp.system.scaling import scale_of
from mpiddp.torch_internals.versions import factor_of


def dense(tensor: torch.Tensor, anywhere: bool = False) -> torch.Tensor:
    """Return `tensor` if MPI can use its memory as it is, else a contiguous copy.

    Args:
        tensor: any strides, conjugated or not.
        anywhere: allow a tensor on a GPU; a copy is made there.

    Raises:
        ValueError: it is not on the CPU.
        TypeError: its layout is not strided.
    """
    if not tensor.is_cpu and not anywhere:
        check_on_host([tensor])
    if tensor.layout is not torch.strided:
        raise TypeError(f"cannot move a tensor of layout {tensor.layout} over MPI")
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def check_on_host(tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError unless all tensors are on the CPU.

    If a call's first tensor is not, its tensors do not come here: see Note [Operations on copies].
    """
    for tensor in tensors:
        if not tensor.is_cpu:
            raise ValueError(
                f"a collective takes tensors that are all on one device, not on {tensor.device} "
                f"and on the CPU"
            )


def apart(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `source`, or a copy if it overlaps what MPI is to write (MPI-4.0, section 6.1).

    torch's callers may give a part of the output as the input, as NCCL allows: FSDP does.
    """
    begin = source.data_ptr()
    end = begin + source.numel() * source.element_size()
    for target in targets:
        first = target.data_ptr()
        if begin < first + target.numel() * target.element_size() and first < end:
            return source.clone()
    return source


def write_back(dense: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy `dense` to `tensor` unless both are the same memory."""
    if dense.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(dense)


def bytes_of(dense: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    # One element is contiguous with any stride, and torch views it as bytes only with stride 1.
    return dense.detach().as_strided((dense.numel(),), (1,)).view(torch.uint8)


def sizes_in_bytes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how many bytes the elements of each tensor take."""
    return [tensor.numel() * tensor.element_size() for tensor in tensors]


def room_for(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return memory for the bytes of `parts`, to be given to `unpack`.

    It is their own memory if they follow each other in one storage.
    """
    whole = as_one(parts)
    if whole is not None:
        return whole
    return torch.empty(sum(sizes_in_bytes(parts)), dtype=torch.uint8, device="cpu")


def unpack(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy the bytes in `flat`, part by part, into tensors of any dtypes and strides."""
    if not parts or flat.data_ptr() == parts[0].data_ptr():
        return
    with torch.no_grad():
        for part, piece in zip(parts, torch.split(flat, sizes_in_bytes(parts)), strict=True):
            if part.numel():
                # Viewing bytes as a wider dtype needs them aligned.
                if piece.storage_offset() % part.element_size():
                    piece = piece.clone()
                part.copy_(piece.view(part.dtype).view(part.shape))


def as_one(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return as bytes the memory of contiguous tensors that follow each other in one storage."""
    if not parts:
        return None
    first = parts[0]
    storage = first.untyped_storage()
    base, end = storage.data_ptr(), first.data_ptr()
    if not end:
        return None
    for part in parts:
        if (
            part.data_ptr() != end
            or dense(part) is not part
            or part.untyped_storage().data_ptr() != base
        ):
            return None
        end += part.numel() * part.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device="cpu")
    whole.set_(storage, first.data_ptr() - base, (end - first.data_ptr(),), (1,))
    return whole


def scale(contribution: torch.Tensor, ranks: int) -> None:
    """Multiply floats in place by ``scale_of(ranks)``."""
    if contribution.dtype.is_complex:
        # A complex factor's zero imaginary part would turn infinities into NaN.
        contribution = torch.view_as_real(contribution)
    contribution.mul_(scale_of(ranks))


def divide(total: torch.Tensor, divisor: float) -> None:
    """Divide in place; integers towards zero."""
    if total.dtype.is_floating_point:
        total.div_(divisor)
    elif total.dtype.is_complex:
        torch.view_as_real(total).div_(divisor)  # torch multiplies complex numbers by 1/divisor
    elif total.dtype.is_signed or total.dtype is torch.uint8:
        total.div_(divisor, rounding_mode="trunc")
    else:
        # torch cannot divide the wider unsigned integers. Cloned, because a tensor whose memory
        # numpy has seen can no longer be resized.
        total.copy_(torch.from_numpy(total.clone().numpy() // divisor))


def multiply(contribution: torch.Tensor, op: dist.ReduceOp) -> None:
    """Multiply in place by the factor of a PREMUL_SUM."""
    factor = factor_of(op)
    if factor is None:
        raise TypeError("ReduceOp.PREMUL_SUM needs a factor: ReduceOp.PREMUL_SUM(factor)")
    if isinstance(factor, torch.Tensor):
        factor = factor.to(contribution.device)
    try:
        contribution.mul_(factor)
    except RuntimeError as error:
        raise TypeError(f"ReduceOp.PREMUL_SUM of {contribution.dtype}: {error}") from error
