"""Parameters that leave the reducer after wrapping: refused or averaged, never trained alone."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from models import loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    Gradients,
    assert_gradients_close,
    assert_replicated,
    gather,
    gradients_of,
    together,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import parametrize, prune

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi(min_size=2)

OPTIONS = [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]


@pytest.fixture(autouse=True)
def _future_as_it_was() -> Iterator[None]:
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def step(model: nn.Module) -> None:
    model.zero_grad()
    parameter = next(model.parameters())
    loss_of(model, torch.ones(2, 3, dtype=parameter.dtype) * (1 + RANK)).backward()


def trained(module: nn.Module, wrap: Callable[..., nn.Module], **options: object) -> nn.Module:
    model = wrap(copy.deepcopy(module), **options)
    step(model)
    model.zero_grad()
    return model


def convert(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.float()


def load(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})


def exchange(model: nn.Module) -> None:
    parameter = list(model.parameters())[-1]
    torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("swap", [convert, load, exchange])
def test_tensors_are_not_swapped(swap, options, gloo):
    """As in torch's class: the swap raises, nothing is changed, and training goes on."""
    module = mlp(3, 4, 2)
    pair = trained(module, DDP, **options), trained(module, TorchDDP, process_group=gloo, **options)
    for model in pair:
        with together(), pytest.raises(RuntimeError, match=r"swap|use_count"):
            swap(model)
    for _ in range(2):
        for model in pair:
            step(model)
        with together():
            assert_gradients_close(*map(gradients_of, pair))
        assert_replicated(pair[0])


def test_swap_when_the_wrapper_is_gone():
    module = mlp(3, 4, 2)
    model = DDP(module)
    step(model)
    module.zero_grad()
    del model
    torch.__future__.set_swap_module_params_on_conversion(True)
    module.float()
    again = DDP(module)
    step(again)
    with together():
        assert module[0].weight.grad.dtype == torch.float32
    assert_replicated(again)


def overwrite(model: nn.Module) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    model.float()


def assign(model: nn.Module) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace_the_last(model: nn.Module) -> None:
    layer = model.module[2]
    layer.bias = nn.Parameter(torch.zeros_like(layer.bias))


def register_again(model: nn.Module) -> None:
    layer = model.module[2]
    del layer.weight
    layer.register_parameter("weight", nn.Parameter(torch.zeros(2, 4, dtype=torch.float64)))


def drop_hooks(model: nn.Module) -> None:
    model.module[2].weight._post_accumulate_grad_hooks.clear()


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("options", [*OPTIONS, {"static_graph": True}], ids=str)
@pytest.mark.parametrize(
    "change", [overwrite, assign, replace_the_last, register_again, drop_hooks]
)
def test_found_before_forward_ends(change, options):
    """Torch's class trains each rank alone, but for the last one, which it does not notice."""
    model = trained(mlp(3, 4, 2), DDP, **options)
    change(model)
    with together(), pytest.raises(RuntimeError, match=rf"rank {RANK}: parameter '.*Wrap the"):
        step(model)
    with together():
        assert all(parameter.grad is None for parameter in model.parameters())
    again = DDP(model.module, **options)
    step(again)
    assert_replicated(again)


def found_in_forward(model: nn.Module) -> None:
    model.module.register_forward_hook(lambda module, *_: replace_the_last(model))


def test_replaced_in_forward():
    model = trained(mlp(3, 4, 2), DDP)
    found_in_forward(model)
    with together(), pytest.raises(RuntimeError, match=r"'2\.bias'.* has been replaced"):
        step(model)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def parametrized(model: nn.Module) -> None:
    parametrize.register_parametrization(model.module[0], "weight", Doubled())


def parametrized_and_back(model: nn.Module) -> None:
    parametrized(model)
    step(model)
    parametrize.remove_parametrizations(model.module[0], "weight", leave_parametrized=False)


def pruned(model: nn.Module) -> None:
    prune.l1_unstructured(model.module[0], "weight", amount=2)


def pruned_for_good(model: nn.Module) -> None:
    pruned(model)
    prune.remove(model.module[0], "weight")


def moved(model: nn.Module) -> None:
    layer = model.module[0]
    layer.bias, layer.other = None, layer.bias
    layer.register_forward_hook(lambda _, __, output: output + layer.other)


def frozen_replacement(model: nn.Module) -> None:
    layer = model.module[0]
    layer.bias = nn.Parameter(torch.zeros_like(layer.bias), requires_grad=False)


@pytest.mark.parametrize(
    "change",
    [parametrized, parametrized_and_back, pruned, pruned_for_good, moved, frozen_replacement],
)
def test_changes_that_keep_parameters(change):
    """What moves a parameter to another place, or out of training; torch's class loses some."""
    model = trained(mlp(3, 4, 2), DDP, find_unused_parameters=True)
    change(model)
    for _ in range(2):
        expected = mean_of_own_gradients(model.module)
        step(model)
        with together():
            assert_gradients_close(gradients_of(model), expected)


def mean_of_own_gradients(module: nn.Module) -> Gradients:
    """Compute what a step should give, without the wrapper. Collective."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    loss = loss_of(module, torch.ones(2, 3, dtype=torch.float64) * (1 + RANK))
    own = dict(zip(map(id, trained), torch.autograd.grad(loss, trained), strict=True))
    everyone = gather([own.get(id(parameter)) for parameter in parameters])
    return {
        name: None if parts[0] is None else sum(parts) / SIZE
        for name, *parts in zip(names, *everyone, strict=True)
    }


@pytest.mark.parametrize("trainable", [False, True])
def test_functional_call_with_other_parameters(trainable, gloo):
    """They are in place for one call only, and their gradients are the caller's."""
    module = mlp(3, 4, 2)
    x = torch.ones(2, 3, dtype=torch.float64) * (1 + RANK)
    own = []
    pair = trained(module, DDP), trained(module, TorchDDP, process_group=gloo)
    for model in pair:
        others = {
            name: nn.Parameter(parameter.detach() + 1, requires_grad=trainable)
            for name, parameter in model.named_parameters()
        }
        output = torch.func.functional_call(model, others, (x,))
        if trainable:
            output.square().mean().backward()
        own.append({name: parameter.grad for name, parameter in others.items()})
        step(model)
    with together():
        assert_gradients_close(*own)
        assert_gradients_close(*map(gradients_of, pair))
    assert_replicated(pair[0])


def test_wrapper_without_hooks():
    """Whoever takes the hooks off wants no averages."""
    model = trained(mlp(3, 4, 2), DDP)
    model._remove_autograd_hooks()
    assign(model)
    step(model)
    gradient = model.module[0].weight.grad.clone()
    dist.all_reduce(gradient)
    with together():
        assert not torch.equal(gradient, model.module[0].weight.grad)
