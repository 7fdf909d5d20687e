"""Who reads shared parameters has those of all ranks, or an error if a step failed."""

import copy
import gc
import io
import pickle
import time
from collections.abc import Callable

import pytest
import torch
from models import loss_of, mlp
from replicas import RANK, SIZE, batch_of, gather, share, together
from torch import nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes]


class Late(torch.optim.SGD):
    """Steps some time after the first rank has."""

    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        if RANK == SIZE - 1:
            time.sleep(0.2)
        return super().step(closure)


def saved(module: nn.Module) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return list(torch.load(file, weights_only=False).parameters())


def average(module: nn.Module) -> list[torch.Tensor]:
    averaged = torch.optim.swa_utils.AveragedModel(module)
    averaged.update_parameters(module)
    return list(averaged.parameters())


def through(part: nn.Module, module: nn.Module) -> list[torch.Tensor]:
    """Return what a part of the module makes of the unit vectors: its weight."""
    columns = part(torch.eye(6)) - part(torch.zeros(1, 6))
    return [columns.T, *list(module.parameters())[1:]]


READERS: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    "deepcopy": lambda module: list(copy.deepcopy(module).parameters()),
    "deepcopy of each": lambda module: copy.deepcopy([*map(weight, range(6), [module] * 6)]),
    "pickle": lambda module: list(pickle.loads(pickle.dumps(module)).parameters()),
    "save": saved,
    "parameters": lambda module: [p.clone() for p in module.parameters()],
    "average": average,
    "state_dict of a part": lambda module: [
        value.clone() for part in module for value in part.state_dict().values()
    ],
    "forward of a part": lambda module: through(module[0], module),
    "compiled": lambda module: through(
        torch.compile(lambda x: module[0](x), backend="eager"),  # type: ignore[arg-type]
        module,
    ),
}


def place_of(number: int, module: nn.Module) -> tuple[nn.Module, str]:
    layers = [each for each in module._modules.values() if each is not None and each._parameters]
    return layers[number // 2], "bias" if number % 2 else "weight"


def weight(number: int, module: nn.Module) -> torch.Tensor:
    """Return a parameter without asking the module for it."""
    layer, name = place_of(number, module)
    parameter = layer._parameters[name]
    assert parameter is not None
    return parameter


READERS["attributes"] = lambda module: [
    getattr(*place_of(number, module)).detach().clone() for number in range(6)
]


@pytest.mark.essential(keep=2)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("how", READERS)
def test_reads_are_whole(how: str) -> None:
    torch.manual_seed(0)
    model = DDP(mlp(6, 200, 200, 3, dtype=torch.float32), shared_parameters=True)
    optimizer = NodeOptimizer(model, Late, elementwise=True, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, share(batch_of(2, 6))).backward()
        optimizer.step()
        read = READERS[how](model.module)
        truth = [parameter.detach().clone() for parameter in model.parameters()]
        with together():
            for own, expected in zip(read, truth, strict=True):
                torch.testing.assert_close(own.detach(), expected)


def test_kept_references() -> None:
    """Of parameters and of groups; nobody asks the module."""
    torch.manual_seed(0)
    model = DDP(mlp(6, 200, 200, 3, dtype=torch.float32), shared_parameters=True)
    optimizer = NodeOptimizer(model, Late, elementwise=True, lr=0.1)
    kept = list(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, share(batch_of(2, 6))).backward()
        optimizer.step()
        read = [parameter.detach().clone() for parameter in kept]
        of_groups = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        everyone = gather([value.double().sum().item() for value in read])
        with together():
            assert everyone == everyone[:1] * SIZE
            assert all(map(torch.equal, read, of_groups))


class Failing(torch.optim.SGD):
    fails = False

    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        if self.fails and RANK == SIZE - 1:
            raise ZeroDivisionError
        return super().step(closure)


def test_after_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half stepped parameters are refused to every reader; other models are left alone."""
    torch.manual_seed(0)
    model = DDP(mlp(6, 200, 200, 3, dtype=torch.float32), shared_parameters=True)
    optimizer = NodeOptimizer(model, Failing, lr=0.1)
    other = mlp(6, 200, 200, 3, dtype=torch.float32)
    loss_of(model, share(batch_of(2, 6))).backward()
    monkeypatch.setattr(Failing, "fails", True)
    with together(), pytest.raises((RuntimeError, ZeroDivisionError)):
        optimizer.step()
    with together():
        for read in READERS.values():
            with pytest.raises(RuntimeError, match=f"rank {SIZE - 1} failed"):
                read(model.module)
            read(other)
    del model, optimizer, read
    gc.collect()
    with together():
        assert not torch.nn.modules.module._global_forward_pre_hooks


def test_loading_a_part() -> None:
    """A part of the module takes its state as the whole does."""
    torch.manual_seed(0)
    model = DDP(mlp(6, 200, 200, 3, dtype=torch.float32), shared_parameters=True)
    optimizer = NodeOptimizer(model, torch.optim.SGD, lr=0.1)
    part = model.module[0]
    given = {name: torch.full_like(value, 0.5) for name, value in part.state_dict().items()}
    part.load_state_dict(given)
    optimizer.zero_grad()
    loss_of(model, share(batch_of(2, 6))).backward()
    with together():
        assert (part.weight == 0.5).all()
    optimizer.step()
