"""Several steps of the usual optimizers end with the parameters of one process."""

import copy
from functools import partial

import pytest
import torch
from models import CASES, loss_of
from replicas import SIZE, assert_close, assert_replicated, share, together

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "Adam": partial(torch.optim.Adam, lr=1e-2),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
}


@pytest.mark.essential(keep=4)
@pytest.mark.smoke(keep=1)
@pytest.mark.thorough(keep=12)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", ["mlp", "tied", "channels_last"])
def test_steps_equal_those_of_one_process(case, optimizer, views):
    # In double precision: Adam divides by gradients that are nearly zero.
    model = CASES[case].make().double()
    alone = copy.deepcopy(model)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    pair = [(wrapped, share), (alone, lambda batch: batch)]
    optimizers = [OPTIMIZERS[optimizer](module.parameters()) for module, _ in pair]
    before = copy.deepcopy(model.state_dict())
    for step in range(5):
        batch = CASES[case].batch(2 * SIZE)
        if batch.is_floating_point():
            batch = batch.double()
        for (module, part), stepper in zip(pair, optimizers, strict=True):
            stepper.zero_grad(set_to_none=step != 2)
            loss_of(module, part(batch)).backward()
            stepper.step()
        assert_replicated(wrapped)
    with together():
        for name, parameter in model.named_parameters():
            assert not torch.equal(parameter, before[name]), f"{name} was not trained"
            assert_close(parameter, alone.get_parameter(name), name, 1e4)


def test_clipping_sees_the_mean(views):
    """Gradient clipping between backward and step works on averaged gradients."""
    model = CASES["mlp"].make()
    alone = copy.deepcopy(model)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for _ in range(3):
        batch = CASES["mlp"].batch(2 * SIZE)
        norms = []
        for module, rows in [(wrapped, share(batch)), (alone, batch)]:
            module.zero_grad()
            loss_of(module, rows).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01))
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= parameter.grad
        assert_replicated(wrapped)
        with together():
            assert_close(norms[0], norms[1], "norm", 100)
            for name, parameter in model.named_parameters():
                assert_close(parameter, alone.get_parameter(name), name, 100)


def test_optimizer_made_before_wrapping(views):
    """Wrapping leaves the parameters what they are."""
    model = CASES["mlp"].make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = DDP(model, gradient_as_bucket_view=views)
    parameters = list(model.parameters())
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer.zero_grad()
        loss_of(wrapped, share(CASES["mlp"].batch(2 * SIZE))).backward()
        optimizer.step()
        with together():
            for now, old in zip(wrapped.parameters(), before, strict=True):
                assert not torch.equal(now, old)
            assert all(a is b for a, b in zip(wrapped.parameters(), parameters, strict=True))
    assert_replicated(wrapped)
