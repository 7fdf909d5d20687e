"""The reductions besides all_reduce: reduce to one rank, reduce_scatter."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_versions
from group_data import (
    ARITHMETIC,
    BITWISE,
    COMPLEX,
    INTEGERS,
    REAL,
    Op,
    assert_same_bits,
    group,
    make,
    name_of,
    rank,
    reference,
    size,
)

from mpiddp.collectives import reductions

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

SOME = (torch.float32, torch.bfloat16, torch.complex128, torch.int8, torch.int64, torch.uint16)


def possible(dtype: torch.dtype, op: Any) -> bool:
    return not (
        (op in BITWISE and dtype not in INTEGERS) or (op in (Op.MIN, Op.MAX) and dtype.is_complex)
    )


CASES = [
    pytest.param(dtype, op, id=f"{name_of(dtype)}-{name_of(op)}")
    for dtype in SOME
    for op in (*ARITHMETIC, *BITWISE)
    if possible(dtype, op)
]


class TestReduce:
    @pytest.mark.essential(keep=3)
    @pytest.mark.parametrize(("dtype", "op"), CASES)
    def test_every_root(self, dtype: torch.dtype, op: Any) -> None:
        for root in range(size()):
            tensor = make(dtype, rank())
            dist.reduce(tensor, dst=root, op=op)
            # The others' tensors stay as they are.
            expected = reference(dtype, op, size()) if rank() == root else make(dtype, rank())
            assert_same_bits(tensor, expected)

    @pytest.mark.parametrize("dtype", REAL, ids=name_of)
    def test_as_gloo(self, gloo: Any, dtype: torch.dtype) -> None:
        ours, theirs = make(dtype, rank()), make(dtype, rank())
        dist.reduce(ours, dst=0)
        dist.reduce(theirs, dst=0, group=gloo)
        if rank() == 0:
            assert_same_bits(ours, theirs)

    def test_layouts(self) -> None:
        root = size() - 1
        transposed = make(torch.float32, rank(), 60).view(6, 10).t()
        dist.reduce(transposed, dst=root)
        if rank() == root:
            total = sum(make(torch.float32, seed, 60) for seed in range(size()))
            assert transposed.stride() == (1, 10)
            assert_same_bits(transposed, total.view(6, 10).t())
        nothing = torch.empty(0)
        dist.reduce(nothing, dst=root)
        number = torch.tensor(1.0)
        dist.reduce(number, dst=root)
        assert number.item() == (size() if rank() == root else 1)

    def test_factor(self) -> None:
        tensor = torch.full((3,), 2.0)
        options = dist.ReduceOptions()
        options.rootRank = 0
        options.reduceOp = dist._make_nccl_premul_sum(0.25)
        group().reduce([tensor], options).wait()
        assert tensor.tolist() == [0.5 * size() if rank() == 0 else 2.0] * 3

    def test_no_such_reduction(self) -> None:
        with pytest.raises(TypeError, match=r"float8_e5m2 with ReduceOp\.SUM"):
            dist.reduce(torch.ones(3).to(torch.float8_e5m2), dst=0)


class TestReduceScatter:
    @pytest.mark.essential(keep=3)
    @pytest.mark.parametrize(("dtype", "op"), CASES)
    def test_lists(self, dtype: torch.dtype, op: Any) -> None:
        # For rank r what a seed of its own gives, so that a part at a wrong rank shows.
        parts = [make(dtype, rank() + 10 * to) for to in range(size())]
        output = torch.empty_like(parts[0])
        dist.reduce_scatter(output, parts, op=op)
        expected = reference(dtype, op, size(), lambda d, seed: make(d, seed + 10 * rank()))
        assert_same_bits(output, expected)
        assert_same_bits(parts[0], make(dtype, rank()))  # inputs stay

    @pytest.mark.essential(keep=3)
    @pytest.mark.smoke(keep=1)
    @pytest.mark.parametrize(("dtype", "op"), CASES)
    def test_one_tensor(self, dtype: torch.dtype, op: Any) -> None:
        whole = torch.stack([make(dtype, rank() + 10 * to) for to in range(size())])
        output = torch.empty_like(whole[0])
        torch_versions.reduce_scatter_single(output, whole, op=op)
        expected = reference(dtype, op, size(), lambda d, seed: make(d, seed + 10 * rank()))
        assert_same_bits(output, expected)
        assert_same_bits(whole[0], make(dtype, rank()))

    @pytest.mark.essential
    def test_as_gloo(self, gloo: Any) -> None:
        whole = torch.cat([make(torch.float32, rank() + 10 * to) for to in range(size())])
        ours, theirs = torch.empty(61), torch.empty(61)
        torch_versions.reduce_scatter_single(ours, whole)
        torch_versions.reduce_scatter_single(theirs, whole, group=gloo)
        assert_same_bits(ours, theirs)

    def test_sizes_that_differ(self) -> None:
        parts = [torch.full((to, 2), float(rank() + 1)) for to in range(size())]
        output = torch.empty(rank(), 2)
        dist.reduce_scatter(output, parts)
        assert_same_bits(output, torch.full((rank(), 2), float(sum(range(1, size() + 1)))))

    def test_layouts(self) -> None:
        output = torch.zeros(4, 6)[:, ::2]
        dist.reduce_scatter(output, [make(torch.float32, rank(), 12).view(3, 4).t()] * size())
        total = sum(make(torch.float32, seed, 12) for seed in range(size()))
        assert_same_bits(output, total.view(3, 4).t())
        output = torch.empty(2, 6).t()
        whole = make(torch.float32, rank(), 12 * size()).view(2, 6 * size()).t()
        torch_versions.reduce_scatter_single(output, whole)
        totals = [make(torch.float32, seed, 12 * size()).view(2, -1).t() for seed in range(size())]
        assert_same_bits(output, sum(totals)[6 * rank() : 6 * rank() + 6])

    def test_several(self) -> None:
        outputs = [torch.empty(2), torch.empty(3, dtype=torch.int32)]
        inputs = [torch.ones(2 * size()), torch.ones(3 * size(), dtype=torch.int32)]
        group().reduce_scatter_single_coalesced(outputs, inputs).wait()
        assert_same_bits(outputs[0], torch.full((2,), float(size())))
        assert_same_bits(outputs[1], torch.full((3,), size(), dtype=torch.int32))

    def test_output_in_the_input(self) -> None:
        for own in range(size()):
            whole = torch.arange(2.0 * size())
            part = whole[2 * own : 2 * own + 2]  # another rank's as well
            torch_versions.reduce_scatter_single(part, whole)
            expected = size() * torch.arange(2.0 * size())[2 * rank() : 2 * rank() + 2]
            assert_same_bits(part, expected)
        parts = [torch.full((3,), float(to)) for to in range(size())]
        dist.reduce_scatter(parts[rank()], parts)
        assert_same_bits(parts[rank()], torch.full((3,), float(rank() * size())))

    def test_wrong_arguments(self) -> None:
        with pytest.raises(ValueError, match=rf"needs {size()} input .* {size() + 1}"):
            dist.reduce_scatter(torch.empty(1), [torch.ones(1)] * (size() + 1))
        with pytest.raises(ValueError, match=rf"of {3 * size()} elements, not 2"):
            torch_versions.reduce_scatter_single(torch.empty(3), torch.ones(2))
        with pytest.raises(ValueError, match="into an output of 2"):
            dist.reduce_scatter(torch.empty(2), [torch.ones(1)] * size())


class TestReduceScatterOfMuch(TestReduceScatter):
    """From some size on the ranks exchange their parts and add them up themselves."""

    @pytest.fixture(autouse=True)
    def any_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reductions, "_SUMMED_HERE", 0)


def test_much_is_added_in_order_of_ranks() -> None:
    """So that the bits are the same from run to run, whoever comes first."""
    count = 1 << 18
    generators = [torch.Generator().manual_seed(seed) for seed in range(size())]
    inputs = [torch.randn(size() * count, generator=generator) for generator in generators]
    output = torch.empty(count)
    torch_versions.reduce_scatter_single(output, inputs[rank()])
    expected = inputs[0].split(count)[rank()].clone()
    for tensor in inputs[1:]:
        expected += tensor.split(count)[rank()]
    assert_same_bits(output, expected)


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX, *INTEGERS], ids=name_of)
def test_several_at_once_keep_apart(dtype: torch.dtype) -> None:
    """Coalesced all_reduces of any dtypes that can be added give what numpy does."""
    expected = reference(dtype, Op.SUM, size())
    tensors = [make(dtype, rank()), make(dtype, rank()).view(-1, 1)]
    group().allreduce_coalesced(tensors).wait()
    assert_same_bits(tensors[0], expected)
    assert_same_bits(tensors[1], expected.view(-1, 1))
