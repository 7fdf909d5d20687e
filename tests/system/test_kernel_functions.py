"""The SIMD kernels, each variant that this processor runs, against a slow reference in numpy."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from float_formats import (
    DTYPES,
    FORMATS,
    HALVES,
    MIDPOINTS,
    Array,
    assert_same,
    bits_of,
    decode,
    encode,
    every_half,
    from_bits,
    magnitudes,
    mean,
    moderate_bits,
    name_of,
    random_bits,
    scale_of,
    special_bits,
    sum_dtype,
    total_of,
)

from mpiddp.system import kernels

pytestmark = [pytest.mark.once, pytest.mark.timeout(120)]

VARIANTS = kernels.available()


@pytest.mark.smoke
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are names of x86-64")
def test_what_this_processor_has_is_used() -> None:
    """Whatever compiler made it: in a wheel it is another one."""
    (told, *_) = re.findall(r"^flags\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    wanted = {"avx2": "avx2 f16c", "avx512": "avx2 f16c avx512f avx512bw avx512vl avx512dq"}
    has = [name for name, flags in wanted.items() if set(flags.split()) <= set(told.split())]
    assert ("plain", *has) == VARIANTS


def converted(name: str, bits: Array, source: torch.dtype, target: torch.dtype) -> Array:
    out = torch.empty(len(bits), dtype=target)
    kernels.convert(name, out, from_bits(bits, source))
    return bits_of(out)


def test_reference_knows_what_formats_are() -> None:
    half, brain = torch.float16, torch.bfloat16
    known = {0x3C00: 1.0, 0xC000: -2.0, 0x7BFF: 65504.0, 0x0001: 2.0**-24, 0x0400: 2.0**-14}
    assert decode(np.array(list(known), np.uint16), half).tolist() == list(known.values())
    known = {0x3F80: 1.0, 0xC000: -2.0, 0x0001: 2.0**-133, 0x7F7F: 255 * 2.0**120}
    assert decode(np.array(list(known), np.uint16), brain).tolist() == list(known.values())
    # 65520 lies half-way between the largest float16 and the next power of two.
    numbers = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.999, 65520.0, 2.0**-25, -0.0])
    assert encode(numbers, half).tolist() == [0x3C00, 0x3C02, 0x7BFF, 0x7C00, 0, 0x8000]


def near_midpoints(dtype: torch.dtype, wide: type[np.floating[Any]]) -> Array:
    """Return where rounding to 16 bits changes: numbers, midpoints, and what lies around both."""
    numbers = np.concatenate([magnitudes(dtype), MIDPOINTS[dtype]])
    with np.errstate(over="ignore"):
        exact = numbers.astype(wide)
        around = [exact, np.nextafter(exact, wide(np.inf)), np.nextafter(exact, wide(-np.inf))]
    both = np.concatenate([*around, *(-array for array in around)])
    return both.view(np.uint32 if wide is np.float32 else np.uint64)


def double_rounding_traps(dtype: torch.dtype) -> Array:
    """Return doubles that a float would round to the midpoint between two 16-bit numbers."""
    middle = MIDPOINTS[dtype]
    traps = [
        middle * (1 + sign * 2.0**-power) for power in (24, 25, 26, 30, 40, 52) for sign in (1, -1)
    ]
    return np.concatenate([*traps, *(-array for array in traps)]).view(np.uint64)


@pytest.mark.parametrize("name", VARIANTS)
class TestConversion:
    @pytest.mark.parametrize("target", [torch.float32, torch.float64], ids=name_of)
    @pytest.mark.parametrize("source", HALVES, ids=name_of)
    def test_every_half_is_widened_exactly(
        self, name: str, source: torch.dtype, target: torch.dtype
    ) -> None:
        values = every_half()
        expected = encode(decode(values, source), target)
        assert_same(converted(name, values, source, target), expected, target)

    @pytest.mark.essential(keep=1)
    @pytest.mark.parametrize("target", HALVES, ids=name_of)
    def test_float32_is_rounded_to_the_nearest(self, name: str, target: torch.dtype) -> None:
        values = np.concatenate(
            [
                near_midpoints(target, np.float32),
                special_bits(torch.float32),
                random_bits(300_001, torch.float32, seed=1),
                # All exponents with NaN and subnormal numbers of many kinds among them.
                np.arange(0, 2**32, 40_009, dtype=np.uint64).astype(np.uint32),
            ]
        )
        expected = encode(decode(values, torch.float32), target)
        assert_same(converted(name, values, torch.float32, target), expected, target)

    @pytest.mark.parametrize("target", HALVES, ids=name_of)
    def test_float64_is_rounded_once(self, name: str, target: torch.dtype) -> None:
        generator = np.random.default_rng(2)
        exponents = generator.uniform(-160, 160, 200_001)
        values = np.concatenate(
            [
                near_midpoints(target, np.float64),
                near_midpoints(target, np.float32).view(np.float32).astype(np.float64).view("u8"),
                double_rounding_traps(target),
                special_bits(torch.float64),
                random_bits(100_001, torch.float64, seed=3),
                (generator.choice([-1.0, 1.0], 200_001) * 2**exponents).view(np.uint64),
            ]
        )
        expected = encode(decode(values, torch.float64), target)
        assert_same(converted(name, values, torch.float64, target), expected, target)

    @pytest.mark.parametrize("target", DTYPES, ids=name_of)
    @pytest.mark.parametrize("source", DTYPES, ids=name_of)
    def test_all_pairs(self, name: str, source: torch.dtype, target: torch.dtype) -> None:
        values = np.concatenate(
            [
                special_bits(source),
                random_bits(50_001, source, seed=4),
                moderate_bits(10_001, source, seed=5),
            ]
        )
        expected = encode(decode(values, source), target)
        actual = converted(name, values, source, target)
        assert_same(actual, expected, target)
        if source is target:
            assert actual.tolist() == values.tolist()

    @pytest.mark.parametrize("target", DTYPES, ids=name_of)
    @pytest.mark.parametrize("source", DTYPES, ids=name_of)
    def test_writes_nothing_else(self, name: str, source: torch.dtype, target: torch.dtype) -> None:
        given = moderate_bits(3000, source, seed=6)
        before = moderate_bits(3000, target, seed=7)
        for count in (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 1023, 1024, 1025, 2500):
            for start, out_start in ((0, 0), (1, 3), (5, 2), (17, 16)):
                array = from_bits(given, source)
                whole = from_bits(before, target)
                kernels.convert(name, whole[out_start:], array[start : start + count])
                expected = before.copy()
                numbers = decode(given[start : start + count], source)
                expected[out_start : out_start + count] = encode(numbers, target)
                assert_same(bits_of(whole), expected, target)
                assert bits_of(array).tolist() == given.tolist()


# Ranges that begin anywhere, whole vectors or not, blocks or not.
RANGES = [
    *((first, count) for first in (0, 1, 5) for count in (0, 1, 2, 3, 4, 7, 9, 16, 31, 40, 65)),
    *((first, 50 + first % 7) for first in range(18)),
    *((3, 1023), (0, 1024), (1, 1025), (17, 2049), (2, 2500)),
]
DIVISORS = [1, 2, 3, 4, 7, 16]
MARGIN = 20


class Buffers:
    """The buffers of some ranks inside larger memory, each at another alignment."""

    def __init__(self, dtype: torch.dtype, ranks: int, length: int, seed: int) -> None:
        self.dtype = dtype
        self.before = [
            np.concatenate(
                [
                    moderate_bits(MARGIN + rank, dtype, seed + rank),
                    self.contents(length, seed + 100 * rank),
                    moderate_bits(MARGIN, dtype, seed + rank),
                ]
            )
            for rank in range(ranks)
        ]
        self.length = length
        self.memory = [from_bits(bits, dtype) for bits in self.before]
        self.tensors = [
            memory[MARGIN + rank : MARGIN + rank + length]
            for rank, memory in enumerate(self.memory)
        ]

    def contents(self, length: int, seed: int) -> Array:
        special = special_bits(self.dtype)
        bits = moderate_bits(length, self.dtype, seed)
        # Few specials: nearly every sum of nine would be a NaN otherwise.
        where = np.random.default_rng(seed).random(length) < 0.1
        bits[where] = np.random.default_rng(seed + 1).choice(special, int(where.sum()))
        return bits

    def columns(self, first: int, count: int) -> list[Array]:
        starts = [MARGIN + rank + first for rank in range(len(self.before))]
        return [bits[i : i + count] for bits, i in zip(self.before, starts, strict=True)]

    def assert_now(self, first: int, count: int, expected: Array | None) -> None:
        """Assert what a range holds on all ranks, and that nothing else has changed."""
        for rank, (memory, before) in enumerate(zip(self.memory, self.before, strict=True)):
            start = MARGIN + rank + first
            now = bits_of(memory)
            if expected is not None:
                assert_same(now[start : start + count], expected, self.dtype)
                now[start : start + count] = before[start : start + count]
            assert now.tobytes() == before.tobytes()

    def restore(self) -> None:
        for memory, before in zip(self.memory, self.before, strict=True):
            memory.copy_(from_bits(before, self.dtype))


def cases(dtype: torch.dtype, ranks: int) -> Iterator[tuple[Buffers, int, int, float]]:
    buffers = Buffers(dtype, ranks, 2600, seed=ranks)
    for position, (first, count) in enumerate(RANGES):
        divisors = DIVISORS if count > 1000 else [DIVISORS[position % len(DIVISORS)], ranks]
        for divisor in divisors:
            yield buffers, first, count, divisor
            buffers.restore()


@pytest.mark.parametrize("ranks", range(1, 10))
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", VARIANTS)
class TestRanges:
    @pytest.mark.thorough(keep=18)
    def test_mean_in_place(self, name: str, dtype: torch.dtype, ranks: int) -> None:
        for buffers, first, count, divisor in cases(dtype, ranks):
            kernels.mean_in_place(name, buffers.tensors, first, count, divisor)
            expected = mean(buffers.columns(first, count), dtype, divisor)
            buffers.assert_now(first, count, expected)

    @pytest.mark.thorough(keep=18)
    def test_sum_to(self, name: str, dtype: torch.dtype, ranks: int) -> None:
        wide = sum_dtype(dtype)
        for buffers, first, count, _ in cases(dtype, ranks):
            out = torch.full((count + 5,), 7, dtype=wide)
            kernels.sum_to(name, out[3:], buffers.tensors, first, count)
            expected = mean(buffers.columns(first, count), dtype, None)
            assert_same(bits_of(out[3 : count + 3]), expected, wide)
            assert (out[:3] == 7).all()
            assert (out[count + 3 :] == 7).all()
            buffers.assert_now(first, count, None)

    @pytest.mark.thorough(keep=18)
    def test_spread_mean(self, name: str, dtype: torch.dtype, ranks: int) -> None:
        """Up to the first block that has a sum which is not finite; all of float16."""
        wide = sum_dtype(dtype)
        finite = moderate_bits(2700, wide, 9)
        for buffers, first, count, divisor in cases(dtype, ranks):
            for special in (None, count // 2):
                sums = from_bits(finite, wide)[first : first + count]
                if special is not None and count:
                    sums[special] = (torch.inf, -torch.inf, torch.nan)[count % 3]
                put = count
                if special is not None and count and dtype is not torch.float16:
                    put = special - special % 1024
                assert (
                    kernels.spread_mean(name, buffers.tensors, first, count, sums, divisor) == put
                )
                expected = mean([bits_of(sums[:put])], wide, divisor)
                expected = encode(decode(expected, wide), dtype)
                buffers.assert_now(first, put, expected)
                buffers.restore()

    @pytest.mark.thorough(keep=18)
    def test_scaled_sum_to(self, name: str, dtype: torch.dtype, ranks: int) -> None:
        wide = sum_dtype(dtype)
        for buffers, first, count, divisor in cases(dtype, ranks):
            out = torch.full((count + 5,), 7, dtype=wide)
            kernels.scaled_sum_to(name, out[3:], buffers.tensors, first, count, divisor)
            scale = 1 if dtype is torch.float16 else scale_of(divisor)
            expected = encode(
                total_of(buffers.columns(first, count), dtype, scale).astype(np.float64), wide
            )
            assert_same(bits_of(out[3 : count + 3]), expected, wide)
            assert (out[:3] == 7).all()
            assert (out[count + 3 :] == 7).all()
            buffers.assert_now(first, count, None)

    @pytest.mark.thorough(keep=18)
    def test_spread_scaled_mean(self, name: str, dtype: torch.dtype, ranks: int) -> None:
        """Sums and scaled sums of the buffers give the same as the mean in place."""
        wide = sum_dtype(dtype)
        for buffers, first, count, divisor in cases(dtype, ranks):
            sums, scaled = torch.empty(2, count, dtype=wide)
            kernels.sum_to(name, sums, buffers.tensors, first, count)
            kernels.scaled_sum_to(name, scaled, buffers.tensors, first, count, divisor)
            kernels.spread_scaled_mean(name, buffers.tensors, first, count, sums, scaled, divisor)
            expected = mean(buffers.columns(first, count), dtype, divisor)
            buffers.assert_now(first, count, expected)

    @pytest.mark.thorough(keep=18)
    def test_mean_to(self, name: str, dtype: torch.dtype, ranks: int) -> None:
        for buffers, first, count, divisor in cases(dtype, ranks):
            out = torch.full((count + 5,), 7, dtype=dtype)
            kernels.mean_to(name, out[3:], buffers.tensors, first, count, divisor)
            expected = mean(buffers.columns(first, count), dtype, divisor)
            assert_same(bits_of(out[3 : count + 3]), expected, dtype)
            assert (out[:3] == 7).all()
            assert (out[count + 3 :] == 7).all()
            buffers.assert_now(first, count, None)

    @pytest.mark.thorough(keep=18)
    def test_mean_to_one_of_the_buffers(self, name: str, dtype: torch.dtype, ranks: int) -> None:
        for buffers, first, count, divisor in cases(dtype, ranks):
            out = buffers.tensors[-1][first:]
            kernels.mean_to(name, out, buffers.tensors, first, count, divisor)
            expected = mean(buffers.columns(first, count), dtype, divisor)
            assert_same(bits_of(out[:count]), expected, dtype)

    @pytest.mark.thorough(keep=18)
    def test_scaled_sum_as_element(self, name: str, dtype: torch.dtype, ranks: int) -> None:
        for buffers, first, count, divisor in cases(dtype, ranks):
            out = torch.full((count + 5,), 7, dtype=dtype)
            kernels.scaled_sum_as_element(name, out[3:], buffers.tensors, first, count, divisor)
            total = total_of(buffers.columns(first, count), dtype, scale_of(divisor))
            assert_same(bits_of(out[3 : count + 3]), encode(total.astype(np.float64), dtype), dtype)
            assert (out[:3] == 7).all()
            assert (out[count + 3 :] == 7).all()
            buffers.assert_now(first, count, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", VARIANTS)
class TestSpecialElements:
    def test_one_is_found_anywhere(self, name: str, dtype: torch.dtype) -> None:
        largest = torch.finfo(dtype).max
        array = torch.full((2600,), largest, dtype=dtype)
        array[1::2] = -largest
        for count in (0, 1, 7, 1024, 2600):
            assert kernels.are_finite(name, array[:count])
        for place in (0, 1, 1023, 1024, 2599):
            for special in (torch.inf, -torch.inf, torch.nan):
                changed = array.clone()
                changed[place] = special
                assert not kernels.are_finite(name, changed)
                assert kernels.are_finite(name, changed[:place])

    def test_they_are_replaced(self, name: str, dtype: torch.dtype) -> None:
        bits = np.concatenate([special_bits(dtype), random_bits(3000, dtype, seed=21)])
        if dtype in HALVES:
            bits = every_half()
        other = random_bits(len(bits) + 3, dtype, seed=22)
        array = from_bits(bits, dtype)
        kernels.replace_special(name, array, from_bits(other, dtype))
        finite = np.isfinite(decode(bits, dtype))
        expected = np.where(finite, bits, other[: len(bits)]).astype(bits.dtype)
        assert bits_of(array).tobytes() == expected.tobytes()


@pytest.mark.parametrize("divisor", [1, 2, 3, 1000, 0.5, 0.3, 2.0**-130, 2.0**140])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", VARIANTS)
def test_mean_of_any_two(name: str, dtype: torch.dtype, divisor: float) -> None:
    """All 16-bit values with another each; random bits of the others."""
    if dtype in HALVES:
        values = every_half()
        other = np.random.default_rng(10).permutation(values)
    else:
        values = np.concatenate([special_bits(dtype), random_bits(65_501, dtype, seed=11)])
        other = np.concatenate([special_bits(dtype)[::-1], random_bits(65_501, dtype, seed=12)])
    buffers = [from_bits(values, dtype), from_bits(other, dtype)]
    kernels.mean_in_place(name, buffers, 0, len(values), divisor)
    expected = mean([values, other], dtype, divisor)
    for buffer in buffers:
        assert_same(bits_of(buffer), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", VARIANTS)
def test_any_thread_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """Subnormal numbers count even on a thread that was told to flush them."""
    form = FORMATS[dtype]
    values = np.arange(0, 3000, dtype=form.integer)
    buffers = [from_bits(values, dtype), from_bits(values[::-1].copy(), dtype)]
    small = torch.full((1,), 1e-40)
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush subnormal numbers on this processor")
    try:
        kernels.mean_in_place(name, buffers, 0, len(values), 3)
        wide = torch.empty(len(values), dtype=torch.float32)
        kernels.convert(name, wide, buffers[0])
        assert (small * 1).item() == 0, "the kernels changed the state of the thread"
    finally:
        torch.set_flush_denormal(False)
    expected = mean([values, values[::-1].copy()], dtype, 3)
    assert_same(bits_of(buffers[0]), expected, dtype)
    assert_same(bits_of(buffers[1]), expected, dtype)
    assert_same(bits_of(wide), encode(decode(expected, dtype), torch.float32), torch.float32)


class TestSelection:
    def test_plain_is_always_there(self) -> None:
        assert VARIANTS[0] == "plain"
        assert set(VARIANTS) <= {"plain", "avx2", "avx512", "neon"}

    def test_use(self) -> None:
        before = kernels.selected()
        try:
            for name in VARIANTS:
                kernels.use(name)
                assert kernels.selected() == name
        finally:
            kernels.use(before)
        with pytest.raises(ValueError, match=r"kernels must be one of plain.* here, not 'sse9'"):
            kernels.use("sse9")
        assert kernels.selected() == before

    @staticmethod
    def started_with(value: str | None) -> subprocess.CompletedProcess[str]:
        environment = {name: text for name, text in os.environ.items() if name != "MPIDDP_KERNELS"}
        if value is not None:
            environment["MPIDDP_KERNELS"] = value
        program = "from mpiddp.system import kernels; print(kernels.selected())"
        return subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    @pytest.mark.smoke
    def test_best_one_is_the_default(self) -> None:
        assert self.started_with(None).stdout.strip() == VARIANTS[-1]

    @pytest.mark.thorough(keep=1)
    @pytest.mark.parametrize("name", VARIANTS)
    def test_environment_names_one(self, name: str) -> None:
        assert self.started_with(name).stdout.strip() == name

    def test_environment_names_none_that_runs_here(self) -> None:
        done = self.started_with("AVX2")
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == (
            f"ValueError: MPIDDP_KERNELS must be one of {', '.join(VARIANTS)} on this machine, "
            "not 'AVX2'"
        )


class TestArguments:
    def test_tensors_of_other_kinds_are_refused(self) -> None:
        good = torch.zeros(8)
        with pytest.raises(TypeError, match=r"no kernels for torch\.int32"):
            kernels.mean_in_place("plain", [good.int()], 0, 8, 2)
        with pytest.raises(TypeError, match=r"must be torch\.float32, not torch\.float64"):
            kernels.mean_in_place("plain", [good, good.double()], 0, 8, 2)
        with pytest.raises(TypeError, match=r"must be torch\.float32, not torch\.float16"):
            kernels.sum_to("plain", good.half(), [good.half()], 0, 8)
        with pytest.raises(ValueError, match="contiguous"):
            kernels.mean_in_place("plain", [torch.zeros(16)[::2]], 0, 8, 2)
        with pytest.raises(ValueError, match="has 8 elements where 9 are needed"):
            kernels.mean_in_place("plain", [good, good], 1, 8, 2)
        with pytest.raises(ValueError, match="has 7 elements where 8 are needed"):
            kernels.convert("plain", good[:7], good)
        with pytest.raises(ValueError, match="there are no buffers"):
            kernels.mean_in_place("plain", [], 0, 8, 2)
        with pytest.raises(ValueError, match="kernels must be one of plain"):
            kernels.mean_in_place("other", [good], 0, 8, 2)
