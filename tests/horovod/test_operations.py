"""Each operation of Horovod against a value computed on one rank."""

import pytest
import torch
from replicas import RANK, SIZE, gather, together

import mpiddp.horovod as hvd

pytestmark = [pytest.mark.mpi, pytest.mark.sizes, pytest.mark.timeout(60)]

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)
SMALL_INTEGERS = (torch.uint8, torch.int8, torch.int16)


def of(rank: int, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (3, 2)):
    """Return the tensor of a rank: small integers, exact in every dtype."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 3 + 7 * rank) % 5 + 1).reshape(shape).to(dtype)


def everyone(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (3, 2)) -> torch.Tensor:
    return torch.stack([of(rank, torch.float64, shape) for rank in range(SIZE)])


def reduced(op: int, dtype: torch.dtype, shape: tuple[int, ...] = (3, 2)) -> torch.Tensor:
    whole = everyone(shape=shape)
    if op == hvd.Average:
        mean = whole.mean(0)
        return (mean if dtype.is_floating_point else mean.add(1e-9).trunc()).to(dtype)
    fold = {
        hvd.Sum: lambda: whole.sum(0),
        hvd.Min: lambda: whole.amin(0),
        hvd.Max: lambda: whole.amax(0),
        hvd.Product: lambda: whole.prod(0),
    }
    return fold[op]().to(dtype)


@pytest.mark.essential(keep=2)
@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product])
def test_allreduce(op):
    dtypes = DTYPES if op != hvd.Average else [t for t in DTYPES if t not in SMALL_INTEGERS]
    kept = [of(RANK, dtype) for dtype in dtypes]
    own = [tensor.clone() for tensor in kept]
    handles = [hvd.allreduce_async(tensor, op=op) for tensor in kept]
    handles += [hvd.allreduce_async_(tensor, op=op) for tensor in own]
    results = [hvd.synchronize(handle) for handle in handles]
    with together():
        assert all(a is b for a, b in zip(results[len(dtypes) :], own, strict=True))
        for place, dtype in enumerate([*dtypes, *dtypes]):
            assert results[place].dtype == dtype
            torch.testing.assert_close(results[place], reduced(op, dtype))
        assert all(torch.equal(tensor, of(RANK, tensor.dtype)) for tensor in kept)
    again = kept[0].clone()
    plain, in_place = hvd.allreduce(kept[0], op=op), hvd.allreduce_(again, op=op)
    with together():
        assert torch.equal(kept[0], of(RANK, DTYPES[0]))
        assert in_place is again
        torch.testing.assert_close(plain, reduced(op, DTYPES[0]))
        torch.testing.assert_close(again, plain)


def test_average_is_the_default_and_integers_are_cut():
    negative = hvd.allreduce(torch.tensor([-1 if RANK == 0 else 0, 2 * RANK]))
    with together():
        assert torch.equal(hvd.allreduce(of(RANK)), everyone().mean(0))
        # Towards zero, as C does.
        assert negative.tolist() == [-1 if SIZE == 1 else 0, SIZE - 1]


def test_an_average_of_integers_is_right_or_refused():
    """The sum of all ranks fits in no int32; smaller integers Horovod does not average."""
    large = torch.tensor([2**31 - 1 - 2 * RANK, -(2**31) + 2 * RANK], dtype=torch.int32)
    alone = hvd.allreduce(large)
    own = large.clone()
    fused = [
        hvd.allreduce_async_(own, name="large"),
        hvd.allreduce_async(large.view(1, 2), name="more"),
        hvd.grouped_allreduce_async([large, large[:1]], name="both"),
    ]
    results = [alone, *(hvd.synchronize(handle) for handle in fused)]
    rows = hvd.reducescatter(large.repeat_interleave(SIZE))
    mean = torch.tensor([2**31 - SIZE, -(2**31) + SIZE - 1], dtype=torch.int32)
    with together():
        assert torch.equal(results[0], mean)
        assert results[1] is own
        assert torch.equal(own, mean)
        assert torch.equal(results[2], mean.view(1, 2))
        assert torch.equal(results[3][0], mean)
        assert torch.equal(results[3][1], mean[:1])
        assert torch.equal(rows, mean.repeat_interleave(SIZE)[2 * RANK : 2 * RANK + 2])
        for dtype in SMALL_INTEGERS:
            value = torch.ones(4 * SIZE, dtype=dtype)
            for refused in (
                lambda value=value: hvd.allreduce(value),
                lambda value=value: hvd.allreduce_async_(value),
                lambda value=value: hvd.grouped_allreduce([torch.ones(2), value]),
                lambda value=value: hvd.reducescatter(value, op=hvd.Average),
            ):
                with pytest.raises(ValueError, match=r"hvd\.Average is not for torch"):
                    refused()
            assert (hvd.allreduce(value, op=hvd.Sum) == SIZE).all()


def test_the_deprecated_average_argument():
    with pytest.warns(DeprecationWarning, match="average"):
        total = hvd.allreduce(of(RANK), average=False)
    with pytest.warns(DeprecationWarning, match="average"):
        mean = hvd.allreduce_(of(RANK), average=True)
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(of(RANK), average=True, op=hvd.Sum)
    with together():
        assert torch.equal(total, everyone().sum(0))
        assert torch.equal(mean, everyone().mean(0))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_factors(op):
    floats = hvd.allreduce(of(RANK), op=op, prescale_factor=0.5, postscale_factor=3.0)
    whole = hvd.allreduce(of(RANK, torch.int32), op=op, prescale_factor=2.5, postscale_factor=0.5)
    expected = (everyone() * 2.5).trunc().sum(0) * (0.5 / (SIZE if op == hvd.Average else 1))
    parts = hvd.reducescatter(of(RANK), op=op, prescale_factor=0.5, postscale_factor=3.0)
    with together():
        torch.testing.assert_close(floats, reduced(op, torch.float64) * 1.5)
        assert torch.equal(whole, (expected + 1e-9).trunc().int())
        rows = [*torch.tensor_split(reduced(op, torch.float64) * 1.5, SIZE)][RANK]
        torch.testing.assert_close(parts, rows)


def test_compression():
    wide = torch.full((4,), 1.0 + 2.0**-12, dtype=torch.float64)  # not a float16
    narrow = hvd.allreduce(wide, compression=hvd.Compression.fp16)
    same = hvd.allreduce(wide, compression=hvd.Compression.none)
    counts = hvd.allreduce(torch.tensor([5]), compression=hvd.Compression.fp16)
    parts = hvd.reducescatter(wide, compression=hvd.Compression.fp16)
    groups = hvd.grouped_allreduce([wide, wide], compression=hvd.Compression.fp16)
    with together():
        assert torch.equal(narrow, torch.ones(4, dtype=torch.float64))
        assert torch.equal(same, wide)
        assert counts.tolist() == [5]
        assert counts.dtype == torch.int64
        assert parts.dtype == torch.float64
        assert (parts == 1).all()
        assert [group.tolist() for group in groups] == [[1.0] * 4] * 2


def test_strides_and_empty_tensors():
    odd = of(RANK, shape=(4, 6))[::2, 1::2]
    mean = hvd.allreduce(odd)
    hvd.allreduce_(odd, op=hvd.Sum)
    nothing = hvd.allreduce(torch.empty(0, 3))
    scalar = hvd.allreduce(torch.tensor(float(RANK)), op=hvd.Sum)
    whole = everyone(shape=(4, 6))[:, ::2, 1::2]
    with together():
        torch.testing.assert_close(mean, whole.mean(0))
        assert torch.equal(odd, whole.sum(0))
        assert nothing.shape == (0, 3)
        assert scalar.shape == ()
        assert scalar == sum(range(SIZE))


def test_grouped_allreduce():
    shapes = [(2, 3), (4,), ()]
    mine = [of(RANK, shape=shape) for shape in shapes] + [of(RANK, torch.int32)]
    expected = [everyone(shape=shape).sum(0) for shape in shapes] + [everyone().sum(0).int()]
    plain = hvd.grouped_allreduce(mine, op=hvd.Sum)
    later = hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Sum, name="group"))
    kept = [tensor.clone() for tensor in mine]
    in_place = hvd.grouped_allreduce_(mine, op=hvd.Sum)
    others = [tensor.clone() for tensor in kept]
    hvd.synchronize(hvd.grouped_allreduce_async_(others, op=hvd.Sum))
    with together():
        assert kept[3].tolist() == of(RANK, torch.int32).tolist()
        assert isinstance(plain, list)
        assert isinstance(later, tuple)
        assert all(a is b for a, b in zip(in_place, mine, strict=True))
        for results in (plain, later, in_place, others):
            for result, value in zip(results, expected, strict=True):
                assert torch.equal(result, value)


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_allgather(dtype):
    mine = of(RANK, dtype, (RANK + 1, 2))
    plain = hvd.allgather(mine)
    later = hvd.synchronize(hvd.allgather_async(mine, name="rows"))
    pair = hvd.grouped_allgather([mine, of(RANK, dtype, (2,))])
    handle = hvd.grouped_allgather_async([mine])
    rows = torch.cat([of(rank, dtype, (rank + 1, 2)) for rank in range(SIZE)])
    flat = torch.cat([of(rank, dtype, (2,)) for rank in range(SIZE)])
    with together():
        assert plain.dtype == dtype
        for result in (plain, later, pair[0], hvd.synchronize(handle)[0]):
            assert torch.equal(result, rows)
        assert torch.equal(pair[1], flat)


def test_allgather_of_nothing_on_some_ranks():
    result = hvd.allgather(of(RANK, shape=(2 * (RANK % 2), 3)))
    with together():
        expected = [of(rank, shape=(2, 3)) for rank in range(1, SIZE, 2)]
        assert torch.equal(result, torch.cat([torch.empty(0, 3, dtype=torch.float64), *expected]))


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_broadcast(dtype):
    for root in range(SIZE):
        mine = of(RANK, dtype)
        plain = hvd.broadcast(mine, root)
        later = hvd.synchronize(hvd.broadcast_async(mine, root, name="b"))
        kept = mine.clone()
        in_place = hvd.broadcast_(mine, root)
        other = kept.clone()
        hvd.synchronize(hvd.broadcast_async_(other, root_rank=root))
        with together():
            assert torch.equal(kept, of(RANK, dtype))
            assert in_place is mine
            for result in (plain, later, in_place, other):
                assert torch.equal(result, of(root, dtype))


@pytest.mark.essential
def test_alltoall():
    equal = hvd.alltoall(torch.arange(SIZE * 2) + 100 * RANK)
    splits = [(RANK + rank) % 3 for rank in range(SIZE)]
    rows = of(RANK, shape=(sum(splits) + 1, 2))  # the last goes nowhere
    output, received = hvd.alltoall(rows, splits=torch.tensor(splits))
    later, counts = hvd.synchronize(hvd.alltoall_async(rows, splits, name="x"))
    _, without = hvd.synchronize(hvd.alltoall_async(torch.arange(SIZE)))
    expected = []
    for rank in range(SIZE):
        theirs = [(rank + other) % 3 for other in range(SIZE)]
        start = sum(theirs[:RANK])
        whole = of(rank, shape=(sum(theirs) + 1, 2))
        expected.append(whole[start : start + theirs[RANK]])
    with together():
        assert equal.tolist() == [
            100 * rank + 2 * RANK + place for rank in range(SIZE) for place in range(2)
        ]
        assert torch.equal(output, torch.cat(expected))
        assert torch.equal(later, output)
        assert received.tolist() == [len(part) for part in expected] == counts.tolist()
        assert received.dtype == torch.int64
        assert counts.dtype == torch.int32
        assert without.tolist() == [1] * SIZE


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int32], ids=str)
def test_reducescatter(op, dtype):
    shape = (2 * SIZE + 1, 3)  # the first rank gets a row more
    mine = of(RANK, dtype, shape)
    plain = hvd.reducescatter(mine, op=op)
    later = hvd.synchronize(hvd.reducescatter_async(mine, op=op, name="r"))
    pair = hvd.grouped_reducescatter([mine, of(RANK, dtype, (SIZE,))], op=op)
    single = hvd.synchronize(hvd.grouped_reducescatter_async([mine], op=op))
    expected = torch.tensor_split(reduced(op, dtype, shape), SIZE)[RANK]
    with together():
        assert torch.equal(mine, of(RANK, dtype, shape))
        for result in (plain, later, pair[0], single[0]):
            assert result.dtype == dtype
            torch.testing.assert_close(result, expected)
        torch.testing.assert_close(pair[1], reduced(op, dtype, (SIZE,))[RANK : RANK + 1])


def test_reducescatter_with_fewer_rows_than_ranks():
    result = hvd.reducescatter(of(RANK, shape=(1, 2)), op=hvd.Sum)
    with together():
        whole = everyone(shape=(1, 2)).sum(0)
        assert torch.equal(result, whole if RANK == 0 else whole[1:])


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_sparse_allreduce(op):
    indices = torch.tensor([[0, RANK % 4], [1, 2]])
    values = torch.tensor([1.0, RANK + 1.0])
    mine = torch.sparse_coo_tensor(indices, values, (4, 3), is_coalesced=False)
    wait = hvd.sparse_allreduce_async(mine, "sparse", op)
    result = hvd.synchronize(wait)
    with together():
        dense = torch.stack(gather(mine.to_dense())).sum(0)
        expected = dense / SIZE if op == hvd.Average else dense
        torch.testing.assert_close(result.to_dense(), expected)


@pytest.mark.essential
def test_objects():
    objects = hvd.allgather_object({"rank": RANK, "list": [None] * RANK}, name="objects")
    from_last = hvd.broadcast_object(("of", RANK) if RANK == SIZE - 1 else None, SIZE - 1)
    with together():
        assert objects == [{"rank": rank, "list": [None] * rank} for rank in range(SIZE)]
        assert from_last == ("of", SIZE - 1)


def test_adasum():
    if SIZE & (SIZE - 1):
        with pytest.raises(NotImplementedError, match="power of two"):
            hvd.allreduce(of(RANK), op=hvd.Adasum)
        return

    def pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dot = (a * b).sum()
        return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b

    tensors = [of(rank) - 2.5 for rank in range(SIZE)]
    while len(tensors) > 1:
        tensors = [pair(*tensors[at : at + 2]) for at in range(0, len(tensors), 2)]
    result = hvd.allreduce(of(RANK) - 2.5, op=hvd.Adasum)
    several = hvd.grouped_allreduce_([of(RANK) - 2.5, torch.zeros(3)], op=hvd.Adasum)
    with together():
        torch.testing.assert_close(result, tensors[0])
        torch.testing.assert_close(several[0], tensors[0])
        assert not several[1].any()
        assert len({str(bits.tolist()) for bits in gather(result)}) == 1


@pytest.mark.essential
def test_sync_batch_norm():
    torch.manual_seed(4)
    whole = torch.randn(3 * SIZE, 4, dtype=torch.float64)
    ours = hvd.SyncBatchNorm(4).double()
    plain = torch.nn.BatchNorm1d(4).double()
    mine = whole[3 * RANK : 3 * RANK + 3].clone().requires_grad_()
    output = ours(mine)
    expected_input = whole.clone().requires_grad_()
    expected = plain(expected_input)
    (output**3).sum().backward()
    (expected**3).sum().backward()
    with together():
        assert ours.process_group is None
        torch.testing.assert_close(output, expected[3 * RANK : 3 * RANK + 3])
        torch.testing.assert_close(mine.grad, expected_input.grad[3 * RANK : 3 * RANK + 3])
        torch.testing.assert_close(ours.running_var, plain.running_var)


def test_what_cannot_be_done():
    """A wrong argument is a ValueError, as in Horovod: elastic training does not try it again."""
    with together():
        with pytest.raises(ValueError, match="no average"):
            hvd.allreduce(torch.tensor([True]))
        with pytest.raises(ValueError, match="cannot reduce"):
            hvd.allreduce(torch.ones(2, dtype=torch.complex64), op=hvd.Min)
        with pytest.raises(ValueError, match="sparse_allreduce_async"):
            hvd.allreduce(torch.eye(2).to_sparse())
        with pytest.raises(ValueError, match="sparse COO"):
            hvd.sparse_allreduce_async(torch.ones(2), "dense", hvd.Sum)
        with pytest.raises(hvd.HorovodInternalError, match=r"Average and hvd\.Sum"):
            hvd.reducescatter(torch.ones(2), op=hvd.Max)
        with pytest.raises(ValueError, match="root_rank 77 is not"):
            hvd.broadcast(torch.ones(2), 77)
        with pytest.raises(ValueError, match="as many splits as ranks"):
            hvd.alltoall(torch.ones(2), [1] * (SIZE + 1))
        with pytest.raises(ValueError, match="do not fit"):
            hvd.alltoall(torch.ones(SIZE), [2] * SIZE)
        if SIZE > 1:
            with pytest.raises(ValueError, match="cannot divide"):
                hvd.alltoall(torch.ones(SIZE + 1))
        with pytest.raises(ValueError, match="list of integers"):
            hvd.alltoall(torch.ones(SIZE), torch.ones(SIZE))
        with pytest.raises(ValueError, match="no rows to divide"):
            hvd.reducescatter(torch.tensor(1.0), op=hvd.Sum)
        with pytest.raises(ValueError, match="at least one tensor"):
            hvd.grouped_allreduce([])
    with pytest.raises(hvd.HorovodInternalError, match="without dimensions"):
        hvd.synchronize(hvd.allgather_async(torch.tensor(1.0)))
