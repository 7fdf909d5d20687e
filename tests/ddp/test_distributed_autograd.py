"""Backward passes of torch.distributed.autograd raise, and the others go on as before."""

import copy
import socket
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


def _wrapped(views: bool) -> tuple[DDP, torch.Tensor]:
    return DDP(mlp(3, 4, 2), gradient_as_bucket_view=views), batch_of(2, 3, dtype=torch.float64)


OPTIONS = ["plain", "find_unused_parameters", "static_graph"]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("forward_inside", [True, False])
def test_distributed_backward_raises(option, forward_inside, views, agents, capfd):
    options = {} if option == "plain" else {option: True}
    model = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views, **options)
    batch = share(batch_of(2, 3, dtype=torch.float64))
    before = copy.deepcopy(model.module.state_dict())
    outside = loss_of(model, batch)
    with dist_autograd.context() as context:
        loss = loss_of(model, batch) if forward_inside else outside
        with together(), pytest.raises(RuntimeError):
            dist_autograd.backward(context, [loss])
    with together():
        text = capfd.readouterr().err
        assert f"rank {RANK}: torch.distributed.autograd.backward was called" in text
        assert "loss.backward()" in text
        assert all(gradient is None for gradient in gradients_of(model).values())
        assert all(torch.equal(v, before[k]) for k, v in model.module.state_dict().items())


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


def test_gradients_of_the_context_under_no_sync(agents):
    """What the error advises."""
    model, batch = _wrapped(False)
    expected = mean_of_ranks(model.module, lambda m, rank: loss_of(m, share(batch, rank)))
    with dist_autograd.context() as context:
        with model.no_sync():
            loss = loss_of(model, share(batch))
        dist_autograd.backward(context, [loss])
        own = dist_autograd.get_gradients(context)
        means = {name: own[p] for name, p in model.module.named_parameters()}
        for gradient in means.values():
            torch.distributed.all_reduce(gradient)
            gradient.div_(SIZE)
    with together():
        assert_gradients_close(means, expected)


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
