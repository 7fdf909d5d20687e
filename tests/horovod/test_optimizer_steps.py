"""hvd.DistributedOptimizer from backward to step: passes, changed gradients, closures, state."""

import copy
import warnings

import pytest
import torch
from horovod_training import assert_trained_alike, distributed, draw, loss_of, net, sgd, step_alone
from models import mlp
from replicas import (
    RANK,
    SIZE,
    assert_close,
    assert_gradients_close,
    assert_replicated,
    gather,
    gradients_of,
    share,
    together,
)
from torch import nn

import mpiddp.horovod as hvd

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("passes", [2, 3])
def test_backward_passes_per_step(passes):
    """Gradients are summed over passes and averaged over ranks, as in Horovod."""
    model = net()
    alone = copy.deepcopy(model)
    own, ours = sgd(alone), distributed(model, backward_passes_per_step=passes)
    for step in range(4):
        own.zero_grad()
        ours.zero_grad()
        # The third step has fewer passes than were promised.
        for _ in range(passes - (step == 2)):
            batch = draw()
            loss_of(alone, batch).backward()
            loss_of(model, share(batch)).backward()
        own.step()
        ours.step()
    assert_trained_alike(model, alone)


def test_passes_can_change_and_differ():
    model = net()
    alone = copy.deepcopy(model)
    own, ours = sgd(alone), distributed(model, backward_passes_per_step=1 + RANK)
    for step in range(4):
        if step == 3:
            ours.set_backward_passes_per_step(1)
        own.zero_grad()
        ours.zero_grad()
        batch = draw()
        loss_of(alone, batch).backward()
        passes = 1 if step == 3 else 1 + RANK
        for _ in range(passes):
            (loss_of(model, share(batch)) / passes).backward()
        own.step()
        ours.step()
    assert_trained_alike(model, alone)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_pass_too_many(steps):
    model = net()
    ours = distributed(model, backward_passes_per_step=2)
    for _ in range(steps):
        loss_of(model, share(draw())).backward()
        ours.step()
        ours.zero_grad()
    with together():
        for _ in range(2):
            loss_of(model, share(draw())).backward()
        with pytest.raises(AssertionError, match="more backward passes"):
            loss_of(model, share(draw())).backward()
        with pytest.raises(RuntimeError, match="between backward and step"):
            ours.set_backward_passes_per_step(3)
        with pytest.raises(ValueError, match="positive number"):
            ours.set_backward_passes_per_step(0)


def test_several_losses_before_a_step():
    first, second = net(), net()
    both = nn.ModuleList([first, second])
    alone = copy.deepcopy(both)
    own, ours = sgd(alone), distributed(both)
    for step in range(4):
        one, two = draw(), draw()
        own.zero_grad()
        (loss_of(alone[0], one) + loss_of(alone[1], two)).backward()
        own.step()
        ours.zero_grad()
        # Not in the same order on all ranks.
        losses = [loss_of(first, share(one)), loss_of(second, share(two))]
        for loss in losses if (RANK + step) % 2 else reversed(losses):
            loss.backward()
        ours.step()
    assert_trained_alike(both, alone)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("threshold", ["1", "1000000"])
def test_other_parameters_on_other_ranks(threshold, monkeypatch):
    """A rank without a gradient counts as zeros; where no rank has one, none appears."""
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", threshold)
    model = nn.ModuleList([net() for _ in range(3)])
    alone = copy.deepcopy(model)
    own, ours = sgd(alone), distributed(model)
    for step in range(5):
        batch = draw()
        own.zero_grad()
        ours.zero_grad()
        for rank in range(SIZE):
            (loss_of(alone[(rank + step) % 2], share(batch, rank)) / SIZE).backward()
        # No backward at all on rank 1 in the third step: as if its loss were zero.
        if step == 2:
            own.zero_grad()
            for rank in range(SIZE):
                if rank != 1:
                    (loss_of(alone[rank % 2], share(batch, rank)) / SIZE).backward()
        if step != 2 or RANK != 1:
            loss_of(model[(RANK + step) % 2], share(batch)).backward()
        own.step()
        ours.step()
        with together():
            assert_gradients_close(gradients_of(model), gradients_of(alone), 8)
            assert model[2][0].weight.grad is None
    assert_trained_alike(model, alone)


@pytest.mark.parametrize("by_hand_in", [0, 2])
def test_gradients_set_by_hand(by_hand_in):
    model = net()
    alone = copy.deepcopy(model)
    own, ours = sgd(alone), distributed(model)
    for step in range(3):
        batch = draw()
        step_alone(alone, own, batch)
        ours.zero_grad()
        loss = loss_of(model, share(batch))
        if step == by_hand_in:
            parameters = list(model.parameters())
            for parameter, gradient in zip(
                parameters, torch.autograd.grad(loss, parameters), strict=True
            ):
                parameter.grad = gradient
        else:
            loss.backward()
        ours.step()
    assert_trained_alike(model, alone)


def test_clipping():
    model = net()
    alone = copy.deepcopy(model)
    own, ours = sgd(alone), distributed(model)
    for _ in range(3):
        batch = draw()
        own.zero_grad()
        loss_of(alone, batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
        own.step()
        ours.zero_grad()
        loss_of(model, share(batch)).backward()
        ours.synchronize()
        with together():
            assert_close(
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01), norm, "the norm", 8
            )
        with ours.skip_synchronize():
            ours.step()
    assert_trained_alike(model, alone, 20)


@pytest.mark.essential
def test_gradient_scaler():
    model = net()
    alone = copy.deepcopy(model)
    own, ours = sgd(alone), distributed(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(3):
        batch = draw()
        step_alone(alone, own, batch)
        ours.zero_grad()
        scaler.scale(loss_of(model, share(batch))).backward()
        ours.synchronize()
        scaler.unscale_(ours)
        with ours.skip_synchronize():
            scaler.step(ours)
        scaler.update()
    assert_trained_alike(model, alone)


CHANGES = {
    "clip": lambda model, optimizer: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "unscale": lambda model, optimizer: _unscale(optimizer),
    "zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "drop": lambda model, optimizer: model.zero_grad(),
}


def _unscale(optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_gradients_changed_too_early(change):
    """In Horovod that is a race; here it is an error."""
    model = net()
    ours = distributed(model)
    loss_of(model, share(draw())).backward()
    ours.step()
    ours.zero_grad()
    loss_of(model, share(draw())).backward()
    change(model, ours)
    with together(), pytest.raises(RuntimeError, match="changed between backward and sync"):
        ours.step()


def test_step_after_synchronize_warns():
    model = net()
    ours = distributed(model)
    loss_of(model, share(draw())).backward()
    ours.synchronize()
    before = {name: g.clone() for name, g in gradients_of(model).items()}
    with together(), pytest.warns(UserWarning, match=r"without optimizer\.skip_synchronize\(\)"):
        ours.step()
    with together():
        assert_gradients_close(gradients_of(model), before)
    loss_of(model, share(draw())).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.step()
    assert_replicated(model)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("passes", [1, 2])
def test_zero_grad_before_the_step(steps, passes):
    model = net()
    ours = distributed(model, backward_passes_per_step=passes)
    for _ in range(steps):
        loss_of(model, share(draw())).backward()
        ours.step()
        ours.zero_grad()
    loss_of(model, share(draw())).backward()
    with together(), pytest.raises(AssertionError, match="zero_grad"):
        ours.zero_grad()
    ours.synchronize()
    ours.zero_grad(set_to_none=False)
    with together():
        assert all(not parameter.grad.any() for parameter in model.parameters())


def test_closure():
    model = net()
    alone = copy.deepcopy(model)
    own, ours = sgd(alone), distributed(model)
    for _ in range(3):
        batch = draw()

        def compute(module, optimizer, part):
            def closure():
                optimizer.zero_grad()
                loss = loss_of(module, part)
                loss.backward()
                return loss

            return closure

        own.step(compute(alone, own, batch))
        loss = ours.step(compute(model, ours, share(batch)))
        with together():
            assert loss.requires_grad
    assert_trained_alike(model, alone)


@pytest.mark.essential
def test_lbfgs():
    """It calls the closure several times in a step; without a line search, the same everywhere."""
    model = mlp(6, 1)
    alone = copy.deepcopy(model)
    settings = {"lr": 0.1, "max_iter": 4, "tolerance_change": 0, "tolerance_grad": 0}
    own = torch.optim.LBFGS(alone.parameters(), **settings)
    ours = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), **settings))
    batch = draw()

    def closure(module, optimizer, part):
        optimizer.zero_grad()
        loss = loss_of(module, part)
        loss.backward()
        return loss

    for _ in range(2):
        own.step(lambda: closure(alone, own, batch))
        ours.step(lambda: closure(model, ours, share(batch)))
    assert_trained_alike(model, alone, 1000)


@pytest.mark.essential
def test_scheduler_state_and_hooks():
    model = net()
    alone = copy.deepcopy(model)
    own, given = sgd(alone), sgd(model)
    ours = hvd.DistributedOptimizer(given, model.named_parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.1) for o in (own, ours)]
    calls = []
    ours.register_step_post_hook(lambda *_: calls.append(1))
    saved = None
    for step in range(4):
        batch = draw()
        step_alone(alone, own, batch)
        ours.zero_grad()
        loss_of(model, share(batch)).backward()
        ours.step()
        for schedule in schedules:
            schedule.step()
        if step == 1:
            saved = copy.deepcopy(ours.state_dict()), copy.deepcopy(model.state_dict())
    assert_trained_alike(model, alone)
    with together():
        assert len(calls) == 4
        assert ours.param_groups[0]["lr"] == own.param_groups[0]["lr"] == pytest.approx(1e-3)
        assert ours.param_groups is given.param_groups
        assert saved[0].keys() == own.state_dict().keys()
    # A wrapper of a new optimizer goes on from the state that it is given.
    fresh, batch = net(), draw()
    fresh.load_state_dict(saved[1])
    again = distributed(fresh)
    untouched = copy.deepcopy(saved[0])
    again.load_state_dict(saved[0])
    loss_of(fresh, share(batch)).backward()
    again.step()
    kept = net()
    kept.load_state_dict(saved[1])
    inner = sgd(kept)
    inner.load_state_dict(untouched)
    loss_of(kept, batch).backward()
    inner.step()
    assert_trained_alike(fresh, kept)


def test_state_of_the_given_optimizer_is_kept():
    model = net()
    alone = copy.deepcopy(model)
    batch, given, own = draw(), sgd(model), sgd(alone)
    for module, optimizer in ((model, given), (alone, own)):
        loss_of(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    ours = hvd.DistributedOptimizer(given, model.named_parameters())
    loss_of(alone, batch).backward()
    own.step()
    loss_of(model, share(batch)).backward()
    ours.step()
    assert_trained_alike(model, alone)


def test_frozen_and_added_parameters():
    """What requires a gradient only later, or is added to the optimizer, is averaged too."""
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh())])
    model.double()
    model[0].requires_grad_(False)
    alone = copy.deepcopy(model)
    optimizers = [
        torch.optim.SGD([*m[0].parameters(), *m[2].parameters()], lr=0.1) for m in (alone, model)
    ]
    own, ours = optimizers[0], hvd.DistributedOptimizer(optimizers[1])
    for step in range(6):
        if step == 2:
            for module in (alone, model):
                module[0].requires_grad_(True)
        if step == 4:
            for module, optimizer in ((alone, own), (model, ours)):
                module.zero_grad()
                optimizer.add_param_group({"params": list(module[4].parameters()), "lr": 0.01})
        batch = draw()
        step_alone(alone, own, batch)
        ours.zero_grad()
        loss_of(model, share(batch)).backward()
        ours.step()
        if step < 4:  # its gradients add up, and are not averaged
            for module in (alone, model):
                module[4].zero_grad()
    assert_trained_alike(model, alone)


def test_frozen_after_the_first_step():
    """As a GAN does, whose parts take turns; the first step may come while it is frozen."""
    model = net()
    alone = copy.deepcopy(model)
    own, ours = sgd(alone), distributed(model)
    for step in range(4):
        batch = draw()
        for module in (alone, model):
            module[0].requires_grad_(step % 2 == 1)
        step_alone(alone, own, batch)
        ours.zero_grad()
        loss_of(model, share(batch)).backward()
        ours.step()
    assert_trained_alike(model, alone)


@pytest.mark.mpi(min_size=2)
def test_step_within_backward():
    model = net()
    ours = distributed(model)
    loss_of(model, share(draw())).backward()
    ours.step()
    hidden = model[0](share(draw()))
    hidden.register_hook(lambda gradient: ours.synchronize())
    with together(), pytest.raises(RuntimeError, match="within a backward pass"):
        model[1:](hidden).sum().backward()


REDUCTIONS = {
    hvd.Min: lambda all_of_them: all_of_them.amin(0),
    hvd.Max: lambda all_of_them: all_of_them.amax(0),
    hvd.Product: lambda all_of_them: all_of_them.prod(0),
}


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_other_reductions(op, compression):
    """Horovod passes any op on to its all-reduce; a rank without a gradient has zeros."""
    travels = torch.float16 if compression is hvd.Compression.fp16 else torch.float32
    rounding = 4 * torch.finfo(travels).eps  # of products
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2))
    optimizer = sgd(model)
    ours = hvd.DistributedOptimizer(optimizer, compression=compression, op=op)
    for step in range(3):
        ours.zero_grad()
        given = torch.Generator().manual_seed(10 * step + RANK)
        loss = model[0](torch.randn(4, 3, generator=given)).sum()
        if RANK == 0:
            loss = loss + model[1](torch.randn(4, 3, generator=given)).sum()
        loss.backward()
        own = [
            (torch.zeros_like(p) if p.grad is None else p.grad.clone()).to(travels)
            for p in model.parameters()
        ]
        ours.synchronize()
        everyone = [torch.stack(each) for each in zip(*gather(own), strict=True)]
        with together():
            for place, parameter in enumerate(model.parameters()):
                if place < 4:
                    expected = REDUCTIONS[op](everyone[place]).float()
                    torch.testing.assert_close(parameter.grad, expected, rtol=rounding, atol=1e-6)
                else:
                    assert parameter.grad is None
        with ours.skip_synchronize():
            ours.step()
        assert_replicated(model)


def test_sparse_gradients_have_no_minimum():
    layer = nn.Embedding(4, 2, sparse=True)
    ours = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), op=hvd.Min)
    layer(torch.tensor([1])).sum().backward()
    with together(), pytest.raises(RuntimeError, match=r"op=hvd\.Min; give sparse_as_dense"):
        ours.step()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_names_that_programs_read(op):
    model = net()
    named = dict(model.named_parameters())
    if op == hvd.Adasum and SIZE & (SIZE - 1):
        op = hvd.Sum
    ours = hvd.DistributedOptimizer(sgd(model), named_parameters=named.items(), op=op)
    with together():
        assert {name: id(p) for p, name in ours._parameter_names.items()} == {
            name: id(p) for name, p in named.items()
        }
        assert ours.op == op
        if op == hvd.Average:
            assert ours.process_set is hvd.global_process_set
            assert (ours.gradient_predivide_factor, ours.sparse_as_dense) == (1.0, False)
