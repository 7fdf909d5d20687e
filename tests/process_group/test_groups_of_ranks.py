"""Whose gradients are averaged: groups, communicators of mpi4py, meshes, and a change of group."""

import pytest
import torch
import torch.distributed as dist
from models import loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    assert_gradients_close,
    assert_replicated,
    gather,
    gradients_of,
    mean_of_ranks,
    share,
    together,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi


def step(model: torch.nn.Module) -> None:
    model.zero_grad()
    x = torch.full((2, 3), RANK + 1.0, dtype=torch.float64)
    model(x).sum().backward()


def weight_gradient(model: DDP) -> float:
    gradient = model.module[0].weight.grad
    assert gradient is not None
    return float(gradient[0, 0])


class TestCommunicator:
    """process_group is a communicator of mpi4py."""

    def test_of_all_ranks_is_the_world(self):
        from mpi4py import MPI

        own = MPI.COMM_WORLD.Dup()
        wrapped = DDP(mlp(3, 2), process_group=own)
        own.Free()  # it is not kept
        step(wrapped)
        with together():
            assert wrapped.process_group is dist.group.WORLD
            assert wrapped.join_process_group is dist.group.WORLD
            assert weight_gradient(wrapped) == SIZE + 1

    @pytest.mark.essential(keep=1)
    @pytest.mark.mpi(min_size=2)
    def test_of_some_ranks_in_another_order(self, views):
        """Rank 0 of the communicator is the one whose model counts."""
        from mpi4py import MPI

        half = MPI.COMM_WORLD.Split(RANK % 2, key=-RANK)
        members = half.allgather(RANK)
        torch.manual_seed(RANK)
        module = mlp(3, 2)
        before = gather(module[0].weight.detach().clone())
        wrapped = DDP(module, process_group=half, gradient_as_bucket_view=views)
        again = DDP(mlp(3, 2), process_group=half)
        for _ in range(2):
            step(wrapped)
        with together():
            assert dist.get_process_group_ranks(wrapped.process_group) == members
            assert wrapped.process_group.rank() == half.Get_rank()
            assert again.process_group is wrapped.process_group
            assert torch.equal(module[0].weight, before[members[0]])
            assert weight_gradient(wrapped) == pytest.approx(2 * (sum(members) / len(members) + 1))
        half.Free()

    def test_of_all_ranks_in_another_order(self):
        from mpi4py import MPI

        reverse = MPI.COMM_WORLD.Split(0, key=-RANK)
        wrapped = DDP(mlp(3, 2), process_group=reverse)
        step(wrapped)
        with together():
            assert wrapped.process_group.rank() == SIZE - 1 - RANK
            assert weight_gradient(wrapped) == SIZE + 1
        reverse.Free()

    def test_that_cannot_be_used(self):
        from mpi4py import MPI

        with together(), pytest.raises(ValueError, match=r"COMM_NULL"):
            DDP(mlp(3, 2), process_group=MPI.COMM_NULL)

    @pytest.mark.mpi(min_size=2)
    def test_between_two_groups(self):
        from mpi4py import MPI

        half = MPI.COMM_WORLD.Split(min(RANK, 1))
        between = half.Create_intercomm(0, MPI.COMM_WORLD, 1 if RANK == 0 else 0)
        with together(), pytest.raises(ValueError, match=r"intercommunicator; merge it"):
            DDP(mlp(3, 2), process_group=between)
        between.Free()
        half.Free()


class TestMesh:
    @pytest.mark.essential
    def test_of_one_dimension(self, gloo):
        mesh = init_device_mesh("cpu", (SIZE,))
        pair = (
            DDP(mlp(3, 4, 2), device_mesh=mesh),
            TorchDDP(mlp(3, 4, 2), process_group=gloo),
        )
        pair[1].load_state_dict(pair[0].state_dict())
        for _ in range(3):
            x = share(torch.randn(2 * SIZE, 3, dtype=torch.float64))
            for model in pair:
                model.zero_grad()
                loss_of(model, x).backward()
            with together():
                assert_gradients_close(*map(gradients_of, pair))
        with together():
            assert pair[0].device_mesh is mesh
            assert pair[0].process_group.size() == SIZE

    @pytest.mark.mpi(min_size=2)
    def test_slice_of_a_larger_mesh(self):
        if SIZE % 2:
            shape, row = (1, SIZE), list(range(SIZE))
        else:
            shape = (2, SIZE // 2)
            row = [RANK // shape[1] * shape[1] + column for column in range(shape[1])]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
        wrapped = DDP(mlp(3, 2), device_mesh=mesh["inner"])
        step(wrapped)
        with together():
            assert weight_gradient(wrapped) == pytest.approx(2 * (sum(row) / len(row) + 1))


class TestUpdateProcessGroup:
    @pytest.mark.essential(keep=1)
    @pytest.mark.mpi(min_size=2)
    def test_fewer_ranks_and_all_again(self, views):
        """The gradients are means over the ranks of the group that was set last."""
        everyone = dist.group.WORLD
        fewer = dist.new_group(list(range(SIZE - 1)))
        wrapped = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views)
        for group, size in ((everyone, SIZE), (fewer, SIZE - 1), (everyone, SIZE)):
            wrapped._update_process_group(group)
            if size == SIZE or RANK < SIZE - 1:
                for _ in range(3):
                    step(wrapped)
                assert wrapped.process_group is group
                assert wrapped.reducer.has_rebuilt_buckets
        assert_replicated(wrapped)
        truth = mean_of_ranks(
            wrapped.module,
            lambda module, rank: module(torch.full((2, 3), rank + 1.0, dtype=torch.float64)).sum(),
        )
        with together():
            assert_gradients_close(gradients_of(wrapped), truth)
        if RANK < SIZE - 1:
            dist.destroy_process_group(fewer)

    @pytest.mark.mpi(min_size=2)
    def test_mean_over_fewer_ranks(self, views):
        fewer = dist.new_group(list(range(SIZE - 1)))
        wrapped = DDP(mlp(3, 2), gradient_as_bucket_view=views, static_graph=True)
        step(wrapped)
        wrapped._update_process_group(fewer)
        if RANK < SIZE - 1:
            for _ in range(3):
                step(wrapped)
            assert weight_gradient(wrapped) == pytest.approx(SIZE)
            dist.destroy_process_group(fewer)
        with together():
            assert wrapped.static_graph

    @pytest.mark.essential
    @pytest.mark.mpi(min_size=2)
    def test_recognised_hook_follows(self):
        """A hook that was registered without a group serves the group that is set."""
        everyone = dist.new_group(list(range(SIZE)))
        alone = [dist.new_group([rank]) for rank in range(SIZE)][RANK]
        wrapped = DDP(mlp(3, 2), process_group=everyone)
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        for group, mean in ((everyone, SIZE + 1), (alone, 2 * (RANK + 1))):
            wrapped._update_process_group(group)
            step(wrapped)
            with together():
                assert weight_gradient(wrapped) == pytest.approx(mean)
        dist.destroy_process_group(alone)
        dist.destroy_process_group(everyone)

    def test_gloo_is_refused(self, gloo):
        wrapped = DDP(mlp(3, 2))
        with together(), pytest.raises(TypeError, match="not gloo"):
            wrapped._update_process_group(gloo)
        step(wrapped)
        with together():
            assert weight_gradient(wrapped) == SIZE + 1


@pytest.mark.essential
def test_remove_autograd_hooks(gloo):
    """Gradients stay this rank's own from then on."""
    for model in (DDP(mlp(3, 2)), TorchDDP(mlp(3, 2), process_group=gloo)):
        step(model)
        model._remove_autograd_hooks()
        with model.no_sync():
            step(model)
        with together():
            assert weight_gradient(model) == 2 * (RANK + 1)


@pytest.mark.essential
def test_check_reducer_finalized(gloo):
    for model in (DDP(mlp(3, 2)), TorchDDP(mlp(3, 2), process_group=gloo)):
        for _ in range(2):
            step(model)
            model._check_reducer_finalized()
        model(torch.ones(2, 3, dtype=torch.float64))
