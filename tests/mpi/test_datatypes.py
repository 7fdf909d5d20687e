"""The table that says which MPI datatype and operation stand for a torch dtype and ReduceOp."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.mpi

Op = dist.ReduceOp

# The dtypes whose numbers travel as they are.
PLAIN = (
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    torch.bool,
)
# What is added in a wider dtype.
WIDENED = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}


def name_of(value: Any) -> str:
    return getattr(value, "name", str(value)).removeprefix("torch.")


def every_dtype() -> list[torch.dtype]:
    return sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


# Open MPI saturates sums of narrow integers.
NARROW = (torch.int8, torch.int16, torch.uint8, torch.uint16)
WIDENED_SUMS = dict.fromkeys(NARROW, torch.int32)


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("dtype", [*PLAIN, *WIDENED], ids=name_of)
def test_datatype_has_the_size_of_the_dtype(dtype: torch.dtype) -> None:
    from mpiddp.mpi import datatypes

    how = datatypes.reduction(dtype, Op(Op.SUM))
    assert how.dtype is {**WIDENED, **WIDENED_SUMS}.get(dtype, dtype)
    assert how.datatype.Get_size() == how.dtype.itemsize


@pytest.mark.parametrize("dtype", PLAIN, ids=name_of)
def test_datatype_is_of_the_same_kind(dtype: torch.dtype) -> None:
    from mpi4py.util import dtlib

    from mpiddp.mpi import datatypes

    how = datatypes.reduction(dtype, Op(Op.SUM))
    same = torch.empty(0, dtype=WIDENED_SUMS.get(dtype, dtype))
    assert dtlib.to_numpy_dtype(how.datatype) == same.numpy().dtype


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("dtype", [*PLAIN, *WIDENED], ids=name_of)
def test_mpi_can_add_it(dtype: torch.dtype) -> None:
    from mpi4py import MPI

    from mpiddp.mpi import datatypes

    how = datatypes.reduction(dtype, Op(Op.SUM))
    ones, sums = torch.ones(5, dtype=how.dtype), torch.zeros(5, dtype=how.dtype)
    MPI.COMM_WORLD.Allreduce(
        datatypes.buffer_of(ones, how.datatype),
        datatypes.buffer_of(sums, how.datatype),
        how.operation,
    )
    expected = 1 if dtype is torch.bool else MPI.COMM_WORLD.size
    assert torch.equal(sums, torch.full((5,), expected, dtype=how.dtype))


def test_every_other_dtype_of_torch_is_refused_by_name() -> None:
    from mpiddp.mpi import datatypes

    others = [d for d in every_dtype() if d not in PLAIN and d not in WIDENED]
    assert torch.float8_e4m3fn in others
    for dtype in others:
        with pytest.raises(TypeError, match=f"dtype {dtype} with ReduceOp.SUM"):
            datatypes.reduction(dtype, Op(Op.SUM))


def test_operations() -> None:
    from mpi4py import MPI

    from mpiddp.mpi import datatypes

    expected = {
        Op.SUM: MPI.SUM,
        Op.AVG: MPI.SUM,
        Op.PREMUL_SUM: MPI.SUM,
        Op.PRODUCT: MPI.PROD,
        Op.MIN: MPI.MIN,
        Op.MAX: MPI.MAX,
        Op.BAND: MPI.BAND,
        Op.BOR: MPI.BOR,
        Op.BXOR: MPI.BXOR,
    }
    assert set(expected) == set(Op.RedOpType.__members__.values())
    for op, operation in expected.items():
        # As torch passes it, and bare.
        assert datatypes.reduction(torch.int32, op).operation == operation
        if op != Op.PREMUL_SUM:  # has no constructor
            assert datatypes.reduction(torch.int32, Op(op)).operation == operation


def test_truth_values_are_logical() -> None:
    from mpi4py import MPI

    from mpiddp.mpi import datatypes

    for op, operation in {
        Op.SUM: MPI.LOR,
        Op.PRODUCT: MPI.LAND,
        Op.MIN: MPI.LAND,
        Op.MAX: MPI.LOR,
        Op.BAND: MPI.LAND,
        Op.BOR: MPI.LOR,
        Op.BXOR: MPI.LXOR,
    }.items():
        assert datatypes.reduction(torch.bool, op).operation == operation
    for op in (Op.AVG, Op.PREMUL_SUM):
        with pytest.raises(TypeError, match=rf"torch\.bool with ReduceOp\.{op.name}"):
            datatypes.reduction(torch.bool, op)


@pytest.mark.parametrize("op", [Op.BAND, Op.BOR, Op.BXOR], ids=name_of)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=name_of
)
def test_bits_of_floats_are_not_combined(dtype: torch.dtype, op: Any) -> None:
    from mpiddp.mpi import datatypes

    with pytest.raises(TypeError, match=rf"{dtype} with ReduceOp\.{op.name}"):
        datatypes.reduction(dtype, op)


@pytest.mark.parametrize("op", [Op.MIN, Op.MAX], ids=name_of)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32], ids=name_of)
def test_complex_numbers_are_not_ordered(dtype: torch.dtype, op: Any) -> None:
    from mpiddp.mpi import datatypes

    with pytest.raises(TypeError, match=rf"{dtype} with ReduceOp\.{op.name}"):
        datatypes.reduction(dtype, op)


@pytest.mark.essential
def test_message_names_what_can_be_reduced() -> None:
    from mpiddp.mpi import datatypes

    with pytest.raises(TypeError) as error:
        datatypes.reduction(torch.float8_e5m2, Op(Op.SUM))
    for dtype in (*PLAIN, *WIDENED):
        assert str(dtype) in str(error.value)


class TestBuffer:
    def test_counts_elements(self) -> None:
        from mpi4py import MPI

        from mpiddp.mpi import datatypes

        tensor = torch.arange(6, dtype=torch.float64)
        memory, count, datatype = datatypes.buffer_of(tensor, MPI.DOUBLE)
        assert (count, datatype) == (6, MPI.DOUBLE)
        assert memory.address == tensor.data_ptr()
        assert np.frombuffer(memory, np.float64).tolist() == tensor.tolist()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.bool], ids=name_of)
    def test_moves_any_dtype_as_bytes(self, dtype: torch.dtype) -> None:
        from mpi4py import MPI

        from mpiddp.mpi import datatypes

        tensor = torch.ones(7).to(dtype)
        memory, count, datatype = datatypes.buffer_of(tensor)
        assert (count, datatype) == (7 * dtype.itemsize, MPI.BYTE)
        assert memory.nbytes == count

    def test_starts_where_a_view_starts(self) -> None:
        from mpiddp.mpi import datatypes

        whole = torch.arange(10, dtype=torch.int32)
        memory, count, _ = datatypes.buffer_of(whole[4:7])
        assert memory.address == whole.data_ptr() + 16
        assert count == 12

    def test_nothing(self) -> None:
        from mpi4py import MPI

        from mpiddp.mpi import datatypes

        _, count, _ = datatypes.buffer_of(torch.empty(0), MPI.FLOAT)
        assert count == 0

    @pytest.mark.smoke
    def test_leaves_the_storage_resizable(self) -> None:
        # .numpy() would not.
        from mpiddp.mpi import datatypes

        tensor = torch.ones(3)
        datatypes.buffer_of(tensor)
        tensor.resize_(100)
        assert tensor.numel() == 100
