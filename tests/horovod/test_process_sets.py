"""Process sets: given to init, added and removed later, and ranks outside of them."""

import random

import pytest
import torch
import torch.distributed as dist
from replicas import RANK, SIZE, gather, together

import mpiddp.horovod as hvd

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(60)]


@pytest.mark.essential
def test_the_set_of_all_ranks():
    whole = hvd.global_process_set
    with together():
        assert (whole.process_set_id, whole.ranks) == (0, list(range(SIZE)))
        assert (whole.size(), whole.rank(), whole.included()) == (SIZE, RANK, True)
        assert whole.group is not dist.group.WORLD
        assert dist.get_process_group_ranks(whole.group) == list(range(SIZE))
        assert not hvd.remove_process_set(whole)


@pytest.mark.mpi(min_size=3)
def test_operations_of_a_part():
    part = hvd.add_process_set([SIZE - 1, 0])
    ranks = [0, SIZE - 1]
    rest = hvd.add_process_set(hvd.ProcessSet(range(1, SIZE)))
    handles = []
    if RANK in ranks:
        mine = torch.tensor([float(RANK)])
        names = ["a", "b", "c"]
        random.Random(RANK).shuffle(names)
        handles = [hvd.allreduce_async(mine, name=name, process_set=part) for name in names]
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum)  # of all ranks, meanwhile
    with together():
        assert part.ranks == ranks
        assert part.size() == 2
        assert part.process_set_id > 0
        assert part.included() == (RANK in ranks)
        assert total.item() == SIZE
    if RANK in ranks:
        values = [hvd.synchronize(handle).item() for handle in handles]
        rows = hvd.allgather(torch.tensor([RANK]), process_set=part)
        root = hvd.broadcast(torch.tensor([RANK]), SIZE - 1, process_set=part)
        parts = hvd.reducescatter(torch.arange(2.0), op=hvd.Sum, process_set=part)
        swapped = hvd.alltoall(torch.tensor([RANK, RANK]), process_set=part)
        x = torch.ones(1, requires_grad=True)
        hvd.allgather(x, process_set=part).sum().backward()
        sent = hvd.broadcast_object(RANK, SIZE - 1, process_set=part)
        hvd.barrier(process_set=part)
    with together():
        if RANK in ranks:
            assert part.rank() == ranks.index(RANK) == part.group.rank()
            assert values == [(SIZE - 1) / 2] * 3
            assert rows.tolist() == ranks == swapped.tolist()
            assert root.item() == sent == SIZE - 1
            assert parts.item() == (0.0 if RANK == 0 else 2.0)
            assert x.grad.item() == 1
            with pytest.raises(ValueError, match="root_rank -1 is not in"):
                hvd.broadcast(torch.ones(1), -1, process_set=part)
        else:
            assert part.group is None
            with pytest.raises(ValueError, match="not in process set"):
                part.rank()
            with pytest.raises(ValueError, match="not in process set"):
                hvd.allreduce(torch.ones(1), process_set=part)
        with pytest.raises(NotImplementedError, match="all ranks only"):
            hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=part if RANK == 0 else rest)
    with together():
        assert hvd.remove_process_set(rest)
        assert not hvd.remove_process_set(rest)
        assert rest.process_set_id is None
        assert rest.size() is None
        assert hvd.remove_process_set(part)
        with pytest.raises(ValueError, match="not registered"):
            hvd.allreduce(torch.ones(1), process_set=part)


@pytest.mark.mpi(min_size=3)
def test_the_users_collectives_on_a_sets_group_do_not_mix_with_operations():
    part = hvd.add_process_set([0, 1])
    if RANK < 2:
        for place in range(10):
            handle = hvd.allreduce_async(torch.ones(1), name=f"m{place}", process_set=part)
            value = torch.ones(1)
            dist.all_reduce(value, group=part.group)
            hvd.synchronize(handle)
            assert value.item() == 2
    with together():
        assert hvd.remove_process_set(part)


def test_sets_that_cannot_be():
    with pytest.raises(hvd.HorovodInternalError, match=r"differ in the arguments of add_process"):
        hvd.add_process_set([0] if RANK == 0 else [1])
    for wrong in ([], [SIZE], [-1]):
        with pytest.raises(ValueError, match="needs ranks from 0 to"):
            hvd.add_process_set(wrong)
    with pytest.raises(ValueError, match="already"):
        hvd.add_process_set(range(SIZE))
    with pytest.raises(ValueError, match="needs ranks or an mpi4py communicator"):
        hvd.ProcessSet(["0"])
    with pytest.raises(ValueError, match="needs ranks or an mpi4py communicator"):
        hvd.ProcessSet(3)
    with together():
        assert hvd.allreduce(torch.ones(1)).item() == 1


def test_given_to_init():
    from mpi4py import MPI

    half = MPI.COMM_WORLD.Split(RANK % 2)
    first, mine = hvd.ProcessSet([0]), hvd.ProcessSet(half)
    others = hvd.ProcessSet(range(1 - RANK % 2, SIZE, 2))
    sets = [first, *([mine, others] if RANK % 2 == 0 else [others, mine])]
    if SIZE < 3:
        sets = sets[1:]  # the rank alone is a half here
    hvd.shutdown()
    hvd.init(process_sets=sets)
    mean = hvd.allreduce(torch.tensor([float(RANK)]), process_set=mine)
    with together():
        members = list(range(RANK % 2, SIZE, 2))
        assert mine.ranks == members
        assert mean.item() == sum(members) / len(members)
        assert len({each.process_set_id for each in sets}) == len(sets)
    hvd.shutdown()
    half.Free()
    with pytest.raises(ValueError, match="two sets of ranks"):
        hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0])])
    assert not hvd.is_initialized()
    with pytest.raises(hvd.HorovodInternalError, match="differ in the arguments of init"):
        hvd.init(process_sets=[hvd.ProcessSet([0 if RANK == 0 else 1])])
    hvd.init(process_sets="dynamic")
    gather(None)
