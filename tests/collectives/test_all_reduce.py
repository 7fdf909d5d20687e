"""All-reduce of the process group, for every dtype and operation, dense and sparse."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_versions
from group_data import (
    ARITHMETIC,
    BITWISE,
    COMPLEX,
    EIGHT_BIT_FLOATS,
    INTEGERS,
    REAL,
    Op,
    as_numpy,
    assert_same_bits,
    assert_same_on_all_ranks,
    group,
    make,
    name_of,
    random_bits,
    rank,
    reference,
    size,
)

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def reductions() -> Iterator[Any]:
    for dtype in (*REAL, *INTEGERS, torch.bool):
        for op in (*ARITHMETIC, *BITWISE):
            if (op in BITWISE and dtype in REAL) or (op == Op.AVG and dtype is torch.bool):
                continue
            yield pytest.param(dtype, op, id=f"{name_of(dtype)}-{name_of(op)}")
    for dtype in COMPLEX:
        for op in (Op.SUM, Op.AVG):
            yield pytest.param(dtype, op, id=f"{name_of(dtype)}-{name_of(op)}")


class TestAllReduce:
    @pytest.mark.essential(keep=8)
    @pytest.mark.smoke(keep=2)
    @pytest.mark.parametrize(("dtype", "op"), list(reductions()))
    def test_every_dtype_and_operation(self, dtype: torch.dtype, op: Any) -> None:
        tensor = make(dtype, rank())
        dist.all_reduce(tensor, op)
        assert_same_bits(tensor, reference(dtype, op, size()))

    @pytest.mark.parametrize("op", [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, *BITWISE], ids=name_of)
    @pytest.mark.parametrize("dtype", INTEGERS, ids=name_of)
    def test_integers_wrap_around_like_torchs(self, dtype: torch.dtype, op: Any) -> None:
        tensor = random_bits(dtype, rank())
        dist.all_reduce(tensor, op)
        assert_same_bits(tensor, reference(dtype, op, size(), random_bits))

    @pytest.mark.essential(keep=1)
    @pytest.mark.parametrize("count", [1, 3, 1000, 300_000])
    @pytest.mark.parametrize("op", [Op.MIN, Op.MAX], ids=name_of)
    @pytest.mark.parametrize("dtype", REAL, ids=name_of)
    def test_a_nan_is_the_smallest_and_the_largest(
        self, dtype: torch.dtype, op: Any, count: int
    ) -> None:
        """As torch has it. And all ranks get the same zero."""
        whole = [(torch.arange(count) % 7 + each).to(dtype) for each in range(size())]
        for each, part in enumerate(whole):
            part[(each + count // 2) % count] = torch.nan
            part[each % count] = -0.0 if each else 0.0
        stack = torch.stack(whole)
        expected = stack.amin(0) if op == Op.MIN else stack.amax(0)
        own = whole[rank()]
        here = slice(rank() * count, (rank() + 1) * count)
        scattered = torch.empty_like(own)
        torch_versions.reduce_scatter_single(scattered, torch.cat([own] * size()), op)
        everywhere = own.repeat(size())
        dist.all_reduce(everywhere, op)
        reduced = own.clone()
        dist.reduce(reduced, 0, op)
        found = [scattered, everywhere[here], *([reduced] if rank() == 0 else [])]
        for each in found:
            torch.testing.assert_close(each, expected, rtol=0, atol=0, equal_nan=True)
        assert_same_on_all_ranks(everywhere.nan_to_num(nan=-1))

    @pytest.mark.parametrize("dtype", COMPLEX, ids=name_of)
    def test_complex_tensors_given_to_the_group(self, dtype: torch.dtype) -> None:
        # torch's front end takes complex tensors apart, and refuses their product.
        for op in (Op.SUM, Op.PRODUCT):
            tensor = make(dtype, rank())
            options = dist.AllreduceOptions()
            options.reduceOp = op
            group().allreduce([tensor], options).wait()
            assert_same_bits(tensor, reference(dtype, op, size()))

    @pytest.mark.essential(keep=1)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
    def test_16_bit_floats_are_not_added_as_bytes(self, dtype: torch.dtype) -> None:
        tensor = torch.tensor([1.5], dtype=dtype)
        dist.all_reduce(tensor)
        assert tensor.item() == 1.5 * size()

    @pytest.mark.mpi(min_size=3)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
    def test_16_bit_floats_are_rounded_once(self, dtype: torch.dtype) -> None:
        # One rank after the other in 16 bits, the small ones would be lost in the large one.
        small = torch.finfo(dtype).eps / 2
        tensor = torch.tensor([1.0 if rank() == 0 else small], dtype=dtype)
        dist.all_reduce(tensor)
        assert_same_bits(tensor, torch.tensor([1 + (size() - 1) * small]).to(dtype))
        assert tensor.item() > 1

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
    def test_16_bit_floats_overflow_only_at_the_end(self, dtype: torch.dtype) -> None:
        largest = torch.finfo(dtype).max
        tensor = torch.full((3,), largest, dtype=dtype)
        dist.all_reduce(tensor, Op.AVG)
        assert_same_bits(tensor, torch.full((3,), largest, dtype=dtype))

    @pytest.mark.parametrize("dtype", EIGHT_BIT_FLOATS, ids=name_of)
    def test_unknown_dtype_is_refused_by_name(self, dtype: torch.dtype) -> None:
        with pytest.raises(TypeError, match=rf"{dtype}.*ReduceOp\.SUM"):
            dist.all_reduce(make(dtype, rank()))

    @pytest.mark.parametrize(
        ("dtype", "op"),
        [
            (torch.float32, Op.BAND),
            (torch.float64, Op.BOR),
            (torch.bfloat16, Op.BXOR),
            (torch.bool, Op.AVG),
        ],
        ids=name_of,
    )
    def test_impossible_operation_is_refused_by_name(self, dtype: torch.dtype, op: Any) -> None:
        with pytest.raises(TypeError, match=rf"{dtype} with ReduceOp\.{name_of(op)}"):
            dist.all_reduce(make(dtype, rank()), op)

    def test_complex_has_no_order(self) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = Op.MAX
        with pytest.raises(TypeError, match=r"torch\.complex64 with ReduceOp\.MAX"):
            group().allreduce([make(torch.complex64, rank())], options)

    @pytest.mark.essential(keep=1)
    @pytest.mark.parametrize("dtype", REAL, ids=name_of)
    def test_premultiplied_sum(self, dtype: torch.dtype) -> None:
        tensor = make(dtype, rank())
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(float(rank() + 1)))
        parts = [as_numpy(make(dtype, seed)) * (seed + 1) for seed in range(size())]
        assert_same_bits(tensor, torch.from_numpy(np.add.reduce(parts)).to(dtype))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
    def test_premultiplied_sum_by_a_tensor(self, dtype: torch.dtype) -> None:
        tensor = make(dtype, rank())
        factor = torch.tensor([0.5], dtype=torch.float64)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
        expected = reference(dtype, Op.SUM, size()) / 2
        assert_same_bits(tensor, expected)

    def test_premultiplied_sum_of_integers_is_right_or_refused(self) -> None:
        tensor = torch.tensor([1, 2, 3], dtype=torch.int32)
        with contextlib.suppress(TypeError):
            dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0))
            tensor.div_(2 * size(), rounding_mode="floor")
        assert tensor.tolist() == [1, 2, 3]

    def test_layouts(self) -> None:
        expected = reference(torch.float32, Op.SUM, size())
        transposed = make(torch.float32, rank())[:60].view(6, 10).t()
        dist.all_reduce(transposed)
        assert transposed.stride() == (1, 10)
        assert_same_bits(transposed, expected[:60].view(6, 10).t())

        whole = make(torch.bfloat16, rank())
        dist.all_reduce(whole[1::3])
        assert_same_bits(whole[1::3], reference(torch.bfloat16, Op.SUM, size())[1::3])
        assert_same_bits(whole[::3], make(torch.bfloat16, rank())[::3])

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
    def test_small_shapes(self, shape: tuple[int, ...]) -> None:
        tensor = torch.full(shape, float(rank() + 1))
        dist.all_reduce(tensor)
        assert_same_bits(tensor, torch.full(shape, float(sum(range(1, size() + 1)))))

    def test_conjugated_and_negated(self) -> None:
        conjugated = make(torch.complex64, rank()).conj()
        group().allreduce([conjugated]).wait()
        expected = reference(torch.complex64, Op.SUM, size()).conj()
        # Equal, not of equal bits: the sign of a zero depends on when one conjugates.
        assert torch.equal(conjugated, expected)
        negated = make(torch.complex64, rank()).conj().imag
        dist.all_reduce(negated)
        assert torch.equal(negated, expected.imag)

    def test_several_tensors(self) -> None:
        tensors = [make(torch.float64, rank()), make(torch.int32, rank())]
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = Op.MAX
        group().allreduce_coalesced(tensors, options).wait()
        for tensor in tensors:
            assert_same_bits(tensor, reference(tensor.dtype, Op.MAX, size()))

    def test_random_floats_give_the_same_bits_everywhere_and_again(self) -> None:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            values = torch.randn(10_007, generator=torch.Generator().manual_seed(rank()))
            first, second = values.to(dtype), values.to(dtype)
            dist.all_reduce(first)
            dist.all_reduce(second)
            assert_same_bits(first, second)
            assert_same_on_all_ranks(first)

    @pytest.mark.parametrize("layout", ["meta", "csr"])
    def test_other_memory_is_refused(self, layout: str) -> None:
        if layout == "meta":
            with pytest.raises(ValueError, match="on meta"):
                dist.all_reduce(torch.ones(1, device="meta"))
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensor = torch.eye(2).to_sparse_csr()
        with pytest.raises(TypeError, match=r"sparse_csr"):
            dist.all_reduce(tensor)


class TestAllReduceLikeGloo:
    @pytest.mark.essential(keep=4)
    @pytest.mark.parametrize(
        ("dtype", "op"),
        [
            pytest.param(dtype, op, id=f"{name_of(dtype)}-{name_of(op)}")
            for dtype, ops in {
                torch.float32: (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX),
                torch.float64: (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX),
                # Gloo rounds to 16 bits after each rank: their products differ.
                torch.float16: (Op.SUM, Op.MIN, Op.MAX),
                torch.bfloat16: (Op.SUM, Op.MIN, Op.MAX),
                torch.complex64: (Op.SUM, Op.AVG),
                torch.complex128: (Op.SUM, Op.AVG),
                torch.int8: (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, *BITWISE),
                torch.uint8: (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, *BITWISE),
                torch.int32: (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, *BITWISE),
                torch.int64: (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, *BITWISE),
            }.items()
            for op in ops
        ],
    )
    def test_same_result(self, gloo: Any, dtype: torch.dtype, op: Any) -> None:
        ours, theirs = make(dtype, rank()), make(dtype, rank())
        dist.all_reduce(ours, op)
        dist.all_reduce(theirs, op, group=gloo)
        assert_same_bits(ours, theirs)


class TestSparseAllReduce:
    def sparse(self, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a matrix of rows with repeated indices, the more, the higher `seed`."""
        indices = torch.arange(3 * seed).remainder(5).view(1, -1)
        values = make(dtype, seed, 6 * seed).view(-1, 2)
        return torch.sparse_coo_tensor(indices, values, (7, 2), check_invariants=True)

    @pytest.mark.essential(keep=1)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=name_of)
    def test_sum(self, dtype: torch.dtype) -> None:
        # Rank 0 has no entry at all.
        tensor = self.sparse(rank(), dtype)
        dist.all_reduce(tensor)
        assert tensor.layout is torch.sparse_coo
        dense = [self.sparse(seed, dtype).to_dense().float() for seed in range(size())]
        expected = torch.stack(dense).sum(0).to(dtype)
        assert_same_bits(tensor.to_dense(), expected)
        assert_same_on_all_ranks(tensor.coalesce().values())
        assert_same_on_all_ranks(tensor.coalesce().indices())

    def test_random_values_give_the_same_bits_on_all_ranks(self) -> None:
        generator = torch.Generator().manual_seed(rank())
        indices = torch.randint(0, 20, (2, 50), generator=generator)
        values = torch.randn(50, generator=generator)
        tensor = torch.sparse_coo_tensor(indices, values, (20, 20), check_invariants=True)
        dist.all_reduce(tensor)
        assert_same_on_all_ranks(tensor.to_dense())

    def test_nothing_on_any_rank(self) -> None:
        tensor = self.sparse(0)
        dist.all_reduce(tensor)
        assert tensor._nnz() == 0
        assert tensor.shape == (7, 2)

    def test_other_operations_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"sparse tensors .* ReduceOp\.SUM"):
            dist.all_reduce(self.sparse(1), Op.MAX)
