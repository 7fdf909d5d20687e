"""Buckets: their sizes, their order, how it is rebuilt once, that they start in that order."""

import pytest
import torch
import torch.distributed as dist
from models import GivenGradients, mlp
from replicas import (
    RANK,
    SIZE,
    assert_replicated,
    call_behind_wrapper,
    gather,
    lies_in_buckets,
    together,
)
from torch import Tensor

from mpiddp import DistributedDataParallel as DDP

pytestmark = [pytest.mark.mpi, pytest.mark.sizes]

MIB = 2**20
SMALLEST = 1e-6  # one byte: each parameter has a bucket of its own


def assignment(wrapped: DDP) -> list[list[int]]:
    """Return the parameter indices of each bucket in the order of launching."""
    return [list(bucket.parameter_indices) for bucket in wrapped.reducer.buckets]


def model_of(*nbytes: int) -> GivenGradients:
    """Return a model whose parameters have these sizes, named a, b, c and so on."""
    assert len(nbytes) <= 60
    return GivenGradients(
        **{chr(ord("A") + i): torch.zeros(size, dtype=torch.uint8).view(torch.float32).clone()
           for i, size in enumerate(nbytes)}
    )  # fmt: skip


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("transport", ["shared", "mpi"])
def test_default_sizes(transport):
    """From the last parameter to the first; smaller buckets where they are sent."""
    wrapped = DDP(model_of(*[MIB] * 28), init_sync=False, transport=transport)
    size = 1 if transport == "mpi" and SIZE > 1 else 25
    with together():
        assert assignment(wrapped) == in_buckets_of(size)


@pytest.mark.parametrize("transport", ["shared", "mpi"])
def test_default_sizes_with_a_hook_in_python(transport):
    """Each bucket is a call, so there are fewer, when buckets are built anew."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = model_of(*[MIB] * 28)
    wrapped = DDP(model, init_sync=False, transport=transport)
    wrapped.register_comm_hook(None, hook)
    for _ in range(2):
        gradients = {name: torch.ones(MIB // 4) for name, _ in model.named_parameters()}
        wrapped(gradients).backward()
    size = 4 if transport == "mpi" and SIZE > 1 else 25
    with together():
        assert assignment(wrapped) == in_buckets_of(size)


def in_buckets_of(size: int) -> list[list[int]]:
    """Return the buckets of 28 parameters of 1 MiB each, of which the first bucket has one."""
    rest = range(26, -1, -size)
    return [[27], *(list(range(last, max(last - size, -1), -1)) for last in rest)]


def test_size_given():
    """As in torch's class, a size that is given holds for the first bucket too."""
    wrapped = DDP(model_of(*[MIB // 2] * 7), bucket_cap_mb=1, init_sync=False)
    with together():
        assert assignment(wrapped) == [[6, 5], [4, 3], [2, 1], [0]]


def test_bucket_is_closed_by_the_parameter_that_fills_it():
    wrapped = DDP(model_of(8, 4, 40, 4, 4, 8), bucket_cap_mb=12 / MIB)
    with together():
        assert assignment(wrapped) == [[5, 4], [3, 2], [1, 0]]


def test_list_of_sizes():
    """One size a bucket; the last one holds for all that follow."""
    sizes = [1, 2, 3]
    model = model_of(*[MIB // 2] * 20)
    wrapped = DDP(model, bucket_cap_mb_list=sizes, init_sync=False)
    expected = [[19, 18], [17, 16, 15, 14], [*range(13, 7, -1)], [*range(7, 1, -1)], [1, 0]]
    with together():
        assert assignment(wrapped) == expected
    for _ in range(2):
        wrapped({name: torch.ones(MIB // 8) * RANK for name, _ in model.named_parameters()})\
            .backward()  # fmt: skip
        wrapped.zero_grad()
    with together():
        assert assignment(wrapped) == expected


def test_one_dtype_a_bucket():
    dtypes = [torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float64]
    model = GivenGradients(
        **{f"p{i}": torch.zeros(3, dtype=dtype) for i, dtype in enumerate(dtypes)}
    )
    wrapped = DDP(model)
    with together():
        assert sorted(assignment(wrapped)) == [[2, 0], [3], [4, 1]]
    assert len({str(order) for order in gather(assignment(wrapped))}) == 1


def test_tensors_that_need_no_gradient_have_no_place():
    model = mlp(3, 4, 4, 2)
    model[2].requires_grad_(False)
    wrapped = DDP(model)
    with together():
        assert assignment(wrapped) == [[3, 2, 1, 0]]
        assert len(wrapped.reducer.parameters) == 4


def coefficients(order: str, value: float = 1) -> dict[str, Tensor]:
    """Return gradients that arrive in this order, each of its parameter's own size."""
    sizes = {"a": 5, "b": 1000, "c": 17, "d": 2}
    return {name: torch.full((sizes[name],), value) for name in reversed(order)}


def orders_of_rank(step: int) -> str:
    """Return an order of arrival that differs from rank to rank and from step to step."""
    return ["cadb", "bdac", "dabc", "acbd", "dcba"][(RANK + step) % 5]


def check_means(model: GivenGradients, step: int) -> None:
    for name, parameter in model.named_parameters():
        expected = torch.full_like(parameter, step + (SIZE - 1) / 2)
        assert torch.equal(parameter.grad, expected), f"{name} in step {step}"


def make(views: bool, cap: float = SMALLEST) -> tuple[GivenGradients, DDP]:
    sizes = {"a": 5, "b": 1000, "c": 17, "d": 2}
    model = GivenGradients(**{name: torch.zeros(size) for name, size in sizes.items()})
    return model, DDP(model, gradient_as_bucket_view=views, bucket_cap_mb=cap)


@pytest.mark.essential
@pytest.mark.smoke(keep=1)
def test_rebuilt_once_in_the_order_of_rank_0(views):
    model, wrapped = make(views)
    with together():
        assert assignment(wrapped) == [[3], [2], [1], [0]]
        assert not wrapped.reducer.has_rebuilt_buckets
    buckets = wrapped.reducer.buckets
    for step in range(4):
        wrapped(coefficients(orders_of_rank(step), step + RANK)).backward()
        with together():
            check_means(model, step)
            if step == 0:
                assert wrapped.reducer.buckets is buckets
                assert not wrapped.reducer.has_rebuilt_buckets
            else:
                # Rank 0 saw "cadb", whatever the others saw and whatever came later.
                assert assignment(wrapped) == [[2], [0], [3], [1]]
                assert wrapped.reducer.has_rebuilt_buckets
                if step == 1:
                    buckets = wrapped.reducer.buckets
                assert wrapped.reducer.buckets is buckets
        assert_replicated(wrapped)
        wrapped.zero_grad(set_to_none=step % 2 == 0)


def test_rebuilt_where_another_device_is_the_default(views):
    """The ranks agree by tensors in host memory, wherever the user's new ones are."""
    wrapped = DDP(mlp(4, 3, 2), gradient_as_bucket_view=views)
    with torch.device("meta"):
        for _ in range(2):
            inputs = torch.ones(2, 4, dtype=torch.float64, device="cpu")
            wrapped(inputs).sum().backward()
    with together():
        assert wrapped.reducer.has_rebuilt_buckets
        assert all(parameter.grad.device.type == "cpu" for parameter in wrapped.parameters())


def test_rebuilt_after_the_first_reduction_only(views):
    """Accumulation under no_sync comes before the first iteration."""
    model, wrapped = make(views)
    with wrapped.no_sync():
        wrapped(coefficients("abcd", RANK)).backward()
        wrapped(coefficients("abcd", 0)).backward()
        with together():
            assert not wrapped.reducer.has_rebuilt_buckets
    wrapped(coefficients("dbca", 0)).backward()
    with together():
        assert not wrapped.reducer.has_rebuilt_buckets
        check_means(model, 0)
    wrapped(coefficients("abcd", 0)).backward()
    with together():
        assert assignment(wrapped) == [[3], [1], [2], [0]]
        check_means(model, 0)


def test_gradients_survive_rebuilding(views):
    """Who does not zero gradients accumulates means, also over the rebuilding."""
    model, wrapped = make(views)
    total = 0.0
    for step in range(3):
        loss = wrapped(coefficients(orders_of_rank(step), step + RANK))
        if views and step:
            # Not in the old buckets, whose memory is to be freed.
            with together():
                assert all(lies_in_buckets(wrapped, p.grad) for p in model.parameters())
        loss.backward()
        total += step + (SIZE - 1) / 2
        with together():
            for name, parameter in model.named_parameters():
                assert torch.allclose(parameter.grad, torch.full_like(parameter, total)), name
        assert_replicated(wrapped)


def test_unused_parameters_come_last_when_rebuilt(views):
    sizes = {"a": 5, "b": 1000, "c": 17, "d": 2}
    model = GivenGradients(**{name: torch.zeros(size) for name, size in sizes.items()})
    wrapped = DDP(
        model,
        gradient_as_bucket_view=views,
        bucket_cap_mb=SMALLEST,
        find_unused_parameters=True,
    )
    for step in range(3):
        wrapped.zero_grad()
        wrapped(coefficients("ca" if RANK == 0 else "cabd", SIZE)).backward()
        with together():
            assert model.a.grad.unique().tolist() == [SIZE]
            others = (model.b.grad, model.d.grad)
            if SIZE == 1:
                assert others == (None, None)
            else:
                assert all(gradient.unique().tolist() == [SIZE - 1] for gradient in others)
            if step:
                assert assignment(wrapped)[:2] == [[2], [0]]
                assert sorted(assignment(wrapped)) == [[0], [1], [2], [3]]


@pytest.mark.essential(keep=1)
def test_launched_in_order_of_index(views):
    """No bucket starts before its predecessors, in whatever order gradients arrive.

    Counts the buckets that were handed to the engine after each gradient.
    """
    model, wrapped = make(views)
    engine = wrapped.process_group.engine
    parameters = dict(model.named_parameters())
    index_of = {name: index for index, name in enumerate(parameters)}
    launched: list[tuple[str, int]] = []
    nodes = [
        call_behind_wrapper(
            parameter, lambda _, name=name: launched.append((name, engine.counters["submitted"]))
        )
        for name, parameter in parameters.items()
    ]
    assert all(nodes)
    for step in range(6):
        order = orders_of_rank(step)
        wrapped.zero_grad()
        loss = wrapped(coefficients(order, step + RANK))
        before = engine.counters["submitted"]
        launched.clear()
        loss.backward()
        with together():
            assert [name for name, _ in launched] == list(order)
            arrived: set[int] = set()
            for name, count in launched:
                arrived.add(index_of[name])
                complete = [arrived.issuperset(bucket) for bucket in assignment(wrapped)]
                prefix = (complete + [False]).index(False)
                assert count - before == prefix, f"step {step}, after {name} of {order}"
            assert engine.counters["submitted"] - before == 4
            check_means(model, step)
        assert_replicated(wrapped)


@pytest.mark.essential(keep=2)
@pytest.mark.parametrize("cap", [0, SMALLEST, 40 / MIB, 0.01, 1000])
def test_any_size_gives_the_mean(cap, views):
    model, wrapped = make(views, cap)
    for step in range(4):
        wrapped.zero_grad(set_to_none=step != 2)
        wrapped(coefficients(orders_of_rank(step), step + RANK)).backward()
        with together():
            check_means(model, step)


def test_many_buckets(views):
    """More buckets than can be in flight, all of different sizes."""
    sizes = {f"p{i}": 1 + (i * 37) % 101 for i in range(60)}
    model = GivenGradients(**{name: torch.zeros(size) for name, size in sizes.items()})
    wrapped = DDP(model, gradient_as_bucket_view=views, bucket_cap_mb=SMALLEST)
    names = list(sizes)
    for step in range(3):
        generator = torch.Generator().manual_seed(SIZE * step + RANK)
        order = [names[i] for i in torch.randperm(60, generator=generator).tolist()]
        wrapped.zero_grad()
        wrapped(
            {name: torch.full((sizes[name],), 60.0 * RANK + names.index(name)) for name in order}
        ).backward()
        with together():
            for index, name in enumerate(names):
                expected = torch.full((sizes[name],), 60 * (SIZE - 1) / 2 + index)
                assert torch.equal(model.get_parameter(name).grad, expected), name
        assert_replicated(wrapped)
