"""torch.distributed.split_group on groups of ours; torch has it for accelerators alone."""

import pytest
import torch
import torch.distributed as dist
from group_data import rank, size

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(60)]


@pytest.mark.smoke
def test_halves() -> None:
    halves = [list(range(size() // 2)), list(range(size() // 2, size()))]
    part = dist.split_group(split_ranks=halves, group_desc="half")
    members = halves[0] if rank() in halves[0] else halves[1]
    assert dist.get_process_group_ranks(part) == members
    tensor = torch.tensor([float(rank())])
    dist.all_reduce(tensor, group=part)
    assert tensor.item() == sum(members)
    # And one of the parts again, whose ranks count anew.
    if len(members) > 1:
        ones = [[index] for index in range(len(members))]
        alone = dist.split_group(part, ones)
        assert dist.get_process_group_ranks(alone) == [rank()]
        dist.destroy_process_group(alone)
    dist.destroy_process_group(part)


@pytest.mark.essential
def test_rank_in_no_part() -> None:
    part = dist.split_group(split_ranks=[[size() - 1, 0]])
    if rank() in (0, size() - 1):
        assert dist.get_process_group_ranks(part) == [0, size() - 1]
        dist.destroy_process_group(part)
    else:
        assert part is None


@pytest.mark.parametrize("wrong", [None, [], [[]], [[0, 0]], [[0], [0]], [[99]]])
def test_wrong_parts(wrong: list[list[int]] | None) -> None:
    with pytest.raises(ValueError, match=r"split|are not all ranks"):
        dist.split_group(split_ranks=wrong)


def test_other_backend_of_a_part() -> None:
    with pytest.raises(ValueError, match="not of 'gloo'"):
        dist.split_group(split_ranks=[[0, 1]], backend="gloo")
