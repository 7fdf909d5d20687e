"""Send Python objects: broadcast_object and allgather_object."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from mpiddp.horovod.movement import allgather, broadcast_
from mpiddp.horovod.process_sets import ProcessSet, global_process_set, table

__all__ = ["allgather_object", "broadcast_object"]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of one rank; that rank gets its own one back.

    Collective over the process set.

    Args:
        obj: picklable; by cloudpickle where that is installed and pickle cannot. Only that of
            `root_rank` counts.
        root_rank: as `hvd.rank` counts.
        name: see `mpiddp.horovod.movement`.
        process_set: whose ranks take part.

    Raises:
        HorovodInternalError: see `mpiddp.horovod.movement.broadcast`.
    """
    names = [None, None] if name is None else [f"{name}.sz", f"{name}.t"]
    root = table().rank == root_rank
    data = _packed(obj) if root else torch.empty(0, dtype=torch.uint8, device="cpu")
    count = broadcast_(torch.tensor([data.numel()], device="cpu"), root_rank, names[0], process_set)
    if not root:
        data = torch.empty(int(count), dtype=torch.uint8, device="cpu")
    broadcast_(data, root_rank, names[1], process_set)
    return obj if root else _unpacked(data)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, by rank. Collective.

    Args:
        obj: picklable; by cloudpickle where that is installed and pickle cannot.
        name: see `mpiddp.horovod.movement`.
    """
    data = _packed(obj)
    names = [None, None] if name is None else [f"{name}.sz", f"{name}.t"]
    counts = allgather(torch.tensor([data.numel()], device="cpu"), names[0]).tolist()
    return [_unpacked(part) for part in torch.split(allgather(data, names[1]), counts)]


def _packed(obj: Any) -> torch.Tensor:
    try:
        content = pickle.dumps(obj)
    except (pickle.PicklingError, AttributeError, TypeError):
        try:
            import cloudpickle  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError:
            cloudpickle = None
        if cloudpickle is None:
            raise
        content = cloudpickle.dumps(obj)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())  # noqa: S301  # of a rank of this job
