"""The process group's collectives that only move data: broadcast, gather, scatter, all_to_all.

Everything travels as bytes, whatever its dtype. All are operations as Note [An operation is a
generator] describes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from mpiddp.collectives import packing, point_to_point
from mpiddp.collectives.packing import apart, room_for, sizes_in_bytes, unpack
from mpiddp.mpi import datatypes

if TYPE_CHECKING:
    from mpiddp.collectives.operation import Group, Operation
    from mpiddp.engine.requests import Pending

Lists = Sequence[Sequence[torch.Tensor]]


def broadcast(group: Group, tensors: Sequence[torch.Tensor], root: int) -> Operation:
    """Copy each tensor from one rank to all. Collective."""
    sent = [packing.dense(tensor) for tensor in tensors]
    yield [
        group.pending(
            group.communicator.Ibcast(datatypes.buffer_of(piece), root=root), "MPI_Ibcast", piece
        )
        for tensor in sent
        for piece in point_to_point.byte_pieces(tensor)
    ]
    for dense, tensor in zip(sent, tensors, strict=True):
        packing.write_back(dense, tensor)
    return list(tensors)


def all_gather(group: Group, outputs: Lists, inputs: Sequence[torch.Tensor]) -> Operation:
    """Gather each input from all ranks into a list. Collective.

    Sizes may differ over ranks. If an input has the same shape on all ranks, its result is one
    stacked tensor, as with NCCL: torch's quantization hooks index it by rank.

    Raises:
        ValueError: a list does not have one tensor per rank, or this rank's size or dtype differs.
    """
    pending: list[Pending] = []
    gathered = []
    for output, tensor in zip(outputs, inputs, strict=True):
        check_gathered(group, output, tensor)
        source = packing.dense(tensor)
        waited, flat = _iallgather_list(group, source, output)
        gathered.append(flat)
        pending += waited
    yield pending
    for output, flat in zip(outputs, gathered, strict=True):
        if flat is not None:
            unpack(flat, output)
    return stacked(outputs)


def all_gather_single(
    group: Group, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Operation:
    """Gather equal inputs from all ranks, each into one output. Collective.

    Raises:
        ValueError: an output's size is not that of all inputs together, or its dtype differs.
    """
    pending: list[Pending] = []
    targets = []
    for output, tensor in zip(outputs, inputs, strict=True):
        check_gathered_single(group, output, tensor)
        target = packing.dense(output)
        source = apart(packing.dense(tensor), [target])
        targets.append(target)
        size = tensor.numel() * tensor.element_size()
        pending += _iallgather(group, source, target, [size] * group.size())
    yield pending
    for target, output in zip(targets, outputs, strict=True):
        packing.write_back(target, output)
    return list(outputs)


def gather(group: Group, outputs: Lists, inputs: Sequence[torch.Tensor], root: int) -> Operation:
    """Gather each input from all ranks into a list on one rank. Collective. Sizes may differ.

    Raises:
        ValueError: the list on `root` does not have one tensor per rank.
    """
    nothing = [None] * group.size()
    pending: list[Pending] = []
    received: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index, tensor in enumerate(inputs):
        source = packing.dense(tensor)
        outgoing: list[torch.Tensor | None] = [*nothing]
        outgoing[root] = source
        incoming: Sequence[torch.Tensor | None] = nothing
        if group.rank() == root:
            check_number(group, "gather", "output", outputs[index])
            targets = [packing.dense(part) for part in outputs[index]]
            received += zip(targets, outputs[index], strict=True)
            incoming = targets
        pending += point_to_point.exchange(group, outgoing, incoming)
    yield pending
    point_to_point.check_sizes(group, "gather", pending)
    for target, part in received:
        packing.write_back(target, part)
    return list(outputs)


def gather_single(group: Group, output: torch.Tensor, tensor: torch.Tensor, root: int) -> Operation:
    """Gather equal inputs from all ranks into one output on one rank. Collective.

    Raises:
        ValueError: the output's size on `root` is not that of all inputs together, or its dtype
            differs.
    """
    if group.rank() != root:
        yield from gather(group, [], [tensor], root)
        return [output]
    if output.numel() != tensor.numel() * group.size() or output.dtype != tensor.dtype:
        raise ValueError(
            f"gather of {tensor.numel()} elements of {tensor.dtype} over {group.size()} ranks "
            f"needs an output of {tensor.numel() * group.size()} such elements, not "
            f"{output.numel()} of {output.dtype}"
        )
    target = packing.dense(output)
    parts = list(torch.split(target.view(-1), max(tensor.numel(), 1)))
    parts += [target.new_empty(0)] * (group.size() - len(parts))
    yield from gather(group, [parts], [apart(packing.dense(tensor), [target])], root)
    packing.write_back(target, output)
    return [output]


def scatter(group: Group, outputs: Sequence[torch.Tensor], inputs: Lists, root: int) -> Operation:
    """Give each rank its tensor from a list on one rank. Collective. Sizes may differ.

    Raises:
        ValueError: the list on `root` does not have one tensor per rank.
    """
    nothing = [None] * group.size()
    pending: list[Pending] = []
    targets = [packing.dense(tensor) for tensor in outputs]
    for index, target in enumerate(targets):
        incoming: list[torch.Tensor | None] = [*nothing]
        incoming[root] = target
        outgoing: Sequence[torch.Tensor | None] = nothing
        if group.rank() == root:
            check_number(group, "scatter", "input", inputs[index])
            sources = [packing.dense(part) for part in inputs[index]]
            in_place = sources[root].data_ptr() == target.data_ptr()
            outgoing = [
                source if to == root and in_place else apart(source, targets)
                for to, source in enumerate(sources)
            ]
        pending += point_to_point.exchange(group, outgoing, incoming, root)
    yield pending
    point_to_point.check_sizes(group, "scatter", pending)
    for target, tensor in zip(targets, outputs, strict=True):
        packing.write_back(target, tensor)
    return list(outputs)


def all_to_all(
    group: Group, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Operation:
    """Send each rank its tensor of a list, receive one from each. Collective.

    Raises:
        ValueError: a list does not have one tensor per rank.
    """
    check_number(group, "all_to_all", "output", outputs)
    check_number(group, "all_to_all", "input", inputs)
    targets = [packing.dense(part) for part in outputs]
    # Compared by storage: comparing all pairs takes long with many ranks.
    written = {target.untyped_storage().data_ptr() for target in targets}
    sources = [packing.dense(part) for part in inputs]
    sources = [s.clone() if s.untyped_storage().data_ptr() in written else s for s in sources]
    pending = point_to_point.exchange(group, sources, targets)
    yield pending
    point_to_point.check_sizes(group, "all_to_all", pending)
    for target, part in zip(targets, outputs, strict=True):
        packing.write_back(target, part)
    return list(outputs)


def all_to_all_single(
    group: Group,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> Operation:
    """Send parts of a tensor to the ranks, receive one from each. Collective.

    Args:
        group: the process group.
        output: receives the parts by rank, along its first dimension.
        tensor: is cut along its first dimension.
        output_splits: rows from each rank; empty: all equal.
        input_splits: rows for each rank; empty: all equal.

    Raises:
        RuntimeError: the rows cannot be cut like that (torch raises this type).
        TypeError: the dtypes differ.
    """
    sizes_out, sizes_in = check_exchanged(group, output, tensor, output_splits, input_splits)
    target = packing.dense(output)
    source = apart(packing.dense(tensor), [target])
    if not input_splits and not output_splits and not _too_large(source):
        request = group.communicator.Ialltoall(
            datatypes.buffer_of(source)[0], datatypes.buffer_of(target)[0]
        )
        yield group.pending(request, "MPI_Ialltoall", source, target)
    else:
        # Sizes may differ between ranks, but all must choose the same way.
        pending = point_to_point.exchange(group, _cut(source, sizes_out), _cut(target, sizes_in))
        yield pending
        point_to_point.check_sizes(group, "all_to_all", pending)
    packing.write_back(target, output)
    return [output]


def barrier(group: Group) -> Operation:
    """Wait until all ranks are here. Collective."""
    yield group.pending(group.communicator.Ibarrier(), "MPI_Ibarrier")
    return []


def check_number(group: Group, name: str, what: str, tensors: Sequence[object]) -> None:
    """Raise ValueError unless there is one tensor per rank. Not collective."""
    if len(tensors) != group.size():
        raise ValueError(
            f"{name} needs {group.size()} {what} tensors, one a rank, not {len(tensors)}"
        )


def check_gathered(group: Group, output: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    """Raise ValueError unless this rank's list for an all_gather is right. Not collective."""
    check_number(group, "all_gather", "output", output)
    own = output[group.rank()]
    if own.dtype != tensor.dtype or own.numel() != tensor.numel():
        raise ValueError(
            f"all_gather of {tensor.numel()} elements of {tensor.dtype} needs an output of "
            f"that size and dtype for rank {group.me}, not {own.numel()} of {own.dtype}"
        )


def check_gathered_single(group: Group, output: torch.Tensor, tensor: torch.Tensor) -> None:
    """Raise ValueError unless this rank's output of an all_gather is right. Not collective."""
    if output.numel() != tensor.numel() * group.size():
        raise ValueError(
            f"all_gather of {tensor.numel()} elements over {group.size()} ranks needs an "
            f"output of {tensor.numel() * group.size()} elements, not {output.numel()}"
        )
    if output.dtype != tensor.dtype:
        raise ValueError(f"all_gather of {tensor.dtype} into an output of {output.dtype}")


def check_exchanged(
    group: Group,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int] = (),
    input_splits: Sequence[int] = (),
) -> tuple[list[int], list[int]]:
    """Return the bytes for each rank, and from each, or raise if tensors cannot be cut so.

    Not collective.
    """
    if output.dtype != tensor.dtype:
        raise TypeError(f"all_to_all of {tensor.dtype} into an output of {output.dtype}")
    return (
        _split_sizes(group, "input", tensor, input_splits),
        _split_sizes(group, "output", output, output_splits),
    )


def stacked(outputs: Lists) -> Callable[[], list[Any]]:
    """Return the result of an all_gather, made when it is asked for: one tensor per input."""
    return lambda: [_one_of_all_ranks(parts) for parts in outputs]


def _one_of_all_ranks(parts: Sequence[torch.Tensor]) -> Any:
    alike = all(p.shape == parts[0].shape and p.dtype == parts[0].dtype for p in parts)
    return torch.stack(list(parts)) if alike else list(parts)


def _split_sizes(group: Group, what: str, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
    """Return the bytes of each rank's rows."""
    rows = tensor.size(0) if tensor.dim() else 1
    if not splits:
        if rows % group.size():
            raise RuntimeError(
                f"all_to_all cannot divide {rows} rows of the {what} over {group.size()} ranks; "
                f"give split sizes"
            )
        splits = [rows // group.size()] * group.size()
    if len(splits) != group.size() or sum(splits) != rows or min(splits) < 0:
        raise RuntimeError(
            f"the {what} split sizes of all_to_all must be {group.size()} numbers that add up to "
            f"its {rows} rows, not {list(splits)}"
        )
    row = tensor.numel() // rows * tensor.element_size() if rows else 0
    return [row * count for count in splits]


def _spec(flat: torch.Tensor, sizes: list[int]) -> list[Any]:
    """Return memory for one part per rank, as mpi4py takes it."""
    return [datatypes.buffer_of(flat)[0], sizes, None, MPI.BYTE]


def _too_large(flat: torch.Tensor) -> bool:
    return flat.numel() * flat.element_size() > point_to_point.LARGEST_COUNT


def _cut(flat: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(torch.split(packing.bytes_of(flat), sizes))


def _iallgather(
    group: Group, source: torch.Tensor, target: torch.Tensor, sizes: list[int]
) -> list[Pending]:
    if _too_large(target):
        return point_to_point.exchange(group, [source] * group.size(), _cut(target, sizes))
    buffer = datatypes.buffer_of(source)
    if len(set(sizes)) == 1:
        request = group.communicator.Iallgather(buffer, datatypes.buffer_of(target)[0])
        return [group.pending(request, "MPI_Iallgather", source, target)]
    request = group.communicator.Iallgatherv(buffer, _spec(target, sizes))
    return [group.pending(request, "MPI_Iallgatherv", source, target)]


def _iallgather_list(
    group: Group, source: torch.Tensor, output: Sequence[torch.Tensor]
) -> tuple[list[Pending], torch.Tensor | None]:
    """Gather into a list of tensors; the second result is memory that must be unpacked, if any.

    A copy of all parts would take as long as their transfer. So MPI gets the lowest address, and
    writes each part at its displacement from there, if MPI can express all displacements.
    """
    sizes = sizes_in_bytes(output)
    if sum(sizes) > point_to_point.LARGEST_COUNT:
        flat = room_for(output)
        return _iallgather(group, source, flat, sizes), flat
    target: torch.Tensor | None = None
    addresses = [part.data_ptr() for part, size in zip(output, sizes, strict=True) if size]
    base, end = min(addresses, default=0), max(addresses, default=0)
    if end - base <= point_to_point.LARGEST_COUNT and all(
        packing.dense(part) is part for part in output
    ):
        # A part without elements has no address.
        places = [max(part.data_ptr() - base, 0) for part in output]
        span = end - base + max(sizes, default=0)
        spec = [MPI.buffer.fromaddress(base, span), sizes, places, MPI.BYTE]
        source = apart(source, output)
    else:
        target = room_for(output)
        spec = _spec(target, sizes)
    request = group.communicator.Iallgatherv(datatypes.buffer_of(source), spec)
    return [group.pending(request, "MPI_Iallgatherv", source, target, output)], target
