"""The engine's arithmetic, bit for bit: 16-bit floats widened and rounded, sums divided.

Gradients are given to the engine as they are: a parameter whose backward passes its
gradient on, in a wrapped module.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from models import Given

from mpiddp import DistributedDataParallel as DDP

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

HALVES = [torch.float16, torch.bfloat16]
FLOATS = [torch.float32, torch.float64]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def averaged(contribution: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Return what the engine makes of every rank's contribution."""
    import torch.distributed as dist

    gradient = contribution(dist.get_rank()).clone()  # .grad may become this very tensor
    module = Given(gradient.numel(), gradient.dtype)
    wrapped = DDP(module)  # averages as long as it lives
    wrapped().backward(gradient)
    assert module.parameter.grad is not None
    return module.parameter.grad


def mean(contribution: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Return the mean as it must be, with numpy's float32 and one rounding at the end.

    The contributions are such that the order of the sum does not count.
    """
    import torch.distributed as dist

    size = dist.get_world_size()
    dtype = contribution(0).dtype
    wide = np.float64 if dtype is torch.float64 else np.float32
    total = np.zeros(contribution(0).numel(), dtype=wide)
    exact = np.zeros(total.size)
    with np.errstate(all="ignore"):
        for rank in range(size):
            part = contribution(rank).to(torch.float64).numpy()
            total = total + part.astype(wide) if rank else part.astype(wide)
            exact = exact + part
        if wide is np.float32:
            # Where only the sum is out of range, the mean is a number.
            mean_alone = (exact / size).astype(wide)
            overflowed = ~np.isfinite(total) & np.isfinite(exact)
            return round_once(np.where(overflowed, mean_alone, total / wide(size)), dtype)
        # In a world of one there is nothing to add, and minus zero stays what it is.
        return round_once(total / wide(size), dtype)


def round_once(values: npt.NDArray[np.floating], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.float16:
        return torch.from_numpy(values.astype(np.float16))
    if dtype is torch.bfloat16:
        return torch.from_numpy(nearest_bfloat16(values.astype(np.float32))).view(dtype)
    return torch.from_numpy(values)


def nearest_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    """Return the bits of the nearest bfloat16, of the even one of two that are as near."""
    bits = values.view(np.uint32)
    below = (bits >> 16).astype(np.uint16)  # towards zero
    magnitude = below & np.uint16(0x7FFF)
    above = np.where(magnitude < 0x7F80, below + np.uint16(1), below)

    def exact(half: npt.NDArray[np.uint16]) -> npt.NDArray[np.float64]:
        wide = (half.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        # What comes after the largest number counts as 2^128 for rounding.
        return np.where(np.isinf(wide), np.copysign(2.0**128, wide), wide)

    numbers = values.astype(np.float64)
    to_below, to_above = abs(numbers - exact(below)), abs(exact(above) - numbers)
    up = (to_above < to_below) | ((to_above == to_below) & (below % 2 == 1))
    rounded = np.where(up & np.isfinite(values), above, below)
    nan = (below & np.uint16(0x8000)) | np.uint16(0x7FC0)
    return np.where(np.isnan(values), nan, rounded).astype(np.uint16).view(np.int16)


def assert_same_numbers(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal bits, except that a NaN may be any NaN."""
    assert actual.dtype is expected.dtype
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.dtype.itemsize]
    same = actual.view(integer) == expected.view(integer)
    same |= actual.isnan() & expected.isnan()
    wrong = (~same).nonzero().flatten()
    examples = [(int(i), actual[i].item(), expected[i].item()) for i in wrong[:5]]
    assert not examples, f"{len(wrong)} differ (index, got, expected): {examples}"


def every_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def size() -> int:
    import torch.distributed as dist

    return dist.get_world_size()


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
class TestEvery16BitValue:
    @pytest.mark.essential(keep=2)
    @pytest.mark.parametrize("giver", ["first", "last"])
    def test_of_one_rank(self, dtype: torch.dtype, giver: str) -> None:
        values = every_value(dtype)
        chosen = 0 if giver == "first" else size() - 1

        def contribution(rank: int) -> torch.Tensor:
            return values if rank == chosen else torch.zeros_like(values)

        assert_same_numbers(averaged(contribution), mean(contribution))

    def test_of_all_ranks_comes_back_as_it_is(self, dtype: torch.dtype) -> None:
        values = every_value(dtype)
        assert_same_numbers(averaged(lambda rank: values), values)

    def test_against_another_value(self, dtype: torch.dtype) -> None:
        # Sums of two, so that the order does not count: ties, carries, cancellation.
        values = every_value(dtype)
        shuffle = torch.randperm(len(values), generator=torch.Generator().manual_seed(3))
        parts = {0: values, size() - 1: values[shuffle]}

        def contribution(rank: int) -> torch.Tensor:
            return parts.get(rank, torch.zeros_like(values))

        assert_same_numbers(averaged(contribution), mean(contribution))

    def test_neighbours(self, dtype: torch.dtype) -> None:
        # The mean of two neighbours lies half-way between them: to the even one.
        values = every_value(dtype)
        next_values = values.view(torch.int16).roll(1).view(dtype)

        def contribution(rank: int) -> torch.Tensor:
            return {0: values, size() - 1: next_values}.get(rank, torch.zeros_like(values))

        assert_same_numbers(averaged(contribution), mean(contribution))

    def test_over_several_chunks(self, dtype: torch.dtype) -> None:
        # An odd length, more than four of the engine's chunks.
        values = every_value(dtype).repeat(17)[: 17 * 2**16 - 3]

        def contribution(rank: int) -> torch.Tensor:
            return values if rank == 0 else torch.zeros_like(values)

        assert_same_numbers(averaged(contribution), mean(contribution))


def test_special_16_bit_values_are_what_they_are_called() -> None:
    """Name a few of the results above, in case the reference shares a mistake."""
    values = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 65504.0, 2.0**-24, -(2.0**-24), 0.0, -0.0]
    ).half()
    result = averaged(lambda rank: values)
    assert result[0].isnan()
    assert result[1:6].tolist() == [float("inf"), -float("inf"), 65504.0, 2.0**-24, -(2.0**-24)]
    assert result.signbit().tolist()[6:] == [False, True]


def test_opposite_infinities_are_no_number() -> None:
    if size() == 1:
        assert averaged(lambda rank: torch.tensor([float("inf")])).item() == float("inf")
        return
    sign = {0: 1.0, 1: -1.0}
    for dtype in (*HALVES, *FLOATS):
        result = averaged(
            lambda rank, dtype=dtype: (
                torch.tensor([sign.get(rank, 0) * torch.inf])
                .nan_to_num(0, torch.inf, -torch.inf)
                .to(dtype)
            )
        )
        assert result.isnan().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
class TestQuotient:
    def test_is_correctly_rounded(self, dtype: torch.dtype) -> None:
        integer = torch.int32 if dtype is torch.float32 else torch.int64
        bound = torch.iinfo(integer)
        generator = torch.Generator().manual_seed(5)
        # Random bits: numbers of every size, subnormal ones, infinities and NaN among them.
        bits = torch.randint(bound.min, bound.max, (300_001,), generator=generator, dtype=integer)
        values = bits.view(dtype)

        def contribution(rank: int) -> torch.Tensor:
            return values if rank == size() - 1 else torch.zeros_like(values)

        assert_same_numbers(averaged(contribution), mean(contribution))

    def test_of_subnormal_numbers(self, dtype: torch.dtype) -> None:
        integer = torch.int32 if dtype is torch.float32 else torch.int64
        values = torch.arange(4096, dtype=integer).view(dtype)

        def contribution(rank: int) -> torch.Tensor:
            return values if rank == 0 else torch.zeros_like(values)

        assert_same_numbers(averaged(contribution), mean(contribution))

    def test_of_equal_numbers_is_the_number(self, dtype: torch.dtype) -> None:
        # Few enough digits that three of them add up exactly.
        values = torch.randn(1001, generator=torch.Generator().manual_seed(6)).bfloat16().to(dtype)
        assert_same_numbers(averaged(lambda rank: values), values)


def test_complex_gradients_are_pairs() -> None:
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(1000, generator=generator, dtype=torch.complex64)

    def contribution(rank: int) -> torch.Tensor:
        return values if rank == 0 else torch.zeros_like(values)

    result = averaged(contribution)
    parts = torch.view_as_real(values).flatten()
    expected = mean(lambda rank: parts if rank == 0 else torch.zeros_like(parts))
    assert_same_numbers(torch.view_as_real(result).flatten(), expected)
