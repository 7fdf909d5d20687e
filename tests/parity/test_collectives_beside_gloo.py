"""Programs of collectives drawn at random write what they write on Gloo."""

import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_data import size
from random_collectives import draw_program, has_this_rank, run_on_gloo, run_together
from replicas import together

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes, pytest.mark.timeout(300)]

PROGRAMS = 25
PARTS = 8  # 200 programs in all

Groups = tuple[list[Any], list[Any]]


def members() -> list[list[int]]:
    """Return the ranks of each group: all, all again, and three with some of them."""
    every = list(range(size()))
    return [every, every, every[:-1], every[1:], sorted({0, size() - 1})]


@pytest.fixture(scope="module")
def groups(gloo: Any) -> Iterator[Groups]:
    """Return groups of ours and of Gloo."""
    limit = timedelta(seconds=60)
    ours = [dist.new_group(ranks, timeout=limit) for ranks in members()]
    others = [dist.new_group(ranks, timeout=limit, backend="gloo") for ranks in members()]
    yield ours, others
    for group in [*ours, *others]:
        if has_this_rank(group):
            dist.destroy_process_group(group)


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_program_writes_what_gloo_writes(part: int, groups: Groups) -> None:
    ours, others = groups
    for seed in range(part * PROGRAMS, (part + 1) * PROGRAMS):
        program = draw_program(random.Random(seed), len(ours))
        with together():
            actual, expected = run_together(program, ours), run_on_gloo(program, others)
            called = [each for each in program if has_this_rank(ours[each.group])]
            for call, written, wanted in zip(called, actual, expected, strict=True):
                for one, other in zip(written, wanted, strict=True):
                    assert torch.equal(one, other), (seed, call)
