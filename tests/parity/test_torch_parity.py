"""Our class and torch's own DistributedDataParallel on Gloo agree, in the same process and run."""

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from models import CASES, GivenGradients, loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    STEPS,
    all_bits,
    assert_close,
    assert_gradients_close,
    assert_replicated,
    gradients_of,
    share,
    together,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch_versions import BUFFERS_KEEP_VERSIONS, HAS_FORWARD_SYNC_BUFFERS, for_torch

from mpiddp import DistributedDataParallel as DDP

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides"),
]


def wrap_both(
    module: nn.Module, group: dist.ProcessGroup, **options: object
) -> tuple[DDP, TorchDDP]:
    """Return two equal models, wrapped by our class and by torch's."""
    return (
        DDP(copy.deepcopy(module), **options),
        TorchDDP(copy.deepcopy(module), process_group=group, **for_torch(options)),
    )


@pytest.mark.essential(keep=5)
@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_parameters(case, views, gloo):
    pair = wrap_both(CASES[case].make(), gloo, gradient_as_bucket_view=views)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5) for model in pair]
    rounding = CASES[case].rounding  # Gloo adds 16-bit gradients in 16 bits
    for step in range(STEPS):
        batch = share(CASES[case].batch(2 * SIZE))
        for model, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=step != 1)
            loss_of(model, batch).backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair), 2, rounding)
        for optimizer in optimizers:
            optimizer.step()
        with together():
            ours, theirs = (dict(model.named_parameters()) for model in pair)
            assert ours.keys() == theirs.keys()
            for name, parameter in ours.items():
                assert_close(parameter, theirs[name], name, 2, rounding)
        assert_replicated(pair[0])


@pytest.mark.essential(keep=1)
def test_parameters_unused_in_turn(views, gloo):
    """The same gradients, or None, when ranks use different parameters at each step."""
    names = ["a", "b", "c", "d"]
    module = GivenGradients(**{name: torch.zeros(3) for name in names})
    pair = wrap_both(module, gloo, find_unused_parameters=True, gradient_as_bucket_view=views)
    generator = torch.Generator().manual_seed(3)
    for step in range(6):
        # d is used from the third step on; every rank uses a.
        used = torch.rand(SIZE, 4, generator=generator) < 0.4
        used[:, 0] = True
        if step < 2:
            used[:, 3] = False
        given = {
            name: torch.randn(3) + RANK for column, name in enumerate(names) if used[RANK, column]
        }
        for model in pair:
            # Old gradients stay on even steps: who is unused everywhere must keep them.
            if step % 2:
                model.zero_grad()
            model(given).backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair))


@pytest.mark.essential(keep=1)
def test_accumulation_under_no_sync(views, gloo):
    pair = wrap_both(mlp(3, 4, 2), gloo, gradient_as_bucket_view=views)
    for step in range(6):
        batch = torch.randn(2, 3, dtype=torch.float64) + RANK
        for model in pair:
            if step % 3 == 2:
                loss_of(model, batch).backward()
            else:
                with model.no_sync():
                    loss_of(model, batch).backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair))


@pytest.mark.essential(keep=1)
def test_second_backward_of_one_forward(views, gloo):
    """Only the first backward after a forward is averaged: so it is in torch's class."""
    pair = wrap_both(mlp(3, 4, 2), gloo, gradient_as_bucket_view=views)
    for _ in range(2):
        batch = torch.randn(2, 3, dtype=torch.float64) + RANK
        for model in pair:
            model.zero_grad()
            loss = loss_of(model, batch)
            loss.backward(retain_graph=True)
            loss.backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair))


class _Seen(nn.Module):
    """Records the buffers that a forward call finds, then changes them in its rank's own way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("average", torch.zeros(3))
        self.seen: list[tuple[int, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.count, Tensor)
        assert isinstance(self.average, Tensor)
        self.seen.append((int(self.count[1]), float(self.average[2])))
        self.count += RANK + 1
        self.average += 0.5 * RANK + 1
        return (self.weight * x).sum()


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("synchronise", [True, False], ids=["synchronised", "local"])
def test_when_buffers_are_synchronised(synchronise, gloo):
    """At the same forward calls: in training, evaluation, under no_grad, around no_sync."""
    pair = wrap_both(_Seen(), gloo, forward_sync_buffers=synchronise)
    x = torch.ones(2)
    for model in pair:
        for _ in range(2):
            model(x).backward()
        model.eval()
        model(x)
        with torch.no_grad():
            model(x)
            model(x)
        model.train()
        model(x).backward()
        with model.no_sync():
            model(x).backward()
            model(x).backward()
        model(x).backward()
        model(x).backward()
    with together():
        assert pair[0].module.seen == pair[1].module.seen
        assert len(pair[0].module.seen) == 10
        assert all_bits(pair[0].named_buffers()) == all_bits(pair[1].named_buffers())


@pytest.mark.skipif(  # an older torch's forward changes what backward needs
    not BUFFERS_KEEP_VERSIONS, reason="this torch's forward changes what backward needs"
)
def test_two_forwards_with_batch_norm_before_one_backward(gloo):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    pair = wrap_both(module, gloo)
    for _ in range(2):
        batches = torch.randn(2, 5, 3) + RANK
        for model in pair:
            model.zero_grad()
            (model(batches[0]) * model(batches[1]).detach()).sum().backward()
        with together():
            assert_gradients_close(*map(gradients_of, pair), 10)
            assert all_bits(pair[0].named_buffers()) == all_bits(pair[1].named_buffers())


@pytest.mark.essential
def test_buckets_after_rebuilding(gloo):
    """The same parameters share a bucket, in the same order, as in torch's class."""
    widths = [4, 30, 8, 50, 3, 20, 20, 2]
    pair = wrap_both(mlp(*widths), gloo, bucket_cap_mb=0.005)
    for _ in range(4):  # rebuilt at the second forward, logged at the third
        for model in pair:
            loss_of(model, torch.randn(2, 4, dtype=torch.float64)).backward()
    with together():
        ours, theirs = (model._get_ddp_logging_data() for model in pair)
        assert ours["rebuilt_bucket_sizes"] == theirs["rebuilt_bucket_sizes"]
        assert len(ours["rebuilt_bucket_sizes"].split(",")) == 3


@pytest.mark.essential
def test_checkpoints_are_interchangeable(gloo):
    pair = wrap_both(mlp(3, 4, 2), gloo)
    loss_of(pair[0], torch.randn(2, 3, dtype=torch.float64)).backward()
    torch.optim.SGD(pair[0].parameters(), lr=0.1).step()
    with together():
        assert list(pair[0].state_dict()) == list(pair[1].state_dict())
        pair[1].load_state_dict(pair[0].state_dict())
        assert all_bits(pair[0].state_dict().items()) == all_bits(pair[1].state_dict().items())
        plain = mlp(3, 4, 2)
        plain.load_state_dict(pair[0].module.state_dict())
        unwrapped = {
            name.removeprefix("module."): tensor for name, tensor in pair[0].state_dict().items()
        }
        plain.load_state_dict(unwrapped)


@pytest.mark.smoke
def test_same_arguments_as_torch():
    ours = dict(inspect.signature(DDP.__init__).parameters)
    own = ours.pop("transport")
    sharing = ours.pop("shared_parameters")
    theirs = inspect.signature(TorchDDP.__init__).parameters
    with together():
        assert own.kind is inspect.Parameter.KEYWORD_ONLY
        assert own.default is None
        assert sharing.kind is inspect.Parameter.KEYWORD_ONLY
        assert sharing.default is None
        assert [name for name in ours if name in theirs] == list(theirs)
        added = ours.keys() - theirs.keys()
        changed = {name for name in theirs if ours[name].default != theirs[name].default}
        # What later releases have brought is there on all.
        newer = {"lazy_bucket_allocation"}
        if HAS_FORWARD_SYNC_BUFFERS:
            assert added <= newer
            assert not changed
        else:
            assert added <= newer | {"batched_grad_copy", "forward_sync_buffers"}
            assert changed == {"broadcast_buffers"}
