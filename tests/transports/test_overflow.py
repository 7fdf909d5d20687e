"""Means of numbers whose sum is out of range, on all transports; what is not finite stays so."""

import functools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from models import Given
from replicas import RANK, SIZE, gather, together
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP
from mpiddp.mpi import nodes

pytestmark = pytest.mark.mpi(min_size=2)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
]
# The node of each rank; None: as it is.
NODES = {
    "shared": None,
    "mpi": None,
    "one rank a node": [0, 1, 2, 3],
    "two and two": [0, 0, 1, 1],
    "one and three": [0, 1, 1, 1],
}


@pytest.fixture(params=NODES, ids=str)
def settings(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, object]]:
    """Return what makes a module's gradients travel in each of the ways that there are."""
    places = NODES[request.param]
    if places is None:
        yield {"transport": request.param}
        return
    place = places[RANK]
    monkeypatch.setattr(nodes, "ranks_of_node", lambda comm: comm.Split(place, RANK))
    group = dist.new_group()
    yield {"transport": "shared", "process_group": group}
    dist.destroy_process_group(group)


def averaged(gradient: torch.Tensor, wrap: "functools.partial[nn.Module]") -> torch.Tensor:
    """Return what becomes of a gradient, after a step with another one."""
    module = Given(gradient.numel(), gradient.dtype)
    wrapped = wrap(module)
    for given in (torch.ones_like(gradient), gradient):
        wrapped.zero_grad()
        # Of which autograd may make the gradient.
        wrapped().backward(given.clone())
    assert module.parameter.grad is not None
    return module.parameter.grad


def real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor


def on_ranks(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    """Return this rank's of some values for all ranks, which repeat."""
    value = torch.tensor(values[RANK % len(values)], dtype=torch.float64)
    return torch.complex(value, value / 4).to(dtype) if dtype.is_complex else value.to(dtype)


def gradients(dtype: torch.dtype, elements: int) -> torch.Tensor:
    """Return a gradient of this rank, with numbers of all kinds and places."""
    largest = torch.finfo(dtype).max
    smallest = torch.finfo(dtype).smallest_normal
    generator = torch.Generator().manual_seed(RANK)
    gradient = torch.randn(elements, dtype=torch.float64, generator=generator).to(dtype)
    kinds = [
        [largest],
        [-largest],
        [largest / 2, largest],
        [largest, largest, -largest, -largest],
        [largest, -largest],
        [smallest / 4],
        [1.0, largest],
    ]
    for place in (0, elements // 2, elements - len(kinds)):
        for offset, values in enumerate(kinds):
            gradient[place + offset] = on_ranks(values, dtype)
    return gradient


@pytest.mark.essential(keep=2)
@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [50, 300_001])
def test_means_of_large_numbers(
    settings: dict[str, object],
    gloo: dist.ProcessGroup,
    views: bool,
    dtype: torch.dtype,
    elements: int,
) -> None:
    gradient = gradients(dtype, elements)
    ours = averaged(gradient, functools.partial(DDP, gradient_as_bucket_view=views, **settings))
    theirs = averaged(gradient, functools.partial(TorchDDP, process_group=gloo))
    given = [part.double() for part in gather(real(gradient))]
    results = gather(real(ours))
    with together():
        assert all(torch.equal(each, real(ours)) for each in results)
        assert ours.isfinite().all()
        # torch divides in 16 bits, before it adds: three thirds of the largest may be too much.
        info = torch.finfo(dtype)
        rounding = 2 * info.eps * torch.stack(given).abs().amax(0) / 4
        rounding += SIZE * info.smallest_normal * info.eps
        difference = (real(ours).double() / 4 - real(theirs).double() / 4).abs()
        assert (difference <= rounding)[real(theirs).isfinite()].all()
        # Where the sum is in range, the mean is that sum divided, to the bit.
        wide = torch.float32 if info.bits < 64 else torch.float64
        total = given[0].to(wide) + given[1].to(wide)
        exact = (total / 2).to(real(ours).dtype)
        kept = total.isfinite() & (SIZE == 2)
        assert torch.equal(real(ours)[kept], exact[kept])


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_subnormal_numbers_keep_their_digits(
    settings: dict[str, object], dtype: torch.dtype
) -> None:
    """Numbers of which an Nth is no number any more, beside some whose sum overflows."""
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps
    gradient = torch.full((4000,), tiny, dtype=torch.float64).to(dtype)
    gradient[1] = on_ranks([info.max], dtype)
    ours = averaged(gradient, functools.partial(DDP, **settings))
    with together():
        assert ours[1].abs().item() > info.max / 2
        assert ours[1].isfinite()
        ours[1] = gradient[1] = 0
        assert torch.equal(ours, gradient)


@pytest.mark.thorough(keep=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_arrives(settings: dict[str, object], dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    gradient = torch.ones(200_000, dtype=dtype)
    last = RANK == SIZE - 1
    for place in (3, 150_000):
        gradient[place] = torch.inf if last else -largest
        gradient[place + 1] = -torch.inf if last else largest
        gradient[place + 2] = torch.nan if last else largest
        gradient[place + 3] = torch.inf if last else -torch.inf
    ours = averaged(gradient, functools.partial(DDP, **settings)).real
    with together():
        for place in (3, 150_000):
            assert ours[place].item() == torch.inf
            assert ours[place + 1].item() == -torch.inf
            assert ours[place + 2 : place + 4].isnan().all()
        assert ours.isfinite().sum() == 200_000 - 8
        assert ours[ours.isfinite()].unique().tolist() == [1]


@pytest.mark.thorough(keep=1)
def test_many_chunks_overflow(settings: dict[str, object]) -> None:
    """In some buckets and not in others, with ranks that come late to some."""
    import time

    sizes = [700_001, 30_000, 10, 400_000, 900_000]
    module = nn.ParameterList([torch.zeros(size) for size in sizes])

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given = module

        def forward(self, factors: list[torch.Tensor]) -> torch.Tensor:
            total = torch.zeros(())
            for parameter, factor in zip(self.given, factors, strict=True):
                total = total + (parameter * factor).sum()
            return total

    wrapped = DDP(Sum(), bucket_cap_mb=0.5, **settings)  # type: ignore[arg-type]
    for step in range(6):
        factors = []
        for index, size in enumerate(sizes):
            factor = torch.full((size,), float(index + 1))
            # Each second chunk or so.
            if (index + step) % 3:
                factor.view(-1)[step::170_000] = 3e38
            factors.append(factor)
        wrapped.zero_grad()
        loss = wrapped(factors)
        if step % SIZE == RANK:
            time.sleep(0.02)
        loss.backward()
        with together():
            for parameter, factor in zip(module, factors, strict=True):
                torch.testing.assert_close(parameter.grad, factor)


# torch has new names for two of these operations.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [4, 200_000])
def test_averages_of_the_process_group(dtype: torch.dtype, elements: int) -> None:
    largest = torch.finfo(dtype).max

    def given(count: int) -> torch.Tensor:
        tensor = torch.full((count,), largest, dtype=dtype)
        tensor[1::4] = on_ranks([largest, -largest], dtype)
        tensor[2::4] = torch.inf if RANK == 0 else largest
        return tensor

    def check(average: torch.Tensor) -> None:
        with together():
            parts = real(average).flatten()[:: 2 if dtype.is_complex else 1]
            assert torch.all(parts[::4] == largest)
            assert parts[1::4].isfinite().all()
            assert torch.all(parts[2::4] == torch.inf)

    average = given(elements)
    dist.all_reduce(average, dist.ReduceOp.AVG)
    check(average)
    several = [given(elements), given(elements)]
    dist.all_reduce_coalesced(several, dist.ReduceOp.AVG)
    for average in several:
        check(average)
    average = given(elements)
    dist.reduce(average, 0, dist.ReduceOp.AVG)
    dist.broadcast(average, 0)
    check(average)
    average = torch.empty(elements, dtype=dtype)
    dist.reduce_scatter_tensor(average, given(elements * SIZE), dist.ReduceOp.AVG)
    check(average)


def test_sparse_gradients() -> None:
    module = nn.Embedding(5, 3, sparse=True)
    wrapped = DDP(module)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.tensor([1, 2])).backward(torch.full((2, 3), 3e38))
    with together():
        assert module.weight.grad is not None
        assert module.weight.grad.is_sparse
        values = module.weight.grad.coalesce().values()
        torch.testing.assert_close(values, torch.full((2, 3), 3e38))
