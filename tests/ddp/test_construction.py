"""What wrapping a model does to it, and what it leaves alone."""

import copy
import io
import pickle
import random

import numpy
import pytest
import torch
import torch.distributed as dist
from models import CASES, loss_of, mlp
from replicas import (
    RANK,
    SIZE,
    all_bits,
    assert_gradients_close,
    assert_replicated,
    assert_same_bits,
    bits,
    gather,
    gradients_of,
    share,
    together,
)
from torch import Tensor, nn

from mpiddp import DistributedDataParallel as DDP
from mpiddp.process_group.state_broadcast import PIECE_BYTES

pytestmark = pytest.mark.mpi


def own_model(case: str) -> nn.Module:
    """Return a model that is this rank's own."""
    torch.manual_seed(100 + RANK)
    return CASES[case].make()


@pytest.mark.essential(keep=3)
@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_start_from_rank_0(case):
    model = own_model(case)
    model.register_buffer("counter", torch.tensor([RANK, 5]))
    frozen = next(parameter for parameter in model.parameters() if parameter.numel())
    frozen.requires_grad_(False)
    digests = gather(all_bits(model.state_dict().items()))
    DDP(model)
    with together():
        assert all_bits(model.state_dict().items()) == digests[0]
        assert SIZE == 1 or digests[0] != digests[1]


def test_state_of_many_pieces_starts_from_rank_0():
    """Tensors that are larger than what is copied at once, of several dtypes and layouts."""
    torch.manual_seed(100 + RANK)
    model = nn.Module()
    model.long = nn.Parameter(torch.randn(3 * PIECE_BYTES // 4 + 5))
    model.transposed = nn.Parameter(torch.randn(1100, 600).t())
    model.channels = nn.Parameter(
        torch.randn(130, 70, 9, 9).contiguous(memory_format=torch.channels_last)
    )
    model.little = nn.Parameter(torch.randn(3))
    model.register_buffer("halves", torch.randn(PIECE_BYTES // 2 + 1).half())
    model.register_buffer("truths", torch.randn(PIECE_BYTES + 7) > 0)
    model.register_buffer("scalar", torch.tensor(RANK))
    model.register_buffer("empty", torch.zeros(0, 4))
    digests = gather(all_bits(model.state_dict().items()))
    versions = {name: tensor._version for name, tensor in model.named_parameters()}
    DDP(model)
    with together():
        assert all_bits(model.state_dict().items()) == digests[0]
        assert SIZE == 1 or digests[0] != digests[1]
        for name, tensor in model.named_parameters():
            assert (tensor._version > versions[name]) == (RANK > 0)


def test_init_sync_off():
    model = own_model("mlp")
    before = all_bits(model.state_dict().items())
    wrapped = DDP(model, init_sync=False)
    with together():
        assert all_bits(model.state_dict().items()) == before
    # Gradients are averaged all the same.
    loss_of(wrapped, torch.ones(2, 5, dtype=torch.float64)).backward()
    assert_same_bits(gradients_of(wrapped).items())


def test_parameters_stay_the_same_objects(views):
    model = own_model("odd layouts")
    before = [(p, p.data_ptr(), p.stride()) for p in model.parameters()]
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for _ in range(2):
        loss_of(wrapped, torch.ones(2, 4)).backward()
    with together():
        for now, (parameter, address, stride) in zip(wrapped.parameters(), before, strict=True):
            assert now is parameter
            assert now.data_ptr() == address
            assert now.stride() == stride
        assert wrapped.module is model


def random_states() -> list[object]:
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        pickle.dumps(numpy.random.get_state()),  # noqa: NPY002  # the state that users share
    ]


def test_random_states_are_left_alone(views):
    model = own_model("mlp")
    batch = share(CASES["mlp"].batch(2 * SIZE))
    before = random_states()
    wrapped = DDP(model, gradient_as_bucket_view=views)
    with together():
        assert random_states() == before
    for _ in range(3):
        loss_of(wrapped, batch).backward()
    with together():
        assert random_states() == before


def test_tensors_of_the_user_are_left_alone(views):
    model = own_model("mlp")
    inputs = [share(CASES["mlp"].batch(2 * SIZE)) for _ in range(3)]
    other = torch.randn(1000)
    before = [bits(tensor) for tensor in [*inputs, other]]
    wrapped = DDP(model, gradient_as_bucket_view=views)
    for batch in inputs:
        loss_of(wrapped, batch).backward()
    # Still resizable, as tensors are that nobody else holds.
    other.resize_(2000)
    with together():
        assert [bits(tensor) for tensor in inputs] == before[:3]
        assert bits(other[:1000]) == before[3]


def test_communicator_of_the_user_is_left_alone():
    """Our messages do not meet those that the user sends on the world meanwhile."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    partner = (RANK + 1) % SIZE
    requests = [
        world.irecv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG),
    ]
    wrapped = DDP(mlp(3, 4, 2))
    for _ in range(3):
        wrapped(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    sent = world.isend(f"from {RANK}", dest=partner, tag=3)
    with together():
        assert requests[0].wait() == f"from {(RANK - 1) % SIZE}"
        sent.wait()


@pytest.mark.smoke
def test_is_torchs_class():
    with together():
        assert isinstance(DDP(mlp(2, 2)), nn.parallel.DistributedDataParallel)


@pytest.mark.smoke
def test_state_dict_and_checkpoint():
    """torch.save and load: with the prefix `module.`, and into a plain model without it."""
    wrapped = DDP(mlp(3, 4, 2))
    loss_of(wrapped, torch.ones(2, 3, dtype=torch.float64)).backward()
    torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
    with together():
        plain = mlp(3, 4, 2)
        assert list(wrapped.state_dict()) == [f"module.{name}" for name in plain.state_dict()]
        file = io.BytesIO()
        torch.save({"with": wrapped.state_dict(), "bare": wrapped.module.state_dict()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        plain.load_state_dict(loaded["bare"])
        assert all_bits(plain.state_dict().items()) == all_bits(wrapped.module.state_dict().items())
    again = DDP(mlp(3, 4, 2))
    again.load_state_dict(loaded["with"])
    assert_same_bits(again.state_dict().items())


def pickled(wrapped: DDP) -> DDP:
    copied = pickle.loads(pickle.dumps(wrapped))
    assert isinstance(copied, DDP)
    return copied


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize("copier", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_copies_train_alone(copier, trained, views):
    """A copy of the wrapper has buckets of its own and gives the same gradients."""
    wrapped = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views)
    batches = torch.randn(4, 2 * SIZE, 3, dtype=torch.float64)
    if trained:
        for batch in batches[:2]:
            loss_of(wrapped, share(batch)).backward()
        wrapped.zero_grad()
    copied = copier(wrapped)
    with together():
        assert copied.reducer is not wrapped.reducer
        assert copied.gradient_as_bucket_view == views
        assert not {id(p) for p in copied.parameters()} & {id(p) for p in wrapped.parameters()}
    for batch in batches[2:]:
        copied.zero_grad()
        loss_of(copied, share(batch)).backward()
        with together():
            assert all(parameter.grad is None for parameter in wrapped.parameters())
        loss_of(wrapped, share(batch)).backward()
        with together():
            assert_gradients_close(gradients_of(copied), gradients_of(wrapped))
        assert_replicated(copied)
        wrapped.zero_grad()


@pytest.mark.essential(keep=1)
def test_copy_of_the_bare_module_is_local(views):
    """Copies of the module inside of the wrapper take nothing of it along."""
    wrapped = DDP(mlp(3, 4, 2), gradient_as_bucket_view=views)
    loss_of(wrapped, torch.ones(2, 3, dtype=torch.float64)).backward()
    local = copy.deepcopy(wrapped.module)
    local.zero_grad()
    if RANK == 0:
        loss_of(local, torch.ones(2, 3, dtype=torch.float64)).backward()
    with together():
        assert (local[0].weight.grad is not None) == (RANK == 0)


def test_attributes_and_modes():
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    wrapped = DDP(model)
    with together():
        assert wrapped.train(False).training is model[1].training is False
        assert wrapped.train().training is model[1].training is True
        assert dict(wrapped.named_parameters()).keys() == {"module.0.weight", "module.0.bias"}
        assert wrapped.process_group is dist.group.WORLD
        assert wrapped.require_backward_grad_sync


def test_moved_to_another_dtype_before_wrapping():
    wrapped = DDP(mlp(3, 4, 2).float().double().half().float())
    loss_of(wrapped, torch.ones(2, 3)).backward()
    with together():
        assert all(p.grad.dtype is torch.float32 for p in wrapped.parameters())
    assert_replicated(wrapped)


@pytest.mark.essential
def test_keyword_and_default_arguments_of_forward():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, *more: Tensor, scale: float = 1, **named: Tensor) -> Tensor:
            return scale * sum((self.weight * y).sum() for y in (x, *more, *named.values()))

    model = Model()
    wrapped = DDP(model)
    one = torch.ones(3)
    wrapped(one, one, one, scale=2, y=one).backward()
    with together():
        assert model.weight.grad.tolist() == [8.0] * 3


@pytest.mark.essential(keep=1)
@pytest.mark.mpi(min_size=2)
def test_group_of_some_ranks(views):
    """A process group of a part of the world averages over that part."""
    members = list(range(SIZE - 1))
    group = dist.new_group(members)
    if RANK in members:
        wrapped = DDP(mlp(3, 2), process_group=group, gradient_as_bucket_view=views)
        for _ in range(2):
            wrapped.zero_grad()
            wrapped(torch.full((1, 3), RANK + 1.0, dtype=torch.float64)).sum().backward()
        gradient = wrapped.module[0].weight.grad[0, 0].item()
        dist.destroy_process_group(group)
    else:
        gradient = None
    with together():
        assert gradient == (SIZE / 2 if RANK in members else None)
