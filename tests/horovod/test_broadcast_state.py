"""hvd.broadcast_parameters and hvd.broadcast_optimizer_state: all ranks start from one's state."""

import copy

import pytest
import torch
from models import mlp
from replicas import RANK, SIZE, assert_same_bits, bits, gather, together
from torch import Tensor, nn

import mpiddp.horovod as hvd

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


@pytest.fixture(params=[0, -1], ids=["first", "last"])
def root(request: pytest.FixtureRequest) -> int:
    """Try the first rank and the last."""
    return int(request.param) % SIZE


class Everything(nn.Module):
    """A model with tensors of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(3, 5, 2)
        self.norm = nn.BatchNorm2d(3)
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.narrow = nn.Parameter(torch.randn(7).bfloat16())
        self.pairs = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.large = nn.Parameter(torch.randn(1 << 20))
        self.register_buffer("mask", torch.rand(5) > 0.5)


def different() -> Everything:
    torch.manual_seed(RANK)
    model = Everything()
    model.norm.num_batches_tracked.fill_(RANK)
    return model


FORMS = {
    "state_dict": lambda model: model.state_dict(),
    "named_parameters": lambda model: list(model.state_dict(keep_vars=True).items()),
    "generator": lambda model: iter(model.state_dict().items()),
    "parameters": lambda model: list(model.state_dict().values()),
    "with None": lambda model: {**model.state_dict(), "a": None},
}


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_parameters(form, root):
    model = different()
    own = copy.deepcopy(model.state_dict())
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    hvd.broadcast_parameters(form(model), root_rank=root)
    assert_same_bits(model.state_dict().items())
    with together():
        assert {name: t.data_ptr() for name, t in model.state_dict().items()} == addresses
        if root == RANK:
            assert all(bits(t) == bits(own[name]) for name, t in model.state_dict().items())
        assert model.image.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.mpi(min_size=2)
def test_other_parameters_are_refused():
    wrong = {"a": torch.zeros(3 + (RANK == 1)), "b": torch.zeros(2)}
    text = r"broadcast different tensors: on rank 1 a is shape \(4,\)"
    with together(), pytest.raises(RuntimeError, match=text):
        hvd.broadcast_parameters(wrong, 0)
    with together(), pytest.raises(RuntimeError, match=r"on rank 1 c is .* absent on rank 0"):
        hvd.broadcast_parameters({"b" if RANK != 1 else "c": torch.zeros(2)}, 0)


def test_refusals():
    with together():
        for wrong in (3, torch.zeros(2), {"a": "text"}):
            with pytest.raises(ValueError, match="broadcast_parameters needs"):
                hvd.broadcast_parameters(wrong, 0)
        for wrong in (SIZE, -1):
            with pytest.raises(ValueError, match="not in the process set"):
                hvd.broadcast_parameters({}, wrong)
        lbfgs = torch.optim.LBFGS(mlp(2, 1).parameters())
        with pytest.raises(ValueError, match="LBFGS"):
            hvd.broadcast_optimizer_state(lbfgs, 0)


@pytest.mark.mpi(min_size=2)
def test_process_set():
    ranks = list(range(1, SIZE))
    inside = hvd.add_process_set(ranks)
    model = different()
    before = copy.deepcopy(model.state_dict())
    hvd.broadcast_parameters(model.state_dict(), root_rank=SIZE - 1, process_set=inside)
    everyone = gather({name: bits(t) for name, t in model.state_dict().items()})
    with together():
        assert all(everyone[rank] == everyone[-1] for rank in ranks)
        if RANK in (0, SIZE - 1):
            assert everyone[RANK] == {name: bits(t) for name, t in before.items()}
        if RANK:
            with pytest.raises(ValueError, match="not in the process set"):
                hvd.broadcast_parameters(model.state_dict(), root_rank=0, process_set=inside)
    hvd.remove_process_set(inside)


OPTIMIZERS = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=lr),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr=lr, betas=(lr, 0.9)),
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr=torch.tensor(lr), amsgrad=True),
    "fused": lambda p, lr: torch.optim.Adam(p, lr=lr, fused=True),
    "Adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr),
    "Rprop": lambda p, lr: torch.optim.Rprop(p, lr=lr),
    "NAdam": lambda p, lr: torch.optim.NAdam(p, lr=lr),
    "Adafactor": lambda p, lr: torch.optim.Adafactor(p, lr=lr),
}


def flat(value: object) -> list[tuple[str, Tensor | None]]:
    """Return all values of an optimizer's state_dict by where they are."""
    found: list[tuple[str, Tensor | None]] = []

    def look(place: str, inner: object) -> None:
        if isinstance(inner, dict):
            for name, one in inner.items():
                look(f"{place}.{name}", one)
        elif isinstance(inner, list | tuple):
            for name, one in enumerate(inner):
                look(f"{place}.{name}", one)
        elif isinstance(inner, Tensor):
            found.append((place, inner))
        else:
            found.append((f"{place} is {inner!r}", None))

    look("", value)
    return found


@pytest.mark.essential(keep=4)
@pytest.mark.parametrize("steps", ["on the root", "elsewhere", "everywhere", "nowhere"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_state(make, steps):
    root = 0 if steps in ("elsewhere", "nowhere") else SIZE - 1
    model = mlp(3, 4, 2, dtype=torch.bfloat16)
    if make is OPTIMIZERS["fused"]:
        model.float()
    optimizer = make(model.parameters(), 0.1 / (RANK + 1))
    optimizer.param_groups[0]["note"] = f"of rank {RANK}"
    at_root = root == RANK
    if not at_root:
        optimizer.param_groups[0]["not the root's"] = 1
    if steps == "everywhere" or (steps != "nowhere" and (steps == "on the root") == at_root):
        for _ in range(RANK + 1):
            model(torch.randn(2, 3, dtype=model[0].weight.dtype)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
    parameters = [bits(p) for p in model.parameters()]
    own = flat(copy.deepcopy(optimizer.state_dict()))
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert_same_bits(flat(optimizer.state_dict()))
    with together():
        assert [bits(p) for p in model.parameters()] == parameters
        assert all(p.grad is None for p in model.parameters())
        if root == RANK:
            assert [(n, bits(t)) for n, t in flat(optimizer.state_dict())] == [
                (n, bits(t)) for n, t in own
            ]
    # It goes on working, alike on all ranks.
    hvd.broadcast_parameters(model.state_dict(), root)
    model(torch.ones(2, 3, dtype=model[0].weight.dtype)).sum().backward()
    optimizer.step()
    assert_same_bits([*model.named_parameters(), *flat(optimizer.state_dict())])


def test_of_a_distributed_optimizer(root):
    """As Horovod's examples do: wrap, broadcast, train; the state is there from the start."""
    torch.manual_seed(RANK)
    model = mlp(3, 4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (RANK + 1), momentum=0.9)
    ours = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root)
    if root == RANK:
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    hvd.broadcast_optimizer_state(ours, root)
    for _ in range(3):
        ours.zero_grad()
        model(torch.randn(2, 3, dtype=torch.float64)).sum().backward()
        ours.step()
    assert_same_bits([*model.named_parameters(), *flat(ours.state_dict())])
    with together():
        assert ours.param_groups[0]["lr"] == 0.1 / (root + 1)


def test_nested_state_and_what_is_no_parameter():
    model = mlp(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model[0].weight
    if RANK == 0:
        optimizer.state[weight] = {"a": [torch.ones(2), (torch.zeros(3), None)], "b": {"c": 1.5}}
        optimizer.state["all"] = {"count": torch.tensor(3)}
    else:
        optimizer.state[weight] = {"a": "another"}
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert_same_bits(flat(dict(optimizer.state_dict()["state"])))
    with together():
        assert optimizer.state[weight]["a"][1][1] is None
        assert int(optimizer.state["all"]["count"]) == 3


@pytest.mark.mpi(min_size=2)
def test_errors_are_everybodys():
    with together(), pytest.raises(RuntimeError, match="different optimizers: on rank 1"):
        hvd.broadcast_optimizer_state(
            torch.optim.SGD(mlp(3, 2 + (RANK == 1)).parameters(), lr=0.1), 0
        )
    optimizer = torch.optim.SGD(mlp(3, 2).parameters(), lr=0.1)
    if RANK == 0:
        optimizer.param_groups[0]["note"] = lambda: None
    with together(), pytest.raises(RuntimeError, match="cannot be pickled"):
        hvd.broadcast_optimizer_state(optimizer, 0)
