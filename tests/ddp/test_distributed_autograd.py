"""Backward passes of torch.distributed.autograd average gradients; the others go on as before."""

import copy
import gc
import socket
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from models import loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    assert_gradients_close,
    batch_of,
    gather,
    gradients_of,
    mean_of_ranks,
    share,
    together,
)
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from mpiddp import DistributedDataParallel as DDP
from mpiddp.ddp import distributed_autograd

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not rpc.is_available(), reason="torch was built without RPC"),
    pytest.mark.filterwarnings("ignore:You are using a Backend"),
]


@pytest.fixture(scope="module")
def agents(world: None) -> Iterator[None]:
    """Start torch's RPC between all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = gather(free.getsockname()[1])[0]
    rpc.init_rpc(
        f"rank{RANK}",
        rank=RANK,
        world_size=SIZE,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{port}",
            rpc_timeout=timedelta(seconds=30).total_seconds(),
            _transports=["uv"],
        ),
    )
    yield
    rpc.shutdown()


OPTIONS = ["plain", "find_unused_parameters", "static_graph"]
# Held in a list, so that nobody finds and replaces it.
NOT_WATCHED = [dist_autograd.backward]


def _own(context: int, module: nn.Module) -> dict[str, torch.Tensor]:
    gradients = dist_autograd.get_gradients(context)
    return {name: gradients[p] for name, p in module.named_parameters() if p in gradients}


@pytest.mark.essential(keep=3)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("forward_inside", [True, False])
def test_means_are_in_the_context(option, forward_inside, views, agents):
    options = {} if option == "plain" else {option: True}
    model = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views, **options)
    for _ in range(4):
        batch = batch_of(2, 3, dtype=torch.float64)
        expected = mean_of_ranks(
            model.module, lambda m, rank, batch=batch: loss_of(m, share(batch, rank))
        )
        kept = [None if p.grad is None else (p.grad, p.grad.clone()) for p in model.parameters()]
        outside = None if forward_inside else loss_of(model, share(batch))
        with dist_autograd.context() as context:
            loss = loss_of(model, share(batch)) if outside is None else outside
            dist_autograd.backward(context, [loss])
            means = _own(context, model.module)
            with together():
                assert_gradients_close(means, expected)
                # .grad is the same tensor as before, with the same values.
                for parameter, held in zip(model.parameters(), kept, strict=True):
                    assert parameter.grad is (held and held[0])
                    assert held is None or torch.equal(*held)
        # A plain pass between: its gradients stay where they were.
        model.zero_grad()
        loss_of(model, share(batch)).backward()
        with together():
            for name, gradient in gradients_of(model).items():
                assert torch.equal(gradient, means[name])


def test_passes_add_up_in_a_context(views, agents):
    model = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views)
    first, second = (batch_of(2, 3, dtype=torch.float64) for _ in range(2))

    def both(module: nn.Module, rank: int) -> torch.Tensor:
        return loss_of(module, share(first, rank)) + loss_of(module, share(second, rank))

    expected = mean_of_ranks(model.module, both)
    with dist_autograd.context() as context:
        for batch in (first, second):
            dist_autograd.backward(context, [loss_of(model, share(batch))])
        with together():
            assert_gradients_close(_own(context, model.module), expected)


def test_without_synchronisation(views, agents):
    model = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views)
    batch = batch_of(2, 3, dtype=torch.float64)
    own = torch.autograd.grad(loss_of(model.module, share(batch)), list(model.parameters()))
    with dist_autograd.context() as context:
        with model.no_sync():
            dist_autograd.backward(context, [loss_of(model, share(batch))])
        with together():
            for got, expected in zip(_own(context, model.module).values(), own, strict=True):
                assert torch.equal(got, expected)
        dist_autograd.backward(context, [loss_of(model, share(batch))])
        expected = mean_of_ranks(model.module, lambda m, rank: 2 * loss_of(m, share(batch, rank)))
        with together():
            assert_gradients_close(_own(context, model.module), expected)


def test_sparse_gradients(agents):
    model = DDP(nn.EmbeddingBag(10, 3, sparse=True))
    words = torch.arange(10).roll(RANK)[:6]
    offsets = torch.tensor([0, 4])
    model(words, offsets).square().sum().backward()
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [model(words, offsets).square().sum()])
        (mean,) = _own(context, model.module).values()
        with together():
            assert mean.is_sparse
            assert torch.equal(mean.to_dense(), model.module.weight.grad.to_dense())


class Branches(nn.Module):
    """Two layers, of which a forward pass uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 2)
        self.right = nn.Linear(3, 2)

    def forward(self, batch: torch.Tensor, names: list[str]) -> torch.Tensor:
        return sum(getattr(self, name)(batch).sum() for name in names)


def test_unused_by_all(views, agents):
    model = DDP(Branches(), find_unused_parameters=True, gradient_as_bucket_view=views)
    batch = torch.full((2, 3), float(RANK))
    for names in (["left"], ["right"], ["left", "right"]):
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [model(batch, names)])
            means = _own(context, model.module)
            with together():
                assert sorted({name.split(".")[0] for name in means}) == names
                for name in names:
                    mean = torch.full((2, 3), 2 * (SIZE - 1) / 2)
                    assert torch.equal(means[f"{name}.weight"], mean)
                assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.mpi(min_size=2)
def test_used_on_one_rank_only(views, agents, capfd):
    """A context cannot be given a gradient: torch's class fails on an assertion of its own."""
    model = DDP(Branches(), find_unused_parameters=True, gradient_as_bucket_view=views)
    names = ["left", "right"] if RANK == 0 else ["left"]
    with dist_autograd.context() as context:
        loss = model(torch.ones(2, 3), names)
        if RANK == 0:
            dist_autograd.backward(context, [loss])
        else:
            with pytest.raises(RuntimeError):
                dist_autograd.backward(context, [loss])
    with together():
        if RANK > 0:
            text = capfd.readouterr().err
            assert f"rank {RANK}: in torch.distributed.autograd.backward" in text
            assert "right.weight" in text
            assert "has no gradient on this rank, but on another one" in text
        assert not any(p.grad is not None for p in model.parameters())
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [model(torch.ones(2, 3), ["left", "right"])])
        with together():
            assert len(_own(context, model.module)) == 4


def test_context_that_nobody_told(agents, capfd):
    """The forward pass in no context, and a `backward` that was imported before."""
    model = DDP(mlp(3, 4, 2))
    batch = share(batch_of(2, 3, dtype=torch.float64))
    loss_of(model, batch).backward()  # the functions are replaced now
    loss = loss_of(model, batch)
    with dist_autograd.context() as context, together(), pytest.raises(RuntimeError):
        NOT_WATCHED[0](context, [loss])
    with together():
        assert "it is not known for which context" in capfd.readouterr().err


class Remote:
    """A layer on another worker."""

    def __init__(self, owner: str) -> None:
        self.rref = rpc.remote(owner, _make_layer)

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        return rpc.rpc_sync(self.rref.owner(), _call_layer, args=(self.rref, batch))


def _make_layer() -> nn.Linear:
    """Return a layer without random numbers: other threads of the worker draw some."""
    layer = nn.Linear(3, 3).double()
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, 9).view(3, 3))
        layer.bias.fill_(0.5)
    return layer


def _call_layer(rref: rpc.RRef, batch: torch.Tensor) -> torch.Tensor:
    return rref.local_value()(batch)


def _parameters_of(rref: rpc.RRef) -> list[rpc.RRef]:
    return [rpc.RRef(parameter) for parameter in rref.local_value().parameters()]


def _values_of(rref: rpc.RRef) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in rref.local_value().parameters()]


# The wrapped module of this rank, and its gradients in a context, for calls of rank 0.
_served: list[DDP] = []


def _call_served(batch: torch.Tensor) -> torch.Tensor:
    return _served[0](batch)


def _gradients_of_served(context: int) -> dict[str, torch.Tensor]:
    return _own(context, _served[0].module)


def test_driven_by_another_worker(views, agents):
    """Rank 0 alone runs backward, for wrapped modules of all ranks: their forward is called."""
    _served[:] = [DDP(mlp(3, 4, 2), gradient_as_bucket_view=views)]
    torch.distributed.barrier()
    batch = batch_of(2, 3, dtype=torch.float64)
    expected = mean_of_ranks(
        _served[0].module, lambda m, rank: m(share(batch, rank)).square().sum()
    )
    if RANK == 0:
        with dist_autograd.context() as context:
            calls = [
                rpc.rpc_async(f"rank{rank}", _call_served, args=(share(batch, rank),))
                for rank in range(SIZE)
            ]
            loss = sum(call.wait().square().sum() for call in calls)
            dist_autograd.backward(context, [loss])
            for rank in range(SIZE):
                means = rpc.rpc_sync(f"rank{rank}", _gradients_of_served, args=(context,))
                assert_gradients_close(means, expected)
    torch.distributed.barrier()
    _served.clear()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`TorchScript`")
def test_between_layers_of_another_worker(views, agents):
    """The wrapped module between two remote layers, all stepped by DistributedOptimizer."""
    from torch.distributed.optim import DistributedOptimizer  # it warns

    first, last = Remote(f"rank{(RANK + 1) % SIZE}"), Remote(f"rank{(RANK + 1) % SIZE}")
    model = DDP(mlp(3, 4, 3), gradient_as_bucket_view=views)
    plain = nn.ModuleList([_make_layer(), copy.deepcopy(model.module), _make_layer()])
    steps = torch.optim.SGD(plain.parameters(), lr=0.1)
    remote = [
        parameter
        for layer in (first, last)
        for parameter in rpc.rpc_sync(layer.rref.owner(), _parameters_of, args=(layer.rref,))
    ]
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [*remote, *map(rpc.RRef, model.parameters())], lr=0.1
    )
    for _ in range(3):
        batch = share(batch_of(2, 3, dtype=torch.float64))
        with dist_autograd.context() as context:
            loss = last(model(first(batch))).square().sum()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        steps.zero_grad()
        plain[2](plain[1](plain[0](batch))).square().sum().backward()
        for parameter in plain[1].parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad.div_(SIZE)
        steps.step()
        torch.distributed.barrier()
    with together():
        for ours, theirs in zip(model.module.parameters(), plain[1].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
        for layer, own in ((first, plain[0]), (last, plain[2])):
            values = rpc.rpc_sync(layer.rref.owner(), _values_of, args=(layer.rref,))
            for ours, theirs in zip(values, own.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs.detach())
    torch.distributed.barrier()


def test_mixed_precision_is_refused(agents, capfd):
    model = DDP(nn.Linear(3, 2), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    loss = model(torch.ones(2, 3)).sum()
    with dist_autograd.context() as context, together(), pytest.raises(RuntimeError):
        dist_autograd.backward(context, [loss])
    with together():
        assert "mixed precision is not supported there" in capfd.readouterr().err


def test_reducer_is_freed(agents):
    model = DDP(mlp(3, 4, 2))
    batch = share(batch_of(2, 3, dtype=torch.float64))
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [loss_of(model, batch)])
    reducer = weakref.ref(model.reducer)
    del model
    # The thread that ran the graph lets go of it a little later.
    limit = time.monotonic() + 10
    while gc.collect() >= 0 and reducer() is not None and time.monotonic() < limit:
        time.sleep(0.01)
    with together():
        assert reducer() is None


@pytest.mark.parametrize("option", OPTIONS)
def test_other_passes_go_on(option, views, agents):
    """A plain backward inside of a context, one with inputs, and autograd.grad()."""
    options = {} if option == "plain" else {option: True}
    model = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views, **options)
    with dist_autograd.context():
        for step in range(4):
            batch = batch_of(2, 3, dtype=torch.float64)
            expected = mean_of_ranks(
                model.module, lambda m, rank, batch=batch: loss_of(m, share(batch, rank))
            )
            model.zero_grad()
            loss = loss_of(model, share(batch))
            if step == 2 and option == "plain":
                own = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                assert len(own) == 4
            if step == 3:
                torch.autograd.backward(loss, inputs=list(model.parameters()))
            else:
                loss.backward()
            with together():
                assert_gradients_close(gradients_of(model), expected)


@pytest.mark.essential
def test_who_accumulates(agents):
    """What tells the passes apart on devices whose threads torch's own engine runs."""
    weight = torch.nn.Parameter(torch.ones(2))
    seen = []

    def run(backward):
        output = weight * 2
        output.register_hook(lambda _: seen.append(distributed_autograd.accumulates(weight)))
        backward(output.sum())

    run(lambda loss: loss.backward())
    run(lambda loss: torch.autograd.backward(loss, inputs=[weight]))
    run(lambda loss: torch.autograd.grad(loss, [weight]))
    with dist_autograd.context() as context:
        run(lambda loss: loss.backward())
        run(lambda loss: dist_autograd.backward(context, [loss]))
    with together():
        assert seen == [True, True, False, True, False]
