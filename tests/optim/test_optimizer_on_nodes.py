"""A NodeOptimizer on several nodes, over messages, and with communication hooks."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from models import loss_of
from optimizer_pairs import OPTIMIZERS, assert_same_parameters, pair, train, wide
from pretended_nodes import NODES, group_on
from replicas import RANK, SIZE, assert_same_bits, batch_of, gather, share
from torch import Tensor

from mpiddp import DistributedDataParallel as DDP
from mpiddp.optim import NodeOptimizer

pytestmark = [pytest.mark.mpi, pytest.mark.sizes]


@pytest.fixture(params=NODES.values(), ids=NODES.keys())
def group(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dist.ProcessGroup]:
    """Return a group for whose modules the ranks are on these nodes."""
    with group_on(request.param, monkeypatch) as made:
        yield made


@pytest.mark.essential(keep=2)
def test_several_nodes(group: dist.ProcessGroup) -> None:
    """Each node steps its copies; all have the same bits, and those of plain DDP."""
    torch.manual_seed(4)
    plain = DDP(wide(), process_group=group)
    torch.manual_seed(4)
    model = DDP(wide(), process_group=group, shared_parameters=True)
    own = NodeOptimizer(model, torch.optim.AdamW, lr=0.01)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train([(plain, optimizer), (model, own)], 4)
    norm = own.gradient_norm()
    assert_same_bits([("norm", norm)])
    assert_same_bits(model.named_parameters())
    assert_same_parameters(model, plain)


@pytest.mark.parametrize("transport", ["mpi", "exchange"])
def test_other_transports(transport: str) -> None:
    """Messages bring all means to all ranks; parameters are shared all the same."""
    torch.manual_seed(4)
    plain = DDP(wide(), transport=transport)
    torch.manual_seed(4)
    model = DDP(wide(), transport=transport, shared_parameters=True)
    own = NodeOptimizer(model, torch.optim.AdamW, lr=0.01)
    train([(plain, torch.optim.AdamW(plain.parameters(), lr=0.01)), (model, own)], 3)
    assert_same_parameters(model, plain)


@pytest.mark.parametrize("hook", ["fp16", "powers"])
def test_communication_hooks(hook: str) -> None:
    """Registered after the optimizer was made: buckets are new, and whole on all ranks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    models = pair(wide, "momentum")
    for model, _ in models:
        if hook == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(models, 4)
    assert_same_parameters(models[1][0], models[0][0])


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_after_200_steps(name: str, group: dist.ProcessGroup) -> None:
    """The same bits on all nodes, and as plain DDP has them."""
    optimizer_class, settings = OPTIMIZERS[name]
    torch.manual_seed(4)
    plain = DDP(wide(), process_group=group)
    torch.manual_seed(4)
    model = DDP(wide(), process_group=group, shared_parameters=True)
    own = NodeOptimizer(model, optimizer_class, **settings)
    train([(plain, optimizer_class(plain.parameters(), **settings)), (model, own)], 200)
    assert_same_bits(model.named_parameters())
    assert_same_parameters(model, plain)


@pytest.mark.thorough(keep=5)
def test_scaled_and_clipped(group: dist.ProcessGroup) -> None:
    """What overflows on one node is skipped on all; norms are of all gradients."""
    scales, models = [], []
    for shared in (False, True):
        torch.manual_seed(4)
        model = DDP(wide(), process_group=group, shared_parameters=shared)
        optimizer: torch.optim.Optimizer
        if shared:
            optimizer = NodeOptimizer(model, torch.optim.AdamW, lr=0.01)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        models.append(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(6):
            torch.manual_seed(step)
            loss = loss_of(model, share(batch_of(3, 30, dtype=torch.float32)))
            optimizer.zero_grad()
            if step == 3 and RANK == SIZE - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm: Tensor
            if isinstance(optimizer, NodeOptimizer):
                norm = optimizer.clip_grad_norm_(0.01)
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            scales.append((scaler.get_scale(), bool(norm.isfinite())))
    assert len(set(gather(str(scales)))) == 1
    assert scales[:6] == scales[6:]
    assert scales[3] == (8.0, False)
    assert_same_bits(models[1].named_parameters())
    assert_same_parameters(models[1], models[0], exact=False)
