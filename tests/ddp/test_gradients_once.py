"""Means that lie once for the ranks of a node, where these share parameters, beside plain ones."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import loss_of, mlp
from optimizer_pairs import assert_same_parameters
from replicas import RANK, assert_same_bits, batch_of, share, together
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer
from mpiddp.system import memory_files
from mpiddp.transports.shared_buckets import SharedBuckets

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes]

# So that a model has many buckets.
SMALL = 0.01


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(30, 70, 60, 50, 60, 40, 3, dtype=torch.float32)


def both(make: Callable[[], nn.Module] = deep, **settings: Any) -> list[tuple[DDP, Any]]:
    """Return a plain model and one that shares, each with its optimizer."""
    plain = DDP(make(), bucket_cap_mb=SMALL, **settings)
    shared = DDP(make(), bucket_cap_mb=SMALL, shared_parameters=True, **settings)
    kind = torch.optim.AdamW
    return [
        (plain, kind(plain.parameters(), lr=0.01)),
        (shared, NodeOptimizer(shared, kind, lr=0.01)),
    ]


def batch(step: int) -> Tensor:
    torch.manual_seed(step)
    return share(batch_of(3, 30))


def assert_lie_once(model: DDP) -> None:
    with together():
        assert len(model.reducer.buckets) > 4
        assert all(bucket.common is not None for bucket in model.reducer.buckets)


def own_elements(model: DDP) -> int:
    return sum(
        stop - start for bucket in model.reducer.buckets for start, stop in bucket.own_elements()
    )


def assert_same_gradients(models: list[tuple[DDP, Any]]) -> None:
    (plain, _), (shared, _) = models
    for p, q in zip(plain.parameters(), shared.parameters(), strict=True):
        with together():
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)


@pytest.mark.essential
def test_reading_takes_no_memory() -> None:
    """Only what a rank writes is its own, until the next backward."""
    models = both()
    shared, optimizer = models[1]
    assert_lie_once(shared)
    for step in range(3):
        for model, each in models:
            each.zero_grad()
            loss_of(model, batch(step)).backward()
        assert_same_gradients(models)
        with together():
            assert own_elements(shared) == 0
        optimizer.clip_grad_norm_(0.01)
        with together():
            assert own_elements(shared) == 0
        nn.utils.clip_grad_norm_(models[0][0].parameters(), 0.01)
        for p, q in zip(models[0][0].parameters(), shared.parameters(), strict=True):
            with together():
                torch.testing.assert_close(q.grad, p.grad)
        if RANK == 0:
            with torch.no_grad():
                next(shared.module.parameters()).grad.mul_(2).div_(2)
        with together():
            assert (own_elements(shared) > 0) == (RANK == 0)
        # Where a rank has written, too, it finds scaled gradients.
        found = optimizer.clip_grad_norm_(1e-3)
        with together():
            assert found > 1e-3
        assert_same_bits((name, p.grad) for name, p in shared.named_parameters())


def test_torch_clips() -> None:
    models = both()
    for step in range(4):
        for model, optimizer in models:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, batch(step)).backward()
        assert_same_gradients(models)
        for model, optimizer in models:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        assert_same_gradients(models)
    assert_same_parameters(models[1][0], models[0][0])


class TestAClipThatIsPutOff:
    """What a program does between torch's clip by norm and the step."""

    def pair(self) -> list[tuple[DDP, Any]]:
        models = both()
        for model, _ in models:
            loss_of(model, batch(0)).backward()
        return models

    def clip(self, model: DDP) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    def step(self, models: list[tuple[DDP, Any]]) -> None:
        for _, optimizer in models:
            optimizer.step()
        assert_same_gradients(models)
        assert_same_parameters(models[1][0], models[0][0])
        with together():
            assert "grad" not in vars(nn.Parameter)

    @pytest.mark.essential
    def test_no_rank_writes(self) -> None:
        models = self.pair()
        for model, _ in models:
            self.clip(model)
        for _, optimizer in models:
            optimizer.step()
        with together():
            assert own_elements(models[1][0]) == 0
        assert_same_gradients(models)
        assert_same_parameters(models[1][0], models[0][0])

    def test_is_read(self) -> None:
        models = self.pair()
        for model, _ in models:
            self.clip(model)
        assert_same_gradients(models)
        self.step(models)

    def test_is_read_by_one_rank(self) -> None:
        models = self.pair()
        for model, _ in models:
            self.clip(model)
        if RANK == 0:
            weights = [model.module[2].weight for model, _ in models]
            assert torch.equal(weights[0].grad, weights[1].grad)
        self.step(models)

    @pytest.mark.parametrize("alias", [lambda g: g, lambda g: g.view(-1), lambda g: g.numpy()])
    def test_was_taken_before(self, alias: Callable[[Tensor], Any]) -> None:
        models = self.pair()
        taken = [[alias(p.grad) for p in model.parameters()] for model, _ in models]
        for model, _ in models:
            self.clip(model)
        for mine, theirs in zip(*taken, strict=True):
            with together():
                assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))
        del taken, mine, theirs
        self.step(models)

    def test_norm_first(self) -> None:
        models = self.pair()
        for model, _ in models:
            parameters = list(model.parameters())
            norm = nn.utils.get_total_norm([p.grad for p in parameters])
            nn.utils.clip_grads_with_norm_(parameters, 0.01, norm)
        self.step(models)

    def test_twice(self) -> None:
        models = self.pair()
        norms = []
        for model, optimizer in models:
            self.clip(model)
            norms += [self.clip(model), nn.utils.clip_grad_norm_(model.parameters(), 1e-3)]
            if isinstance(optimizer, NodeOptimizer):
                norms.append(optimizer.gradient_norm())
            else:
                norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        with together():
            torch.testing.assert_close(norms[3:], norms[:3])
        self.step(models)

    def test_is_changed(self) -> None:
        models = self.pair()
        for model, _ in models:
            self.clip(model)
            first, second, third, fourth, *_ = model.parameters()
            first.grad *= 2
            second.grad = second.grad + 1
            third.grad = None
            fourth.grad = torch.ones_like(fourth)
            with together():
                assert third.grad is None
                assert fourth.grad.eq(1).all()
        self.step(models)

    def test_something_is_added(self) -> None:
        """By a backward that is not reduced, and by one that is."""
        models = self.pair()
        for model, _ in models:
            self.clip(model)
            sum(p.square().sum() for p in model.module.parameters()).backward()
        assert_same_gradients(models)
        for model, _ in models:
            self.clip(model)
            loss_of(model, batch(1)).backward()
        assert_same_gradients(models)
        self.step(models)

    @pytest.mark.parametrize("none", [False, True])
    def test_without_a_step(self, none: bool) -> None:
        models = self.pair()
        for model, optimizer in models:
            self.clip(model)
            optimizer.zero_grad(set_to_none=none)
            loss_of(model, batch(1)).backward()
        assert_same_gradients(models)
        self.step(models)

    def test_a_part_of_the_parameters(self) -> None:
        models = self.pair()
        for model, _ in models:
            nn.utils.clip_grad_norm_(model.module[0].parameters(), 0.01)
            nn.utils.clip_grad_norm_(list(model.module[4].parameters()), 0.02)
        self.step(models)

    def test_ranks_clip_to_other_norms(self) -> None:
        """Each has what it has written, and steps its part with it, as without sharing."""
        _, (model, optimizer) = self.pair()
        before = [p.grad.clone() for p in model.parameters()]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-4 * (RANK + 1))
        optimizer.step()
        factor = 1e-4 * (RANK + 1) / (norm + 1e-6)
        with together():
            torch.testing.assert_close(
                [p.grad for p in model.parameters()], [g * factor for g in before]
            )

    def test_ranks_without_inputs(self) -> None:
        models = both()
        for model, optimizer in models:
            with model.join():
                for step in range(2 + 2 * RANK):
                    optimizer.zero_grad()
                    loss_of(model, batch(step)).backward()
                    self.clip(model)
                    optimizer.step()
        assert_same_parameters(models[1][0], models[0][0])

    def test_other_changes_are_refused_without_inputs(self) -> None:
        _, (model, optimizer) = self.pair()
        nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        with together(), model.join(), pytest.raises(RuntimeError, match="changed within join"):
            optimizer.step()


def test_accumulation() -> None:
    """In all the ways: without a reduction, after one, and without a zero_grad."""
    models = both()
    for step in range(4):
        for model, optimizer in models:
            if step != 2:
                optimizer.zero_grad()
            with model.no_sync():
                loss_of(model, batch(10 * step)).backward()
            loss_of(model, batch(10 * step + 1)).backward()
            if step == 3:
                loss_of(model, batch(10 * step + 2)).backward()
                with model.no_sync():
                    loss_of(model, batch(0)).backward()
                loss_of(model, batch(10 * step + 3)).backward()
        assert_same_gradients(models)
        for _, optimizer in models:
            optimizer.step()
    assert_same_parameters(models[1][0], models[0][0])


class Branches(nn.Module):
    """Uses one of two branches, or none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = mlp(30, 60, 60, 20, dtype=torch.float32)
        self.branches = nn.ModuleList(mlp(20, 50, 50, 20, dtype=torch.float32) for _ in range(2))
        self.last = mlp(20, 60, 60, 3, dtype=torch.float32)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        x = self.first(x)
        if branch < 2:
            x = self.branches[branch](x)
        return self.last(x)


def test_unused_parameters() -> None:
    """Where no rank uses them gradients stay as they are, also those that were changed."""
    models = both(Branches, find_unused_parameters=True)
    for step in range(6):
        for model, optimizer in models:
            if step not in (2, 4):
                optimizer.zero_grad()
            branch = (0, RANK % 2, 2, 2, 1, RANK % 3)[step]
            model(batch(step), branch).square().mean().backward()
        assert_same_gradients(models)
        for model, optimizer in models:
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
    assert_same_parameters(models[1][0], models[0][0])


def test_static_graph_with_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = mlp(30, 60, 30, dtype=torch.float32)
            self.second = mlp(30, 60, 3, dtype=torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(self.first, x, use_reentrant=False)
            return self.second(x)

    models = both(Twice, static_graph=True)
    for step in range(3):
        for model, optimizer in models:
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
        assert_same_gradients(models)
        for _, optimizer in models:
            optimizer.step()
    assert_same_parameters(models[1][0], models[0][0])


def test_hooks_of_the_user() -> None:
    """They see and change this rank's gradients, and what they make is averaged."""
    models = both()

    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(RANK + 2)

    for model, _ in models:
        for number, parameter in enumerate(model.module.parameters()):
            if number % 2:
                parameter.register_hook(lambda gradient: gradient * (RANK + 1))
            else:
                parameter.register_post_accumulate_grad_hook(scale)
    for step in range(3):
        for model, optimizer in models:
            optimizer.zero_grad(set_to_none=step != 1)
            loss_of(model, batch(step)).backward()
        assert_same_gradients(models)
        for _, optimizer in models:
            optimizer.step()


def test_compressed_gradients_lie_on_each_rank() -> None:
    """What travels in 16 bits is not what the optimizer steps."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    models = both()
    for model, _ in models:
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    for step in range(2):
        for model, optimizer in models:
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
        assert_same_gradients(models)
        for _, optimizer in models:
            optimizer.step()
    assert_same_parameters(models[1][0], models[0][0])


def test_ranks_without_inputs() -> None:
    models = both()
    for model, optimizer in models:
        with model.join():
            for step in range(2 + 2 * RANK):
                optimizer.zero_grad()
                loss_of(model, batch(step)).backward()
                optimizer.step()
    assert_same_parameters(models[1][0], models[0][0])


def test_modules_in_another_order_on_each_rank() -> None:
    """Nobody waits for ever for stages that other ranks hold while they wait for this one."""
    pairs = [both(), both()]
    for kind in (0, 1):
        models = [pair[kind][0] for pair in pairs]
        order = models if RANK % 2 else models[::-1]
        losses = {id(model): loss_of(model, batch(0)) for model in models}
        # One backward, which begins with another module on each rank.
        first, second = (losses[id(model)] for model in order)
        (second + first * 1.0).backward() if RANK % 2 else (first * 1.0 + second).backward()
    for pair in pairs:
        assert_same_gradients(pair)


def test_backwards_that_wait_for_each_other() -> None:
    """One rank is in the backward of one module, the other in that of the other one."""
    pairs = [both(), both()]
    for kind in (0, 1):
        models = [pair[kind][0] for pair in pairs]
        inputs = batch(0)
        outputs = [model(inputs) for model in models]
        threads = [
            threading.Thread(target=lambda y=y: y.square().mean().backward())
            for y in (outputs if RANK % 2 else outputs[::-1])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for pair in pairs:
        assert_same_gradients(pair)


def test_gradients_outlive_the_model() -> None:
    model, optimizer = both()[1]
    loss_of(model, batch(0)).backward()
    kept = [p.grad for p in model.parameters()]
    values = [each.clone() for each in kept]
    del model, optimizer
    with together():
        assert all(map(torch.equal, kept, values))


def test_memory_of_stages_and_means() -> None:
    """One for all, and one bucket a rank."""
    from mpi4py import MPI

    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    sizes = [1 << 20] * 8
    buckets = SharedBuckets(node, sizes, 1 << 16, domain=0)
    memories = buckets.memories(sizes, node.Get_rank())
    stages = {memory.stage.data_ptr() for memory in memories}
    means = {memory.means.data_ptr() for memory in memories}
    with together():
        assert len(stages) == 1
        assert len(means) == 8
    node.Free()


@pytest.mark.parametrize("rank", [0, 1])
def test_where_the_kernel_does_not_tell(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with pages of another size: gradients lie on each rank then, also if one cannot tell."""
    if rank == RANK:
        monkeypatch.setattr(memory_files, "knows_own_pages", bool)
    models = both()
    with together():
        assert all(bucket.common is None for bucket in models[1][0].reducer.buckets)
    for step in range(3):
        for model, optimizer in models:
            optimizer.zero_grad()
            loss_of(model, batch(step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
    assert_same_gradients(models)
    assert_same_parameters(models[1][0], models[0][0])
