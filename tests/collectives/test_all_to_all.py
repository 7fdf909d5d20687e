"""all_to_all: lists, one tensor, splits that differ."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_data import EVERY, assert_same_bits, group, make, name_of, rank, size

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def sent(dtype: torch.dtype, source: int, to: int, count: int) -> torch.Tensor:
    return make(dtype, 10 * source + to, count)


@pytest.mark.essential(keep=2)
@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize("dtype", EVERY, ids=name_of)
def test_every_dtype(dtype: torch.dtype) -> None:
    output = torch.empty(6 * size(), dtype=dtype)
    whole = torch.cat([sent(dtype, rank(), to, 6).view(torch.uint8) for to in range(size())])
    group().all_to_all_single(output, whole.view(dtype)).wait()
    for source, part in enumerate(output.split(6)):
        assert_same_bits(part, sent(dtype, source, rank(), 6))
    # Lists, and sizes that differ: to rank r, r elements from each.
    outputs = [torch.empty(rank(), dtype=dtype) for _ in range(size())]
    group().alltoall(outputs, [sent(dtype, rank(), to, to) for to in range(size())]).wait()
    for source, part in enumerate(outputs):
        assert_same_bits(part, sent(dtype, source, rank(), rank()))


@pytest.mark.essential
def test_splits_as_gloo(gloo: Any) -> None:
    # From s to r: (s + r) % 3 rows; some none.
    splits_in = [(rank() + to) % 3 for to in range(size())]
    splits_out = [(source + rank()) % 3 for source in range(size())]
    rows = make(torch.float32, rank(), 2 * sum(splits_in)).view(-1, 2)
    ours, theirs = torch.empty(sum(splits_out), 2), torch.empty(sum(splits_out), 2)
    dist.all_to_all_single(ours, rows, splits_out, splits_in)
    dist.all_to_all_single(theirs, rows, splits_out, splits_in, group=gloo)
    assert_same_bits(ours, theirs)


def test_layouts() -> None:
    whole = make(torch.float32, rank(), 12 * size()).view(2, -1).t()
    output = torch.empty(2, 6 * size()).t()
    dist.all_to_all_single(output, whole)
    for source in range(size()):
        theirs = make(torch.float32, source, 12 * size()).view(2, -1).t()
        assert_same_bits(output.split(6)[source], theirs.split(6)[rank()])
    outputs = [torch.zeros(8)[::2] for _ in range(size())]
    dist.all_to_all(outputs, [make(torch.float32, rank(), 8)[::2]] * size())
    for source, part in enumerate(outputs):
        assert_same_bits(part, make(torch.float32, source, 8)[::2])


def test_one_element_of_any_stride() -> None:
    """It is contiguous, as nothing is, yet torch views it as bytes only if its stride is one."""
    last = size() - 1
    sent = [int(rank() == 0 and to == last) for to in range(size())]
    received = [int(rank() == last and source == 0) for source in range(size())]
    tensor = torch.full((sum(sent), 2), 7.0)[:, 0]
    output = torch.zeros(sum(received), 2)[:, 0]
    dist.all_to_all_single(output, tensor, received, sent)
    assert output.tolist() == [7.0] * sum(received)


def test_nothing() -> None:
    output = torch.empty(0, 3)
    dist.all_to_all_single(output, torch.empty(0, 3))
    dist.all_to_all([torch.empty(0)] * size(), [torch.empty(0)] * size())


def test_wrong_arguments(gloo: Any) -> None:
    wrong = [
        # Rows that cannot be divided, splits that do not add up, too many of them.
        (torch.empty(size()), torch.ones(size() + 1), [], []),
        (torch.empty(size()), torch.ones(size()), [1] * size(), [2] * size()),
        (torch.empty(size()), torch.ones(size()), [1] * (size() + 1), [1] * size()),
    ]
    for output, whole, splits_out, splits_in in wrong if size() > 1 else wrong[1:]:
        for each in (gloo, group()):
            with pytest.raises(RuntimeError):
                dist.all_to_all_single(output, whole, splits_out, splits_in, group=each)
    with pytest.raises(ValueError, match=rf"needs {size()} input .* {size() + 1}"):
        dist.all_to_all([torch.empty(1)] * size(), [torch.ones(1)] * (size() + 1))
