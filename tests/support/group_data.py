"""What tests of the process group share: tensors of known bits for each rank, and references."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128, torch.complex32)
INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
EIGHT_BIT_FLOATS = (
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz),
    *(torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)
EVERY = (*REAL, *COMPLEX, *INTEGERS, torch.bool, *EIGHT_BIT_FLOATS)

Op = dist.ReduceOp
ARITHMETIC = (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX)
BITWISE = (Op.BAND, Op.BOR, Op.BXOR)

# numpy's part of each reduction, in the dtype of its operands.
NUMPY: dict[Any, Callable[..., Any]] = {
    Op.SUM: np.add.reduce,
    Op.AVG: np.add.reduce,
    Op.PRODUCT: np.multiply.reduce,
    Op.MIN: np.minimum.reduce,
    Op.MAX: np.maximum.reduce,
    Op.BAND: np.bitwise_and.reduce,
    Op.BOR: np.bitwise_or.reduce,
    Op.BXOR: np.bitwise_xor.reduce,
}

COUNT = 61


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def group() -> Any:
    return dist.group.WORLD


def name_of(value: Any) -> str:
    return getattr(value, "name", str(value)).removeprefix("torch.")


def make(dtype: torch.dtype, seed: int, count: int = COUNT) -> torch.Tensor:
    """Return what rank `seed` contributes.

    Numbers are few and small, floats in quarters: nothing overflows, and the order in which
    ranks are added changes nothing. 8-bit floats are random bits.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    if dtype in INTEGERS:
        lowest = -3 if dtype.is_signed else 0
        return torch.randint(lowest, 4, (count,), generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.view_as_complex(make(dtype.to_real(), seed, 2 * count).view(count, 2))
    if dtype in REAL:
        return (torch.randint(-32, 33, (count,), generator=generator) / 4).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    return random_bits(dtype, seed, count)


def random_bits(dtype: torch.dtype, seed: int, count: int = COUNT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2000 + seed)
    shape = (count * dtype.itemsize,)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)


def as_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the tensor in the dtype that its reduction is carried out in."""
    wide = {
        torch.float16: torch.float32,
        torch.bfloat16: torch.float32,
        torch.complex32: torch.complex64,
    }
    return tensor.to(wide.get(tensor.dtype, tensor.dtype)).numpy()


def reference(
    dtype: torch.dtype, op: Any, ranks: int, make: Callable[..., torch.Tensor] = make
) -> torch.Tensor:
    """Return what all ranks must hold after the reduction."""
    stacked = np.stack([as_numpy(make(dtype, seed)) for seed in range(ranks)])
    # numpy would widen the sum of small integers.
    same = {"dtype": stacked.dtype} if op in (Op.SUM, Op.AVG, Op.PRODUCT) else {}
    total = NUMPY[op](stacked, axis=0, **same)
    if op == Op.AVG and dtype in INTEGERS:
        # Towards zero, in Python's own integers.
        quotients = [abs(int(v)) // ranks * (-1 if v < 0 else 1) for v in total]
        total = np.array(quotients, dtype=total.dtype)
    elif op == Op.AVG:
        parts = total.view(total.real.dtype)
        total = (parts / parts.dtype.type(ranks)).view(total.dtype)
    return torch.from_numpy(total).to(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's elements as bytes, so that equal means equal bits."""
    dense = tensor.detach().resolve_conj().resolve_neg()
    return dense.reshape(-1).contiguous().view(torch.uint8)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype is expected.dtype
    assert actual.shape == expected.shape
    same = torch.equal(raw(actual), raw(expected))
    assert same, f"{actual} is not {expected}"


def assert_same_on_all_ranks(tensor: torch.Tensor) -> None:
    everyone: list[Any] = [None] * size()
    dist.all_gather_object(everyone, raw(tensor).numpy().tobytes())
    assert len(set(everyone)) == 1


# How the ranks of a group compare their calls.
WHERE = ["in a node", "between nodes"]


def new_group(where: str, timeout: timedelta) -> Any:
    """Return a group of all ranks that compares its calls as in a node, or as between nodes."""
    from mpiddp.process_group.call_blocks import CallBlocks

    part: Any = dist.new_group(timeout=timeout)
    if where == "between nodes":
        part.state.release()
        part.state.all_here, part.state.blocks = False, CallBlocks(part, part._communicator.Dup())
    dist.barrier()
    return part
