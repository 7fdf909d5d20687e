"""The process group's collectives, compared with what all ranks' known inputs give."""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

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


class TestBroadcast:
    @pytest.mark.parametrize("dtype", EVERY, ids=name_of)
    def test_every_root_and_dtype(self, dtype: torch.dtype) -> None:
        for root in range(size()):
            tensor = make(dtype, rank())
            dist.broadcast(tensor, src=root)
            assert_same_bits(tensor, make(dtype, root))
            # torch turns complex and 8-bit tensors into others; the group takes them itself, too.
            tensor = make(dtype, rank())
            options = dist.BroadcastOptions()
            options.rootRank = root
            group().broadcast([tensor], options).wait()
            assert_same_bits(tensor, make(dtype, root))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e5m2], ids=name_of)
    def test_layouts(self, dtype: torch.dtype) -> None:
        root = size() - 1
        transposed = make(dtype, rank(), 60).view(6, 10).t()
        dist.broadcast(transposed, src=root)
        assert transposed.stride() == (1, 10)
        assert_same_bits(transposed, make(dtype, root, 60).view(6, 10).t())

        images = (
            make(dtype, rank(), 120).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
        )
        dist.broadcast(images, src=root)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert_same_bits(images, make(dtype, root, 120).view(2, 3, 4, 5))

        whole = make(dtype, rank(), 60)
        dist.broadcast(whole[::2], src=root)
        assert_same_bits(whole[::2], make(dtype, root, 60)[::2])
        assert_same_bits(whole[1::2], make(dtype, rank(), 60)[1::2])

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
    def test_small_shapes(self, shape: tuple[int, ...]) -> None:
        tensor = torch.full(shape, float(rank()))
        dist.broadcast(tensor, src=size() - 1)
        assert_same_bits(tensor, torch.full(shape, float(size() - 1)))

    def test_conjugated_and_negated(self) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = size() - 1
        conjugated = make(torch.complex64, rank()).conj()
        group().broadcast([conjugated], options)
        assert_same_bits(conjugated, make(torch.complex64, size() - 1).conj())
        negated = make(torch.complex64, rank()).conj().imag
        assert negated.is_neg()
        dist.broadcast(negated, src=size() - 1)
        assert_same_bits(negated, make(torch.complex64, size() - 1).conj().imag)

    def test_parameter(self) -> None:
        parameter = torch.nn.Parameter(torch.full((5,), float(rank())))
        dist.broadcast(parameter, src=0)
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert_same_bits(parameter.detach(), torch.zeros(5))

    def test_several_tensors(self) -> None:
        tensors = [make(torch.float32, rank()), make(torch.int64, rank())]
        group().broadcast(tensors, dist.BroadcastOptions()).wait()
        assert_same_bits(tensors[0], make(torch.float32, 0))
        assert_same_bits(tensors[1], make(torch.int64, 0))


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

    @pytest.mark.parametrize("dtype", COMPLEX, ids=name_of)
    def test_complex_tensors_given_to_the_group(self, dtype: torch.dtype) -> None:
        # torch's front end takes complex tensors apart, and refuses their product.
        for op in (Op.SUM, Op.PRODUCT):
            tensor = make(dtype, rank())
            options = dist.AllreduceOptions()
            options.reduceOp = op
            group().allreduce([tensor], options)
            assert_same_bits(tensor, reference(dtype, op, size()))

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
        if dtype is torch.bfloat16:
            largest /= 8  # its exponents end where those of float32 do
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
        group().allreduce([conjugated])
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


class TestAllGather:
    @pytest.mark.parametrize("dtype", EVERY, ids=name_of)
    def test_lists_of_every_dtype(self, dtype: torch.dtype) -> None:
        source = make(dtype, rank())
        output = [torch.empty_like(source) for _ in range(size())]
        group().allgather([output], [source]).wait()
        for seed, part in enumerate(output):
            assert_same_bits(part, make(dtype, seed))
        if dtype not in EIGHT_BIT_FLOATS:
            output = [torch.empty_like(source) for _ in range(size())]
            dist.all_gather(output, source)
            for seed, part in enumerate(output):
                assert_same_bits(part, make(dtype, seed))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.bool], ids=name_of)
    def test_sizes_that_differ(self, dtype: torch.dtype) -> None:
        # None from rank 0, then one more from each.
        output = [torch.empty(seed, 3, dtype=dtype) for seed in range(size())]
        dist.all_gather(output, make(dtype, rank(), 3 * rank()).view(-1, 3))
        for seed, part in enumerate(output):
            assert_same_bits(part, make(dtype, seed, 3 * seed).view(-1, 3))

    def test_layouts(self) -> None:
        output = [torch.empty(6, 10).t() for _ in range(size())]
        dist.all_gather(output, make(torch.float32, rank(), 60).view(10, 6))
        for seed, part in enumerate(output):
            assert part.stride() == (1, 10)
            assert_same_bits(part, make(torch.float32, seed, 60).view(10, 6))
        dist.all_gather(output, make(torch.float32, rank(), 60).view(6, 10).t())
        for seed, part in enumerate(output):
            assert_same_bits(part, make(torch.float32, seed, 60).view(6, 10).t())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=name_of)
    def test_single_tensor(self, dtype: torch.dtype) -> None:
        expected = torch.cat([make(dtype, seed, 6) for seed in range(size())])
        for shape, own in (((size() * 6,), (6,)), ((size(), 6), (6,)), ((size() * 2, 3), (2, 3))):
            output = torch.empty(shape, dtype=dtype)
            dist.all_gather_single(output, make(dtype, rank(), 6).view(own))
            assert_same_bits(output, expected.view(shape))

    @pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.* is deprecated")
    def test_into_tensor(self) -> None:
        output = torch.empty(size(), 2, dtype=torch.int64)
        dist.all_gather_into_tensor(output, torch.tensor([rank(), 7]))
        assert output.tolist() == [[seed, 7] for seed in range(size())]

    def test_single_tensor_that_is_not_contiguous(self) -> None:
        output = torch.zeros(3, 2 * size()).t()[::2]
        group().all_gather_single(output, make(torch.float32, rank(), 3))
        expected = [make(torch.float32, seed, 3) for seed in range(size())]
        assert_same_bits(output, torch.stack(expected))

    def test_wrong_number_of_outputs(self) -> None:
        output = [torch.empty(1) for _ in range(size() + 1)]
        with pytest.raises(ValueError, match=rf"{size()} output tensors, .*not {size() + 1}"):
            dist.all_gather(output, torch.ones(1))
        with pytest.raises(ValueError, match=rf"needs .* of {2 * size()} elements, not 9"):
            dist.all_gather_single(torch.empty(9), torch.ones(2))

    def test_own_output_of_another_size(self) -> None:
        output = [torch.full((3,), -1.0) for _ in range(size())]
        with pytest.raises(ValueError, match="3"):
            dist.all_gather(output, torch.ones(1))

    def test_output_of_another_dtype(self) -> None:
        with pytest.raises((TypeError, ValueError), match="float64"):
            group().all_gather_single(torch.zeros(size(), dtype=torch.float64), torch.ones(1))

    def test_objects(self) -> None:
        everyone: list[Any] = [None] * size()
        dist.all_gather_object(everyone, {"rank": rank(), "text": "x" * 10 ** (rank() + 1)})
        assert [entry["rank"] for entry in everyone] == list(range(size()))
        assert [len(entry["text"]) for entry in everyone] == [10 ** (r + 1) for r in range(size())]
        assert group().allgather_objects(rank()) == list(range(size()))

    def test_broadcast_objects(self) -> None:
        for root in range(size()):
            objects: list[Any] = [rank(), {"from": rank()}, "x" * 1000 * rank()]
            dist.broadcast_object_list(objects, src=root)
            assert objects == [root, {"from": root}, "x" * 1000 * root]


class TestBarrier:
    def test_nobody_leaves_before_the_last_one_came(self) -> None:
        dist.barrier()
        if rank() == size() - 1:
            time.sleep(0.3)
        came = time.monotonic()  # the same clock for all processes of a machine
        dist.barrier()
        left = time.monotonic()
        times = group().allgather_objects((came, left))
        assert min(left for _, left in times) >= max(came for came, _ in times)


class TestWork:
    def started(self) -> dict[str, tuple[Any, Any]]:
        """Return each collective's Work and what its future must hold."""
        summed, copied = torch.ones(3), torch.full((3,), float(rank()))
        gathered = [torch.empty(1) for _ in range(size())]
        single = torch.empty(size())
        return {
            "all_reduce": (dist.all_reduce(summed, async_op=True), [summed]),
            "broadcast": (dist.broadcast(copied, src=0, async_op=True), [copied]),
            "all_gather": (dist.all_gather(gathered, torch.ones(1), async_op=True), [gathered]),
            "all_gather_single": (
                dist.all_gather_single(single, torch.ones(1), async_op=True),
                [single],
            ),
            "barrier": (dist.barrier(async_op=True), []),
        }

    def test_is_work(self) -> None:
        for name, (work, result) in self.started().items():
            assert isinstance(work, dist.Work), name
            assert work.wait(), name
            assert work.is_completed(), name
            assert work.get_future().done(), name
            value = work.get_future().value()
            assert len(value) == len(result), name
            for got, expected in zip(value, result, strict=True):
                if isinstance(expected, list):
                    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True)), name
                else:
                    assert got.data_ptr() == expected.data_ptr(), name

    def test_future_runs_what_is_chained_to_it(self) -> None:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        halved = work.get_future().then(lambda future: future.value()[0] / size())
        assert torch.equal(halved.wait(), torch.ones(3))

    def test_result_is_there_after_wait(self) -> None:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, async_op=True).wait()
        assert torch.equal(tensor, torch.full((3,), float(size())))


class TestGroups:
    def test_default_group_has_torch_names(self) -> None:
        assert dist.get_backend() == "mpiddp"
        assert group().getBackendName() == "mpiddp"
        assert group().group_name
        assert dist.get_process_group_ranks(group()) == list(range(size()))

    @pytest.mark.parametrize(
        "ranks",
        [
            pytest.param(lambda n: [0], id="first"),
            pytest.param(lambda n: [n - 1], id="last"),
            pytest.param(lambda n: [0, 1], id="two"),
            pytest.param(lambda n: list(range(0, n, 2)), id="even"),
            pytest.param(lambda n: list(range(1, n)), id="all-but-first"),
            pytest.param(lambda n: list(range(n)), id="all"),
        ],
    )
    @pytest.mark.mpi(min_size=2)
    def test_subset(self, ranks: Callable[[int], list[int]]) -> None:
        members = ranks(size())
        part = dist.new_group(members)
        if rank() not in members:
            assert part is dist.GroupMember.NON_GROUP_MEMBER
            assert dist.get_rank(part) == -1
        else:
            assert dist.get_rank(part) == members.index(rank())
            assert dist.get_world_size(part) == len(members)
            tensor = torch.tensor([float(rank())])
            dist.all_reduce(tensor, group=part)
            assert tensor.item() == sum(members)
            copied = torch.tensor([float(rank())])
            dist.broadcast(copied, src=members[-1], group=part)  # a rank of the world
            assert copied.item() == members[-1]
            dist.broadcast(copied, group_src=0, group=part)
            assert copied.item() == members[-1]
            everyone: list[Any] = [None] * len(members)
            dist.all_gather_object(everyone, rank(), group=part)
            assert everyone == members
            dist.destroy_process_group(part)
        dist.barrier()

    @pytest.mark.mpi(min_size=3)
    def test_subset_made_by_its_members_alone(self) -> None:
        members = [1, 2]
        if rank() in members:
            part = dist.new_group(members, use_local_synchronization=True)
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=part)
            assert tensor.item() == 2
            dist.destroy_process_group(part)
        dist.barrier()

    def test_many_groups_made_and_destroyed(self) -> None:
        from mpi4py import MPI

        for index in range(50):
            part = dist.new_group()
            tensor = torch.full((1,), float(index))
            dist.all_reduce(tensor, group=part)
            assert tensor.item() == index * size()
            communicator = part.communicator
            dist.destroy_process_group(part)
            assert communicator == MPI.COMM_NULL  # freed

    def test_gloo_group(self, gloo: Any) -> None:
        tensor = torch.tensor([float(rank())])
        dist.all_reduce(tensor, group=gloo)
        assert tensor.item() == sum(range(size()))
        everyone: list[Any] = [None] * size()
        dist.all_gather_object(everyone, rank(), group=gloo)
        assert everyone == list(range(size()))
        last = dist.new_group([size() - 1], backend="gloo")
        if rank() == size() - 1:
            dist.all_reduce(tensor, group=last)
            assert tensor.item() == sum(range(size()))
            dist.destroy_process_group(last)

    def test_store_is_shared(self) -> None:
        store = group().get_group_store()
        store.set(f"of rank {rank()}", str(rank()))
        for other in range(size()):
            assert store.get(f"of rank {other}") == str(other).encode()
        dist.barrier()


@pytest.mark.mpi(min_size=2)
class TestTimeout:
    @pytest.mark.parametrize("name", ["all_reduce", "barrier"])
    def test_rank_that_comes_late(self, name: str) -> None:
        part = dist.new_group(timeout=timedelta(seconds=0.4))

        def call() -> None:
            if name == "barrier":
                dist.barrier(group=part)
            else:
                dist.all_reduce(torch.ones(1), group=part)

        dist.barrier()
        began = time.monotonic()
        if rank() == size() - 1:
            time.sleep(1.2)
            # The others gave up waiting, but their part of the operation had begun: it ends.
            call()
        else:
            with pytest.raises(RuntimeError, match=rf"rank {rank()} of {size()}: {name} .*0\.4 s"):
                call()
            assert time.monotonic() - began < 1.1
        dist.barrier()
        # The operation that nobody waits for any more has to end before the job does.
        assert group().allgather_objects(rank()) == list(range(size()))

    def test_set_timeout(self) -> None:
        part = dist.new_group(timeout=timedelta(seconds=50))
        part.set_timeout(timedelta(seconds=0.3))
        assert part.timeout == timedelta(seconds=0.3)
        dist.destroy_process_group(part)


def test_what_is_not_offered_says_so() -> None:
    """Collectives that DDP does not need fail on every rank at once, and hang nobody."""
    for call in (
        lambda: dist.reduce(torch.ones(1), 0),
        lambda: dist.all_to_all_single(torch.ones(size()), torch.ones(size())),
        lambda: dist.scatter(torch.ones(1), [torch.ones(1)] * size() if rank() == 0 else None),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            call()
