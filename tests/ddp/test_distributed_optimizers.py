"""Optimizers of torch.distributed around our class: sharded state, averaged models."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from models import CASES, loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    assert_close,
    assert_replicated,
    assert_same_bits,
    gather,
    share,
    together,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch warns of its own torch.jit.script
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

pytestmark = pytest.mark.mpi
several = pytest.mark.mpi(min_size=2)

SMALL_BUCKETS = 0.0005


def assert_same_parameters(ours: nn.Module, theirs: nn.Module, factor: float = 100) -> None:
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_close(own, other, name, factor)


class TestZeroRedundancyOptimizer:
    @pytest.mark.essential(keep=2)
    @pytest.mark.smoke(keep=1)
    @pytest.mark.parametrize("packed", [False, True], ids=["single", "packed"])
    @pytest.mark.parametrize("case", ["mlp", "attention"])
    def test_as_plain(self, case, packed, views, gloo):
        """The parameters of the optimizer that it shards, on torch's class."""
        module = CASES[case].make()
        ours = DDP(copy.deepcopy(module), gradient_as_bucket_view=views)
        theirs = TorchDDP(module, process_group=gloo)
        options = {"lr": 0.01, "betas": (0.8, 0.99)}
        sharded = ZeroRedundancyOptimizer(
            ours.parameters(), torch.optim.Adam, parameters_as_bucket_view=packed, **options
        )
        plain = torch.optim.Adam(theirs.parameters(), **options)
        for _ in range(4):
            batch = share(CASES[case].batch(2 * SIZE))
            for model, optimizer in ((ours, sharded), (theirs, plain)):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
            with together():
                assert_same_parameters(ours, theirs, 1e4)
            assert_replicated(ours)
        with together():
            held = sum(len(group["params"]) for group in sharded.optim.param_groups)
        if SIZE > 1:
            assert sum(gather(held)) == len(list(ours.parameters()))

    @several
    @pytest.mark.filterwarnings("ignore:Detected uneven input skew")
    @pytest.mark.parametrize("ends_first", [0, SIZE - 1], ids=["rank 0", "last rank"])
    def test_uneven_inputs(self, ends_first, views, gloo):
        """One Join for model and optimizer: ranks that have joined go on with their share."""
        module = mlp(3, 5, 2)
        distance = abs(RANK - ends_first)
        batches = torch.randn(SIZE, 2 * SIZE, 2, 3, dtype=torch.float64)[RANK, : 2 + distance]
        models = [
            DDP(copy.deepcopy(module), gradient_as_bucket_view=views),
            TorchDDP(module, process_group=gloo, gradient_as_bucket_view=views),
        ]
        for model, group in zip(models, (dist.group.WORLD, gloo), strict=True):
            sharded = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.Adam, process_group=group, lr=0.01
            )
            with Join([model, sharded]):
                for x in batches:
                    sharded.zero_grad()
                    loss_of(model, x).backward()
                    sharded.step()
        with together():
            assert len(batches) == 2 + distance
            assert_same_parameters(*models, 1e4)
        assert_same_bits(models[0].named_parameters())

    def test_state_goes_to_one_rank_and_back(self):
        model = mlp(3, 4, 2)
        wrapped = DDP(model)
        sharded = ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9
        )

        def step(optimizer: torch.optim.Optimizer) -> None:
            wrapped.zero_grad()
            loss_of(wrapped, torch.ones(2, 3, dtype=torch.float64) + RANK).backward()
            optimizer.step()

        step(sharded)
        sharded.consolidate_state_dict(to=SIZE - 1)
        saved = copy.deepcopy(sharded.state_dict()) if RANK == SIZE - 1 else None
        state = [saved]
        dist.broadcast_object_list(state, src=SIZE - 1)
        before = copy.deepcopy(model.state_dict())
        step(sharded)
        after = copy.deepcopy(model.state_dict())
        model.load_state_dict(before)
        loaded = ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9
        )
        loaded.load_state_dict(state[0])
        step(loaded)
        with together():
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, after[name]), name
        assert_replicated(wrapped)

    @pytest.mark.essential(keep=2)
    @several
    @pytest.mark.parametrize("sharded", [False, True], ids=["whole buckets", "parts of buckets"])
    @pytest.mark.parametrize(
        "overlap",
        [ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved],
        ids=["after the last bucket", "interleaved"],
    )
    def test_overlapped(self, overlap, sharded, views):
        """Against the plain optimizer; torch refuses to overlap on Gloo."""
        module = mlp(6, 20, 20, 9, 4)
        alone = copy.deepcopy(module)
        wrapped = DDP(module, gradient_as_bucket_view=views, bucket_cap_mb=SMALL_BUCKETS)
        options = {"lr": 0.1, "momentum": 0.9}
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.SGD, overlap_with_ddp=True, **options
        )
        hook = overlap(default_hooks.allreduce_hook, wrapped, optimizer, shard_buckets=sharded)
        wrapped.register_comm_hook(None, hook)
        plain = torch.optim.SGD(alone.parameters(), **options)
        for step in range(6):
            batch = torch.randn(2 * SIZE, 6, dtype=torch.float64)
            wrapped.zero_grad()
            loss_of(wrapped, share(batch)).backward()
            optimizer.step()  # does nothing: the hook has done it
            if step >= 2:  # before, it learns what the buckets are
                plain.zero_grad()
                loss_of(alone, batch).backward()
                plain.step()
            with together():
                assert_same_parameters(wrapped, alone)
            assert_replicated(wrapped)
        with together():
            assert len(wrapped.reducer.buckets) > 2


class TestModelAveraging:
    @pytest.mark.essential(keep=1)
    @pytest.mark.parametrize("steps", [1, 2])
    def test_post_local_sgd(self, steps, gloo):
        """Gradients are averaged for some steps, then models every other step."""
        module = mlp(3, 5, 2)
        models = [
            (DDP(copy.deepcopy(module)), dist.group.WORLD),
            (TorchDDP(module, process_group=gloo), gloo),
        ]
        optimizers = []
        for model, group in models:
            state = post_localSGD_hook.PostLocalSGDState(
                group, None, steps, post_local_gradient_allreduce=False
            )
            model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
            optimizers.append(
                PostLocalSGDOptimizer(
                    torch.optim.SGD(model.parameters(), lr=0.1),
                    averagers.PeriodicModelAverager(2, warmup_steps=steps, process_group=group),
                )
            )
        differed = False
        for _ in range(6):
            batch = torch.randn(2, 3, dtype=torch.float64) + RANK
            for (model, _group), optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
            with together():
                assert_same_parameters(models[0][0], models[1][0])
            everyone = gather(models[0][0].module[0].weight.tolist())
            differed |= any(one != everyone[0] for one in everyone)
        assert differed == (SIZE > 1)
        saved = optimizers[0].state_dict()
        with together():
            assert saved["step"] == 6
            optimizers[0].load_state_dict(saved)

    @several
    def test_hierarchy_of_groups(self, gloo):
        """Pairs average at every step, all ranks at every second."""
        if SIZE % 2:
            sizes: dict[int, int] = {2: SIZE}
        else:
            sizes = {1: 1, 2: SIZE} if SIZE == 2 else {1: 2, 2: SIZE}
        averager = HierarchicalModelAverager(sizes)
        model = nn.Linear(2, 1, bias=False)
        model.weight.grad = torch.zeros(1, 2)  # parameters without a gradient are left out
        for step in range(4):
            with torch.no_grad():
                model.weight.fill_(float(RANK + 10 * step))
            averager.average_parameters(model.parameters())
            if step % 2 == 0:
                expected = float(sum(range(SIZE))) / SIZE + 10 * step
            elif SIZE % 2 or SIZE == 2:
                expected = float(RANK + 10 * step)
            else:
                expected = RANK // 2 * 2 + 0.5 + 10 * step
            with together():
                assert model.weight.unique().tolist() == [expected]

    @several
    def test_gradients_in_subgroups(self):
        """After the first steps each half of the ranks averages for itself."""
        own, groups = dist.new_subgroups_by_enumeration(
            [list(range(SIZE // 2)), list(range(SIZE // 2, SIZE))]
        )
        wrapped = DDP(nn.Linear(2, 1, bias=False))
        state = post_localSGD_hook.PostLocalSGDState(None, own, 2)
        wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        halves = [range(SIZE // 2), range(SIZE // 2, SIZE)]
        mine = next(half for half in halves if RANK in half)
        for step in range(4):
            wrapped.zero_grad()
            wrapped(torch.full((1, 2), float(RANK))).sum().backward()
            among = range(SIZE) if step < 2 else mine
            with together():
                expected = torch.full((1, 2), sum(among) / len(among))
                assert_close(wrapped.module.weight.grad, expected, "gradient")
        del wrapped, state
        for group in groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
