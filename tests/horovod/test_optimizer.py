"""hvd.DistributedOptimizer trains as one process with the whole batch does, and as Horovod's."""

import copy
import time

import pytest
import torch
from horovod_training import assert_trained_alike, distributed, draw, loss_of, net, sgd, step_alone
from models import mlp
from replicas import (
    RANK,
    SIZE,
    assert_close,
    assert_gradients_close,
    assert_replicated,
    gather,
    gradients_of,
    share,
    together,
)
from torch import Tensor, nn

import mpiddp.horovod as hvd

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.essential(keep=2)
@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_trains_as_one_process(make):
    model = net()
    alone = copy.deepcopy(model)
    own, optimizer = make(alone.parameters()), make(model.parameters())
    ours = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    assert isinstance(ours, type(optimizer))
    assert type(ours).__name__ == type(optimizer).__name__
    for _ in range(4):
        batch = draw()
        step_alone(alone, own, batch)
        ours.zero_grad()
        loss_of(model, share(batch)).backward()
        ours.step()
        with together():
            assert_gradients_close(gradients_of(model), gradients_of(alone), 8)
    assert_trained_alike(model, alone, 100)


class Upper(hvd.Compression.none):
    """A compression that Horovod does not know: float64 travels in float32."""

    @staticmethod
    def compress(tensor):
        return tensor.float(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


@pytest.mark.parametrize(
    ("arguments", "tolerance"),
    [
        ({"compression": hvd.Compression.fp16}, 5e9),
        ({"compression": Upper}, 5e6),
        ({"groups": 2}, 8),
        ({"groups": 100}, 8),
        ({"gradient_predivide_factor": 2.0}, 8),
        ({"named_parameters": None}, 8),
        ({"sparse_as_dense": True}, 8),
    ],
    ids=["fp16", "own compression", "2 groups", "100 groups", "predivide", "unnamed", "as dense"],
)
def test_arguments(arguments, tolerance):
    model = net()
    alone = copy.deepcopy(model)
    own = sgd(alone)
    ours = hvd.DistributedOptimizer(
        sgd(model), **{"named_parameters": model.named_parameters(), **arguments}
    )
    for _ in range(3):
        batch = draw()
        step_alone(alone, own, batch)
        ours.zero_grad()
        loss_of(model, share(batch)).backward()
        ours.step()
    assert_trained_alike(model, alone, tolerance)
    if SIZE > 1 and "groups" in arguments:
        with together():
            (average,) = ours._averages
            count = len(average.reducer.buckets)
            assert count == min(arguments["groups"], len(list(model.parameters())))


@pytest.mark.mpi(min_size=2)
def test_groups_of_parameters():
    model = mlp(6, 8, 8, 8, 1)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    together_ = [list(layers[0].parameters()), [layers[1].weight, layers[3].weight]]
    ours = distributed(model, groups=together_)
    for _ in range(2):
        loss_of(model, share(draw())).backward()
        ours.step()
        ours.zero_grad()
    numbers = {id(p): i for i, p in enumerate(model.parameters())}
    wanted = {frozenset(numbers[id(p)] for p in some) for some in together_}
    with together():
        (average,) = ours._averages
        buckets = {frozenset(b.parameter_indices) for b in average.reducer.buckets}
        assert wanted <= buckets
        assert {len(bucket) for bucket in buckets - wanted} == {1}
        assert sum(map(len, buckets)) == len(numbers)
    assert_replicated(model)


def test_sum():
    model = net()
    alone = copy.deepcopy(model)
    ours = distributed(model, op=hvd.Sum)
    for _ in range(3):
        batch = draw()
        alone.load_state_dict(model.state_dict())
        alone.zero_grad()
        (loss_of(alone, batch) * SIZE).backward()
        ours.zero_grad()
        loss_of(model, share(batch)).backward()
        ours.step()
        with together():
            assert_gradients_close(gradients_of(model), gradients_of(alone), 8)
    assert_replicated(model)


@pytest.mark.essential(keep=1)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_buckets_are_reduced_while_backward_runs(compression, monkeypatch):
    """The mean of the first bucket is there before the first layer has its gradient."""
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1")
    model = net().float()
    ours = distributed(model, compression=getattr(hvd.Compression, compression))
    (average,) = ours._averages
    seen = []

    def look(gradient: Tensor) -> None:
        reducer = average.reducer
        if reducer is None:
            return
        # The last bias has gradient 1: the sum of what the ranks give is known.
        (first,) = [b for b in reducer.buckets if b.parameter_indices == (5,)]
        until = time.monotonic() + 20
        while not reducer.next_bucket or float(first.views[0]) != (SIZE + 1) / 2:
            assert time.monotonic() < until
            time.sleep(1e-3)
        seen.append(reducer.next_bucket)

    for _ in range(3):
        hidden = model[0](share(draw()).float())
        hidden.register_hook(look)
        (model[1:](hidden).sum() * (RANK + 1) / 4).backward()
        ours.step()
        ours.zero_grad()
    with together():
        assert len(average.reducer.buckets) == 6
        assert len(seen) == 2
        # Four of six: those of all layers but the first.
        assert min(seen) >= 4


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("compression", "buckets"), [(hvd.Compression.none, 3), (Upper, 2)])
def test_default_sizes_where_messages_are_sent(compression, buckets, monkeypatch):
    """1 MiB; 4 MiB after the first bucket, where each bucket costs work in Python."""
    monkeypatch.setenv("MPIDDP_TRANSPORT", "mpi")
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD", raising=False)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
    ours = distributed(model, compression=compression)
    for _ in range(2):
        model(torch.ones(1, 512)).sum().backward()
        ours.step()
        ours.zero_grad()
    (average,) = ours._averages
    with together():
        assert len(average.reducer.buckets) == buckets


def test_fusion_threshold(monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "a lot")
    if SIZE > 1:
        with together(), pytest.raises(ValueError, match="HOROVOD_FUSION_THRESHOLD"):
            distributed(net())
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD")
    model = net()
    ours = distributed(model)
    loss_of(model, share(draw())).backward()
    ours.step()
    if SIZE > 1:
        with together():
            assert [len(average.reducer.buckets) for average in ours._averages] == [1]


def test_process_set():
    """Ranks outside of the set train alone, those in it together."""
    inside = hvd.add_process_set([0] if SIZE == 1 else range(SIZE - 1)) if SIZE > 1 else None
    if inside is None:
        return
    model = net()
    ours = distributed(model, process_set=inside)
    alone = copy.deepcopy(model)
    own = sgd(alone)
    included = RANK < SIZE - 1
    for _ in range(3):
        batch = draw()
        own.zero_grad()
        ranks = range(SIZE - 1) if included else [RANK]
        (sum(loss_of(alone, share(batch, rank)) for rank in ranks) / len(ranks)).backward()
        own.step()
        ours.zero_grad()
        loss_of(model, share(batch)).backward()
        ours.step()
    with together():
        for (name, a), b in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert_close(a, b, name, 8)
    del ours
    hvd.remove_process_set(inside)


class Words(nn.Module):
    """A model with two sparse gradients: one from the first step on, one from the third."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, sparse=True, dtype=torch.float64)
        self.late = nn.Embedding(9, 4, sparse=True, dtype=torch.float64)
        self.dense = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, step: int, rank: int) -> Tensor:
        x = self.words(torch.tensor([rank, rank, 8, step]))
        if step > 1:
            x = x + self.late(torch.tensor([rank, 1, 1, 2]))
        y: Tensor = self.dense(x).square().sum()
        return y


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_gradients(as_dense, passes):
    model = Words()
    alone = copy.deepcopy(model)
    own = torch.optim.SGD(alone.parameters(), lr=0.01)
    ours = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        sparse_as_dense=as_dense,
        backward_passes_per_step=passes,
    )
    for step in range(5):
        own.zero_grad()
        ours.zero_grad()
        for _ in range(passes):
            (sum(alone(step, rank) for rank in range(SIZE)) / SIZE).backward()
            model(step, RANK).backward()
        own.step()
        ours.step()
        with together():
            assert model.words.weight.grad.is_sparse
            assert_gradients_close(gradients_of(model), gradients_of(alone), 8)
    assert_trained_alike(model, alone)


@pytest.mark.mpi(min_size=2)
def test_sparse_on_some_ranks():
    """A rank that has used no word gets the others' sparse gradient."""
    model = Words()
    ours = hvd.DistributedOptimizer(torch.optim.SparseAdam(model.words.parameters()))
    for step in range(3):
        ours.zero_grad()
        if RANK == 1 or step == 1:
            model(step, RANK).backward()
        ours.step()
        with together():
            assert model.words.weight.grad.is_sparse
    assert_replicated(model.words)


@pytest.mark.mpi(min_size=2)
def test_adasum():
    """Each rank steps by itself, and the steps are added: equal ones give their mean."""
    if SIZE & (SIZE - 1):
        with together(), pytest.raises(ValueError, match="power of two"):
            distributed(net(), op=hvd.Adasum)
        return
    model = net()
    alone = copy.deepcopy(model)
    own, ours = sgd(alone), distributed(model, op=hvd.Adasum)
    batch = draw()
    for _ in range(3):
        step_alone(alone, own, batch)
        ours.zero_grad()
        loss_of(model, batch).backward()
        ours.step()
    assert_trained_alike(model, alone, 100)
    loss_of(model, share(batch)).backward()
    ours.step()
    assert_replicated_parameters(model)
    with together(), pytest.raises(AssertionError), ours.skip_synchronize():
        pass


def assert_replicated_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    assert_replicated(model)


@pytest.mark.mpi(min_size=2)
def test_different_optimizers():
    with together(), pytest.raises(RuntimeError, match=r"make different optimizers.*rank 1"):
        distributed(mlp(6, 16 + (RANK == 1), 1))
    with together(), pytest.raises(RuntimeError, match="compression is"):
        distributed(net(), compression=[hvd.Compression.none, hvd.Compression.fp16][RANK % 2])


def test_refusals():
    model = net()
    named = list(model.named_parameters())
    cases = [
        ({"named_parameters": named + named[:1]}, "unique"),
        ({"named_parameters": named[1:]}, "lacks 1"),
        ({"named_parameters": [p for _, p in named]}, "pairs"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"groups": 0}, "groups"),
        ({"groups": [[1]]}, "groups"),
        ({"groups": [[named[0][1]], [named[0][1]]]}, "once"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"op": 77}, "77 is not a valid"),
        ({"compression": None}, "compression"),
    ]
    with together():
        for arguments, text in cases:
            with pytest.raises(ValueError, match=text):
                hvd.DistributedOptimizer(sgd(model), **arguments)
        with pytest.raises(TypeError, match="optimizer"):
            hvd.DistributedOptimizer(model)
    with together(), pytest.warns(DeprecationWarning, match="groups"):
        ours = hvd.DistributedOptimizer(sgd(model), num_groups=2)
    with together(), pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(ours)
    with together(), pytest.raises(RuntimeError, match="copy"):
        copy.deepcopy(ours).step()


@pytest.mark.mpi(min_size=2)
def test_operations_in_another_order():
    """Operations that ranks submit in any order do not meet those of the optimizer."""
    model = net()
    alone = copy.deepcopy(model)
    own, ours = sgd(alone), distributed(model)
    for step in range(3):
        batch = draw()
        step_alone(alone, own, batch)
        ours.zero_grad()
        loss_of(model, share(batch)).backward()
        handles = []
        for turn in range(2):
            if turn == (RANK + step) % 2:
                handles.append(hvd.allreduce_async(torch.full((3,), float(RANK)), name="rank"))
            else:
                ours.step()
        with together():
            assert hvd.synchronize(handles[0]).tolist() == [(SIZE - 1) / 2] * 3
    assert_trained_alike(model, alone)


def test_memory_goes_with_the_optimizer():
    """The group's channels come back: many optimizers can follow each other."""
    for _ in range(3):
        model = net()
        ours = distributed(model)
        loss_of(model, share(draw())).backward()
        ours.step()
        del ours
    assert gather(True)
