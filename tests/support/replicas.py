"""What tests of replicas need: verdicts of all ranks, equal bits, results of one process.

Ranks talk over mpi4py's own communicator here, not over what is tested. mpi4py is imported only
where it is used: a process without mpirun that collects the tests must not initialise MPI.
"""

import copy
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import pytest
import torch
import torch.distributed as dist
from models import loss_of, mlp
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP

if TYPE_CHECKING:
    from hypothesis import settings


def _place_in_world() -> tuple[int, int]:
    if "OMPI_COMM_WORLD_SIZE" not in os.environ and "PMI_SIZE" not in os.environ:
        return 0, 1
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()


RANK, SIZE = _place_in_world()

Value = TypeVar("Value")
Gradients = dict[str, Tensor | None]

# Steps after which all has happened that can: buckets are built, used, rebuilt and used again.
STEPS = 3

# What rounding may make of a sum in another order.
_TOLERANCES = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
    torch.int64: 0,
}


def gather(value: Value) -> list[Value]:
    """Return `value` of every rank, by rank. Collective."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.allgather(value)


@contextmanager
def together() -> Iterator[None]:
    """Fail on all ranks if the body fails on any. Collective.

    A rank that fails alone leaves the others waiting, and draws other examples than they do.
    """
    failure: BaseException | None = None
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:  # the latter: nothing was raised
        failure = error
    verdicts = gather(failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(verdicts) if text]
    assert not failed, "\n".join(failed)


def drawn_together(examples: int) -> "settings":
    """Return settings with which hypothesis draws the same examples on all ranks.

    No shrinking: an example that hangs until a time limit would be tried hundreds of times.
    """
    from hypothesis import HealthCheck, Phase, settings  # takes a second, and few need it

    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


def bits(tensor: Tensor | None) -> str:
    """Return a digest of dtype, shape and exact bits of a tensor."""
    if tensor is None:
        return "None"
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return bits(tensor.indices()) + bits(tensor.values())
    dense = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj()
    content = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{dense.dtype} {tuple(dense.shape)} {hashlib.sha256(content).hexdigest()}"


def all_bits(tensors: Iterable[tuple[str, Tensor | None]]) -> dict[str, str]:
    """Return the digest of each tensor by its name."""
    return {name: bits(tensor) for name, tensor in tensors}


def assert_same_bits(tensors: Iterable[tuple[str, Tensor | None]]) -> None:
    """Assert that all ranks hold the same bits. Collective, with one verdict on all ranks."""
    everyone = gather(all_bits(tensors))
    for rank, own in enumerate(everyone):
        differing = [name for name in everyone[0] if own.get(name) != everyone[0][name]]
        assert not differing, f"rank {rank} has other bits than rank 0 in {differing}"
        assert own.keys() == everyone[0].keys()


def gradients_of(module: nn.Module) -> Gradients:
    """Return the gradients of the bare module by parameter name."""
    bare = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    return {name: parameter.grad for name, parameter in bare.named_parameters()}


def assert_replicated(module: nn.Module) -> None:
    """Assert that all ranks have the same bits of parameters and gradients. Collective."""
    parameters = [(f"parameter {name}", p) for name, p in module.named_parameters()]
    gradients = [(f"gradient {name}", p.grad) for name, p in module.named_parameters()]
    assert_same_bits([*parameters, *gradients])


def assert_close(
    actual: Tensor, expected: Tensor, name: str, factor: float = 1, rounding: float = 0
) -> None:
    """Assert equality up to rounding, relative to the largest element.

    Args:
        actual: what was computed.
        expected: what it should be.
        name: what to call it.
        factor: how many times the tolerance of the dtype to allow.
        rounding: what to allow at least.
    """
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: {actual.shape}, not {expected.shape}"
    assert actual.layout == expected.layout, f"{name}: {actual.layout}, not {expected.layout}"
    if actual.layout is torch.sparse_coo:
        actual, expected = actual.to_dense(), expected.to_dense()
    if actual.numel() == 0:
        return
    wide = torch.complex128 if actual.is_complex() else torch.float64
    a, b = actual.detach().to(wide), expected.detach().to(wide)
    error, scale = float((a - b).abs().max()), float(b.abs().max())
    tolerance = max(factor * _TOLERANCES[actual.dtype], rounding)
    assert error <= tolerance * max(scale, 1e-3), f"{name}: off by {error:g} of {scale:g}"


def assert_gradients_close(
    actual: Gradients, expected: Gradients, factor: float = 1, rounding: float = 0
) -> None:
    """Assert the same gradients up to rounding, None where None is expected; see assert_close."""
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        truth = expected[name]
        if truth is None or gradient is None:
            assert truth is gradient, f"{name}: {gradient}, not {truth}"
        else:
            assert_close(gradient, truth, f"gradient of {name}", factor, rounding)


def share(batch: Tensor, rank: int = RANK) -> Tensor:
    """Return a rank's part of a batch that divides evenly."""
    assert batch.shape[0] % SIZE == 0
    return batch.chunk(SIZE)[rank]


def batch_of(rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw `rows` rows for each rank; return the whole batch, the same on all ranks."""
    return torch.randn(rows * SIZE, *shape, dtype=dtype)


def call_behind_wrapper(parameter: nn.Parameter, call: Callable[[Tensor], object]) -> object:
    """Run `call` after the wrapper has seen a gradient; the caller keeps what this returns.

    Hooks of the parameter itself run before.
    """
    graph = parameter.expand_as(parameter).grad_fn
    assert graph is not None
    node = graph.next_functions[0][0]
    assert node is not None
    node.register_hook(lambda *_: call(parameter))
    return node


def lies_in_buckets(wrapped: DDP, tensor: Tensor) -> bool:
    """Return whether a tensor's memory is that of a bucket."""
    buffers = [bucket.buffer for bucket in wrapped.reducer.buckets if not bucket.sparse]
    return any(
        buffer.data_ptr() <= tensor.data_ptr() < buffer.data_ptr() + buffer.nbytes
        for buffer in buffers
        if buffer is not None
    )


def mean_of_ranks(module: nn.Module, loss_of_rank: Callable[[nn.Module, int], Tensor]) -> Gradients:
    """Compute in one process what the ranks should get: the mean of their losses' gradients.

    float16 and bfloat16 are added and divided in float32, and rounded once; a rank without a
    gradient counts as zero. None where no rank has a gradient.

    Args:
        module: the bare module; it is copied.
        loss_of_rank: called with a copy of the module and each rank.
    """
    plain = copy.deepcopy(module)
    for copied, original in zip(plain.parameters(), module.parameters(), strict=True):
        # A slice becomes contiguous when it is copied, and then torch rounds products otherwise.
        if copied.stride() != original.stride():
            copied.data = torch.empty_strided(
                original.size(), original.stride(), dtype=original.dtype, device=original.device
            ).copy_(original.detach())
    totals: Gradients = {name: None for name, _ in plain.named_parameters()}
    for rank in range(SIZE):
        plain.zero_grad()
        loss_of_rank(plain, rank).backward()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                wide = parameter.grad.to(wide_dtype(parameter.dtype))
                total = totals[name]
                totals[name] = wide.clone() if total is None else total + wide
    return {
        name: None if total is None else (total / SIZE).to(plain.get_parameter(name).dtype)
        for name, total in totals.items()
    }


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that gradients of `dtype` are added in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def train_and_compare(
    module: nn.Module,
    loss_of_rank: Callable[[nn.Module, int], Tensor],
    options: Mapping[str, object],
    zero_in_place: bool = True,
) -> DDP:
    """Take gradient steps and compare each gradient with what one process gets. Collective.

    Args:
        module: the bare module.
        loss_of_rank: called with the wrapped module and this rank, or with a copy and any rank.
        options: arguments for DistributedDataParallel.
        zero_in_place: whether every second step zeroes the gradients instead of dropping them.

    Returns:
        The wrapped module.
    """
    wrapped = DDP(module, **options)
    for step in range(STEPS):
        expected = mean_of_ranks(module, loss_of_rank)
        wrapped.zero_grad(set_to_none=not zero_in_place or step % 2 == 0)
        loss_of_rank(wrapped, RANK).backward()
        with together():
            assert_gradients_close(gradients_of(wrapped), expected)
        assert_replicated(wrapped)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.01)
    return wrapped


def mean_by_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average into a new tensor: a hook in Python."""
    total = bucket.buffer() / SIZE
    dist.all_reduce(total)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(total)
    return future


def trained_with_adam() -> tuple[DDP, torch.optim.Optimizer]:
    """Return a small wrapped model and its optimizer after two steps. Collective."""
    wrapped = DDP(mlp(3, 4, 2))
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(wrapped, torch.randn(2, 3, dtype=torch.float64) + RANK).backward()
        optimizer.step()
    return wrapped, optimizer
