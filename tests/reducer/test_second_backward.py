"""Two losses of one forward, each with a backward of its own: refused in the second one."""

import copy

import pytest
import torch
from replicas import RANK, assert_gradients_close, assert_replicated, gather, gradients_of, together
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi(min_size=2)

OPTIONS = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-5},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


class Opaque:
    """An output in which no tensor is found."""

    def __init__(self, *outputs: Tensor) -> None:
        self.outputs = outputs


class Heads(nn.Module):
    """Two heads, with something below both of them or without."""

    def __init__(self, trunk: bool, opaque: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3) if trunk else None
        self.heads = nn.ModuleList(nn.Linear(3, 1) for _ in range(2))
        self.opaque = opaque

    def forward(self, x: Tensor) -> object:
        if self.trunk is not None:
            x = self.trunk(x)
        outputs = [head(x) for head in self.heads]
        return Opaque(*outputs) if self.opaque else outputs


def heads_of(model: nn.Module) -> list[Tensor]:
    output = model(torch.ones(2, 3) * (1 + RANK))
    return [head.sum() for head in (output.outputs if isinstance(output, Opaque) else output)]


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("trunk", [True, False], ids=["trunk", "heads"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_second_backward_is_refused(options, trunk):
    """On each rank, before its gradients leave the step that no next forward may follow."""
    model = DDP(Heads(trunk), **options)
    first, second = heads_of(model)
    first.backward(retain_graph=True)
    assert_replicated(model)
    with together(), pytest.raises(RuntimeError, match=r"mark a variable ready only once.*heads"):
        second.backward()


def test_torch_refuses_it_too(gloo):
    model = TorchDDP(Heads(trunk=True), process_group=gloo)
    first, second = heads_of(model)
    first.backward(retain_graph=True)
    with together(), pytest.raises(RuntimeError, match="mark a variable ready only once"):
        second.backward()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_outputs_that_are_not_found(training):
    model = DDP(Heads(trunk=True, opaque=True)).train(training)
    first, second = heads_of(model)
    first.backward(retain_graph=True)
    with together(), pytest.raises(RuntimeError, match="ready only once"):
        second.backward()


def test_wrapped_again_after_it():
    model = DDP(Heads(trunk=True))
    first, second = heads_of(model)
    first.backward(retain_graph=True)
    with together(), pytest.raises(RuntimeError, match="ready only once"):
        second.backward()
    again = DDP(model.module)  # the first wrapper is still there
    for _ in range(2):
        again.zero_grad()
        sum(heads_of(again)).backward()
        assert_replicated(again)
    del model
    with together():
        assert len(again.module.heads[0].weight._post_accumulate_grad_hooks) == 1


def test_next_forward_still_reports_what_was_missing():
    """On all ranks, though only one has called the second backward."""
    model = DDP(Heads(trunk=True))
    first, second = heads_of(model)
    first.backward(retain_graph=True)
    if RANK == 0:
        with pytest.raises(RuntimeError, match="ready only once"):
            second.backward()
    with together(), pytest.raises(RuntimeError, match=r"have finished reduction[^|]*heads\.1"):
        heads_of(model)
    with together():
        # and from then on nothing is refused
        sum(heads_of(model)).backward()


def test_autograd_grad_of_the_second_loss(gloo):
    """It adds to no gradient of a parameter."""
    module = Heads(trunk=True)
    pair = (
        DDP(copy.deepcopy(module), find_unused_parameters=True),
        TorchDDP(copy.deepcopy(module), find_unused_parameters=True, process_group=gloo),
    )
    returned = []
    for model in pair:
        first, second = heads_of(model)
        first.backward(retain_graph=True)
        gradients = torch.autograd.grad(second, model.module.heads[1].weight)
        returned.append({"second": gradients[0]})
    with together():
        assert_gradients_close(*map(gradients_of, pair))
        assert_gradients_close(*returned)
    assert len(set(gather(str(gradients_of(pair[0]))))) == 1


def test_both_losses_at_once(gloo):
    module = Heads(trunk=True)
    pair = (
        DDP(copy.deepcopy(module)),
        TorchDDP(copy.deepcopy(module), process_group=gloo),
    )
    for _ in range(3):
        for model in pair:
            model.zero_grad()
            torch.autograd.backward(heads_of(model))
        with together():
            assert_gradients_close(*map(gradients_of, pair))
        assert_replicated(pair[0])
