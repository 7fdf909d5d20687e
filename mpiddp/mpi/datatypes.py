"""The MPI datatype and the MPI operation for each torch dtype and ReduceOp.

MPI gets an address, a count and a datatype from this table and from nowhere else:
mpi4py would take a torch bfloat16 tensor as raw bytes, and MPI would add the bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpiddp.mpi import combining, extremes

# The dtype that each is added in. 16-bit floats are widened: no datatype for them is known to all
# MPIs, and one rounding at the end beats one per rank.
_SUM_DTYPES: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}

# Open MPI's vector code saturates sums of these where all others wrap around.
_NARROW_INTEGERS = (torch.int8, torch.int16, torch.uint8, torch.uint16)

_DATATYPES: dict[torch.dtype, MPI.Datatype] = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.bool: MPI.C_BOOL,
}

_Kind = dist.ReduceOp

_OPERATIONS: dict[object, MPI.Op] = {
    _Kind.SUM: MPI.SUM,
    _Kind.AVG: MPI.SUM,
    _Kind.PREMUL_SUM: MPI.SUM,
    _Kind.PRODUCT: MPI.PROD,
    _Kind.MIN: MPI.MIN,
    _Kind.MAX: MPI.MAX,
    _Kind.BAND: MPI.BAND,
    _Kind.BOR: MPI.BOR,
    _Kind.BXOR: MPI.BXOR,
}

# On truth values a sum is "any", a product is "all".
_LOGICAL_OPERATIONS: dict[object, MPI.Op] = {
    _Kind.SUM: MPI.LOR,
    _Kind.PRODUCT: MPI.LAND,
    _Kind.MIN: MPI.LAND,
    _Kind.MAX: MPI.LOR,
    _Kind.BAND: MPI.LAND,
    _Kind.BOR: MPI.LOR,
    _Kind.BXOR: MPI.LXOR,
}

# What a `Block` calls them.
_NAMES = {
    _Kind.SUM: "sum",
    _Kind.AVG: "sum",
    _Kind.PREMUL_SUM: "sum",
    _Kind.PRODUCT: "prod",
    _Kind.MIN: "min",
    _Kind.MAX: "max",
    _Kind.BAND: "band",
    _Kind.BOR: "bor",
    _Kind.BXOR: "bxor",
}
_LOGICAL_NAMES = {
    _Kind.SUM: "lor",
    _Kind.PRODUCT: "land",
    _Kind.MIN: "land",
    _Kind.MAX: "lor",
    _Kind.BAND: "land",
    _Kind.BOR: "lor",
    _Kind.BXOR: "lxor",
}

_BITWISE = (_Kind.BAND, _Kind.BOR, _Kind.BXOR)
_ORDERING = (_Kind.MIN, _Kind.MAX)
# In the order of `extremes.operations`.
_FLOATS = (torch.float32, torch.float64)
_ADDING = (_Kind.SUM, _Kind.AVG, _Kind.PREMUL_SUM)


class ReductionRule(NamedTuple):
    """How MPI carries out one reduction.

    Attributes:
        dtype: the torch dtype that the reduction is carried out in.
        datatype: the MPI datatype of that dtype.
        operation: the MPI operation.
        divides: whether the caller must divide by the number of ranks after it.
        multiplies: whether the caller must multiply by the op's factor before it.
        way: of `combining.WAYS`; 0: there is none.
    """

    dtype: torch.dtype
    datatype: MPI.Datatype
    operation: MPI.Op
    divides: bool
    multiplies: bool
    way: int


def reduction(dtype: torch.dtype, op: dist.ReduceOp) -> ReductionRule:
    """Return how to reduce tensors of `dtype` by `op`.

    Not collective. For ``AVG`` and ``PREMUL_SUM`` the operation is a sum.

    Raises:
        TypeError: MPI has no such reduction; the message names dtype and operation.
    """
    kind: Any = getattr(op, "op", op)
    # Every reduction asks, and comparing torch's enums takes microseconds.
    key = (dtype, int(kind))
    known = _known.get(key)
    if known is None:
        known = _known[key] = _reduction(dtype, kind)
    return known


_known: dict[tuple[torch.dtype, int], ReductionRule] = {}


def _reduction(dtype: torch.dtype, kind: Any) -> ReductionRule:
    sum_dtype = _SUM_DTYPES.get(dtype, dtype)
    if dtype in _NARROW_INTEGERS and kind in _ADDING:
        sum_dtype = torch.int32
    datatype = _DATATYPES.get(sum_dtype)
    operation = (_LOGICAL_OPERATIONS if dtype is torch.bool else _OPERATIONS).get(kind)
    if kind in _ORDERING and sum_dtype in _FLOATS:
        operation = _extreme(sum_dtype, kind)
    impossible = (
        datatype is None
        or operation is None
        or (kind in _BITWISE and (dtype.is_floating_point or dtype.is_complex))
        or (kind in _ORDERING and dtype.is_complex)
    )
    if impossible or datatype is None or operation is None:
        name = getattr(kind, "name", str(kind))
        raise TypeError(
            f"cannot reduce tensors of dtype {dtype} with ReduceOp.{name} over MPI; dtypes that "
            f"can be reduced: {', '.join(str(d) for d in (*_DATATYPES, *_SUM_DTYPES))} "
            f"(bitwise operations: integers and bool; MIN and MAX: no complex)"
        )
    names = (_LOGICAL_NAMES if dtype is torch.bool else _NAMES)[kind]
    way = combining.WAYS.get((names, str(sum_dtype).removeprefix("torch.")), 0)
    return ReductionRule(
        sum_dtype, datatype, operation, kind == _Kind.AVG, kind == _Kind.PREMUL_SUM, way
    )


@cache
def _extremes() -> tuple[MPI.Op, ...]:
    return extremes.operations()


def _extreme(dtype: torch.dtype, kind: Any) -> MPI.Op:
    smallest = bool(kind == _Kind.MIN)
    return _extremes()[2 * _FLOATS.index(dtype) + smallest]


def buffer_of(
    tensor: torch.Tensor, datatype: MPI.Datatype | None = None
) -> tuple[MPI.buffer, int, MPI.Datatype]:
    """Return what MPI needs to send or receive a dense contiguous CPU tensor.

    Not collective.

    Args:
        tensor: its memory must outlive the MPI call.
        datatype: what the memory holds; None moves it as bytes, whatever its dtype.
    """
    nbytes = tensor.nbytes
    memory = MPI.buffer.fromaddress(tensor.data_ptr(), nbytes)
    if datatype is None:
        return memory, nbytes, MPI.BYTE
    return memory, nbytes // datatype.Get_size(), datatype
