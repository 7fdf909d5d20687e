"""Floating-point formats by their definition: a slow reference in numpy for the SIMD kernels.

It decodes bits with powers of two, and rounds by looking for the nearest of all numbers of the
format.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, torch.float64, *HALVES]

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]


class Format(NamedTuple):
    """An IEEE 754 binary format."""

    exponent_bits: int
    fraction_bits: int
    integer: type[np.unsignedinteger[Any]]
    torch_integer: torch.dtype


FORMATS = {
    torch.float16: Format(5, 10, np.uint16, torch.int16),
    torch.bfloat16: Format(8, 7, np.uint16, torch.int16),
    torch.float32: Format(8, 23, np.uint32, torch.int32),
    torch.float64: Format(11, 52, np.uint64, torch.int64),
}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bits_of(tensor: torch.Tensor) -> Array:
    form = FORMATS[tensor.dtype]
    return tensor.view(form.torch_integer).numpy().view(form.integer).copy()


def from_bits(bits: Array, dtype: torch.dtype) -> torch.Tensor:
    form = FORMATS[dtype]
    signed = np.ascontiguousarray(bits.astype(form.integer)).view(f"i{bits.dtype.itemsize}")
    return torch.from_numpy(signed.copy()).view(dtype)


def decode(bits: Array, dtype: torch.dtype) -> Float64:
    """Return the numbers that the bits of a format stand for."""
    form = FORMATS[dtype]
    if dtype is torch.float64:
        return bits.view(np.float64).copy()
    wide = bits.astype(np.int64)
    fraction = wide & (2**form.fraction_bits - 1)
    exponent = (wide >> form.fraction_bits) & (2**form.exponent_bits - 1)
    bias = 2 ** (form.exponent_bits - 1) - 1
    leading = (exponent > 0).astype(np.int64) << form.fraction_bits
    numbers = np.ldexp(
        (leading + fraction).astype(np.float64),
        np.maximum(exponent, 1) - bias - form.fraction_bits,
    )
    special = np.where(fraction == 0, np.inf, np.nan)
    numbers = np.where(exponent == 2**form.exponent_bits - 1, special, numbers)
    sign = (wide >> (form.exponent_bits + form.fraction_bits)) & 1
    return np.where(sign == 1, -numbers, numbers)


def magnitudes(dtype: torch.dtype) -> Float64:
    """Return all numbers of a 16-bit format that are not negative, and what would come next.

    The position of a number is its bits. The place of infinity has the power of two that
    counts as its value when numbers are rounded.
    """
    form = FORMATS[dtype]
    infinity = (2**form.exponent_bits - 1) << form.fraction_bits
    numbers = decode(np.arange(infinity + 1, dtype=np.uint16), dtype)
    numbers[infinity] = 2.0**2 ** (form.exponent_bits - 1)
    return numbers


def midpoints(dtype: torch.dtype) -> Float64:
    numbers = magnitudes(dtype)
    return (numbers[:-1] + numbers[1:]) / 2


MIDPOINTS = {dtype: midpoints(dtype) for dtype in HALVES}


def encode(numbers: Float64, dtype: torch.dtype) -> Array:
    """Return the bits of the nearest numbers of a format, ties to even."""
    if dtype is torch.float64:
        return numbers.view(np.uint64).copy()
    if dtype is torch.float32:
        with np.errstate(all="ignore"):
            return numbers.astype(np.float32).view(np.uint32)
    middle = MIDPOINTS[dtype]
    absolute = np.abs(np.nan_to_num(numbers, nan=0, posinf=np.inf, neginf=-np.inf))
    bits = np.searchsorted(middle, absolute, side="left")  # a tie: the lower one
    tie = middle[np.minimum(bits, len(middle) - 1)] == absolute
    bits = np.where(tie & (bits % 2 == 1), bits + 1, bits)
    bits = np.where(np.isnan(numbers), len(middle) + 1, bits)  # what follows infinity
    return (bits | (np.signbit(numbers).astype(np.int64) << 15)).astype(np.uint16)


def is_nan(bits: Array, dtype: torch.dtype) -> npt.NDArray[np.bool_]:
    return np.isnan(decode(bits, dtype))


def assert_same(actual: Array, expected: Array, dtype: torch.dtype) -> None:
    """Assert the same bits, except that a NaN may be any NaN."""
    same = (actual == expected) | (is_nan(actual, dtype) & is_nan(expected, dtype))
    wrong = np.nonzero(~same)[0]
    examples = [(int(i), hex(actual[i]), hex(expected[i])) for i in wrong[:5]]
    assert not examples, f"{len(wrong)} differ (index, got, expected): {examples}"


def scale_of(divisor: float) -> float:
    """Return the largest power of two, up to one, that makes so many numbers' sum finite."""
    return min(1.0, 2.0 ** -math.ceil(math.log2(divisor)))


def total_of(columns: list[Array], dtype: torch.dtype, scale: float = 1) -> Array:
    wide = np.float64 if dtype is torch.float64 else np.float32
    with np.errstate(all="ignore"):
        total = decode(columns[0], dtype).astype(wide) * wide(scale)
        for column in columns[1:]:
            total = total + decode(column, dtype).astype(wide) * wide(scale)
    return total


def mean(columns: list[Array], dtype: torch.dtype, divisor: float | None) -> Array:
    """Return the bits of the mean, or of the sum when there is no divisor.

    A sum that overflows gives way to one of smaller operands.
    """
    wide = np.float64 if dtype is torch.float64 else np.float32
    total = total_of(columns, dtype)
    if divisor is None:
        return total.view(np.uint64 if wide is np.float64 else np.uint32)
    with np.errstate(all="ignore"):
        scaled = total_of(columns, dtype, scale_of(divisor))
        scaled /= wide(divisor) * wide(scale_of(divisor))
        quotient = np.where(np.isfinite(total), total / wide(divisor), scaled)
        return encode(quotient.astype(np.float64), dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def random_bits(count: int, dtype: torch.dtype, seed: int) -> Array:
    """Return numbers of every size, subnormal ones, infinities and NaN among them."""
    form = FORMATS[dtype]
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 2**64, count, dtype=np.uint64, endpoint=False)
    return (bits >> np.uint64(64 - 8 * np.dtype(form.integer).itemsize)).astype(form.integer)


def moderate_bits(count: int, dtype: torch.dtype, seed: int) -> Array:
    """Return numbers around 1, whose sums round."""
    return encode(np.random.default_rng(seed).normal(size=count), dtype)


def special_bits(dtype: torch.dtype) -> Array:
    """Return zeros, smallest and largest numbers, infinities, NaN of all kinds; both signs."""
    form = FORMATS[dtype]
    infinity = (2**form.exponent_bits - 1) << form.fraction_bits
    quiet = infinity | 1 << (form.fraction_bits - 1)
    smallest_normal = 1 << form.fraction_bits
    positive = [
        *(0, 1, 2, 3, smallest_normal - 1, smallest_normal, smallest_normal + 1),
        *(infinity - 2, infinity - 1, infinity),
        *(infinity + 1, quiet - 1, quiet, quiet + 1, 2 * quiet - infinity - 1),
    ]
    sign = 1 << (form.exponent_bits + form.fraction_bits)
    return np.array(positive + [sign | bits for bits in positive], dtype=form.integer)


def every_half() -> Array:
    return np.arange(2**16, dtype=np.uint32).astype(np.uint16)
