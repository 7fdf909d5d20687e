"""What modes and tensor subclasses of torch see of the operations: what they see of Gloo's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_versions
from group_data import rank, size
from torch.distributed import _functional_collectives as functional
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(100)]


class Seen(TorchDispatchMode):
    """Notes the operators of torch.distributed, and what they are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            words = [_in_words(each) for each in args]
            self.calls.append((str(func), func._schema.name, *words))
        return func(*args, **(kwargs or {}))


def _in_words(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return [_in_words(each) for each in value]
    return value if isinstance(value, (bool, int, type(None))) else "object"


def calls(part: Any) -> list[Callable[[], Any]]:
    n, me, ones = size(), rank(), torch.ones
    parts = [ones(2) for _ in range(n)]
    return [
        lambda: dist.all_reduce(ones(3), group=part),
        lambda: dist.all_reduce(ones(3), group=part, async_op=True).wait(),
        lambda: dist.broadcast(ones(3), 0, group=part),
        lambda: dist.reduce(ones(3), 0, group=part),
        lambda: dist.all_gather(parts, ones(2), group=part),
        lambda: torch_versions.all_gather_single(ones(2 * n), ones(2), group=part),
        lambda: dist.gather(ones(2), parts if me == 0 else None, group=part),
        lambda: dist.scatter(ones(2), parts if me == 0 else None, group=part),
        lambda: torch_versions.reduce_scatter_single(ones(2), ones(2 * n), group=part),
        lambda: dist.all_to_all_single(ones(n), ones(n), group=part),
        lambda: dist.barrier(part),
        lambda: _ring(part),
    ]


def _ring(part: Any) -> None:
    sent = dist.isend(torch.ones(2), (rank() + 1) % size(), part)
    dist.recv(torch.ones(2), (rank() - 1) % size(), part)
    assert sent is not None
    sent.wait()


@pytest.mark.essential
@pytest.mark.mpi(min_size=2)
def test_a_mode_sees_what_it_sees_of_gloo(gloo: dist.ProcessGroup) -> None:
    for ours, theirs in zip(calls(dist.group.WORLD), calls(gloo), strict=True):
        with Seen() as here:
            ours()
        with Seen() as there:
            theirs()
        assert here.calls == there.calls


def test_all_modes_see_it_and_it_runs_once() -> None:
    tensor = torch.ones(3)
    with Seen() as outer, Seen() as inner:
        dist.all_reduce(tensor)
    assert [call[0] for call in outer.calls] == ["c10d.allreduce_.default"]
    assert inner.calls == outer.calls
    assert tensor.tolist() == [size()] * 3


@pytest.mark.essential
def test_comm_debug_mode_counts() -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as mode:
        dist.all_reduce(torch.ones(3))
        dist.all_gather([torch.ones(3) for _ in range(size())], torch.ones(3))
    counts = mode.get_comm_counts()
    assert counts[torch.ops.c10d.allreduce_] == 1
    assert counts[torch.ops.c10d.allgather_] == 1
    assert mode.get_total_counts() == 2


def test_operators_compare_as_torchs_do() -> None:
    class Compares(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            known = {torch.ops.c10d.allreduce_.default: "known"}
            found.append((known.get(func), func == torch.ops.c10d.broadcast_.default))
            return func(*args, **(kwargs or {}))

    found: list[Any] = []
    tensor = torch.ones(3)
    with Compares():
        dist.all_reduce(tensor)
    assert found == [("known", False)]


@pytest.mark.essential
def test_a_dtensor_is_refused_as_by_gloo(gloo: dist.ProcessGroup) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = dist.device_mesh.init_device_mesh("cpu", (size(),))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    for part in (gloo, dist.group.WORLD):
        with pytest.raises((NotImplementedError, RuntimeError), match=r"sharding strategy"):
            dist.all_reduce(tensor, group=part)
    total = torch.ones(1)
    dist.all_reduce(total)  # nothing is broken
    assert total.item() == size()


def test_a_tensor_that_is_waited_for() -> None:
    """A subclass that hands on the tensor within."""
    later = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert type(later) is functional.AsyncCollectiveTensor
    dist.all_reduce(later)
    assert later.tolist() == [size() ** 2] * 3
