"""Communication hooks that fail, or are registered where none can be: what the error says."""

import gc
import threading
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replicas import RANK, SIZE, together
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

from mpiddp import DistributedDataParallel as DDP

pytestmark = pytest.mark.mpi
several = pytest.mark.mpi(min_size=2)

Future = torch.futures.Future


def completed(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def all_reduce(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    return default_hooks.allreduce_hook(state, bucket)


def raises(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    raise ValueError("broken on purpose")


def returns_no_future(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    return bucket.buffer()


def returns_nothing(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    return None


def fails_later(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    def fail(future: Any) -> None:
        raise KeyError("broken on purpose, later")

    return completed(bucket.buffer()).then(fail)


def set_to_fail(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    future: Future[Any] = Future()
    future.set_exception(ValueError("broken on purpose, too"))
    return future


BROKEN = {
    raises: "raised ValueError: broken on purpose",
    returns_no_future: r"must return a torch.futures.Future object, but got torch.Tensor",
    returns_nothing: "must return a torch.futures.Future object, but got NoneType",
    fails_later: "a future that failed with .*broken on purpose, later",
    set_to_fail: "a future that failed with ValueError: broken on purpose, too",
    lambda state, bucket: completed(bucket.buffer()[1:].clone()): (
        r"must give one tensor like bucket.buffer\(\), shape \(2,\), torch.float32, but gave "
        r"shape \(1,\)"
    ),
    lambda state, bucket: completed(torch.zeros(99)): r"but gave shape \(99,\)",
    lambda state, bucket: completed(bucket.buffer().view(1, -1)): r"but gave shape \(1, 2\)",
    lambda state, bucket: completed(bucket.buffer().cfloat()): "but gave .*torch.complex64",
    lambda state, bucket: completed([bucket.buffer()]): "but gave list",
    lambda state, bucket: completed(None): "but gave NoneType",
}


@pytest.mark.essential(keep=4)
@pytest.mark.parametrize("hook", BROKEN, ids=lambda hook: hook.__name__)
def test_broken_hook(hook, views):
    """The error says which hook failed, where, and for which parameters."""

    def breaks_at_bias(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        at_bias = bucket.parameters()[0] is wrapped.module.bias
        return hook(state, bucket) if at_bias else completed(bucket.buffer())

    wrapped = DDP(nn.Linear(3, 2), gradient_as_bucket_view=views, bucket_cap_mb_list=[0])
    wrapped.register_comm_hook(None, breaks_at_bias)
    loss = wrapped(torch.ones(1, 3)).sum()
    with together(), pytest.raises(RuntimeError, match=BROKEN[hook]) as caught:
        loss.backward()
    with together():
        text = str(caught.value)
        assert f"rank {RANK}: the communication hook " in text
        assert "breaks_at_bias" in text
        assert "gradient bucket 0 (parameter 'bias' of shape (2,))" in text
        with pytest.raises(RuntimeError, match="previous backward pass ended before"):
            wrapped(torch.ones(1, 3))


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("hook", [raises, fails_later, set_to_fail], ids=lambda hook: hook.__name__)
def test_nothing_is_kept_alive(hook):
    """Torch's futures keep the error, whose traceback must not lead back to the module."""

    def run() -> tuple[weakref.ref, str]:
        wrapped = DDP(nn.Linear(3, 2))
        wrapped.register_comm_hook(None, hook)
        with pytest.raises(RuntimeError) as caught:
            wrapped(torch.ones(1, 3)).sum().backward()
        return weakref.ref(wrapped), "".join(traceback.format_exception(caught.value))

    wrapper, text = run()
    gc.collect()
    with together():
        assert wrapper() is None
        assert "broken on purpose" in text
        if hook is raises:
            assert "in raises" in text


def test_error_of_a_future_keeps_its_own_traceback():
    """It says where the error came from that the future was given."""

    def work_of_a_thread(give: Callable[[Exception], None]) -> None:
        try:
            raise ValueError("broken on purpose")
        except ValueError as error:
            give(error)

    def hook(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        errors: list[Exception] = []
        thread = threading.Thread(target=work_of_a_thread, args=(errors.append,))
        thread.start()
        thread.join()
        future: Future[Any] = Future()
        future.set_exception(errors[0])
        return future

    wrapped = DDP(nn.Linear(3, 2))
    wrapped.register_comm_hook(None, hook)
    loss = wrapped(torch.ones(1, 3)).sum()
    with together(), pytest.raises(RuntimeError) as caught:
        loss.backward()
    with together():
        assert "in work_of_a_thread" in "".join(traceback.format_exception(caught.value))


def test_future_that_never_completes():
    group: Any = dist.new_group()
    wrapped = DDP(nn.Linear(3, 2), process_group=group)
    group.set_timeout(timedelta(seconds=0.5))
    wrapped.register_comm_hook(None, lambda state, bucket: Future())
    loss = wrapped(torch.ones(1, 3)).sum()
    with together(), pytest.raises(RuntimeError, match=r"not completed within 0.5 s") as caught:
        loss.backward()
    with together():
        assert "gradient bucket 0" in str(caught.value)
    dist.destroy_process_group(group)


@several
def test_on_one_rank():
    """The others do not wait for ever: the group's time limit ends it, and names the bucket."""
    group: Any = dist.new_group()
    wrapped = DDP(nn.Linear(3, 2), process_group=group)

    def fails_on_last(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        if RANK == SIZE - 1:
            raise ValueError("broken on purpose")
        return default_hooks.allreduce_hook(state, bucket)

    wrapped.register_comm_hook(group, fails_on_last)
    loss = wrapped(torch.ones(1, 3)).sum()
    if RANK < SIZE - 1:
        group.set_timeout(timedelta(seconds=0.5))
    with together(), pytest.raises(RuntimeError, match="gradient bucket 0") as caught:
        loss.backward()
    if RANK == SIZE - 1:
        # It must not meet what the others have given up.
        with pytest.raises(RuntimeError, match="group is broken"):
            dist.all_reduce(torch.zeros(8), group=group)
    with together():
        expected = "broken on purpose" if RANK == SIZE - 1 else "has waited 0.5 s"
        assert expected in str(caught.value)


def test_twice():
    wrapped = DDP(nn.Linear(3, 2))
    wrapped.register_comm_hook(None, all_reduce)
    with together(), pytest.raises(RuntimeError, match="can only be called once"):
        wrapped.register_comm_hook(None, raises)
    with together(), pytest.raises(RuntimeError, match="can only be called once"):
        wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with together():
        assert wrapped._get_ddp_logging_data()["comm_hook"] == "all_reduce"


def test_during_backward():
    wrapped = DDP(nn.Linear(3, 2))
    caught: list[str] = []

    def register(parameter: nn.Parameter) -> None:
        try:
            wrapped.register_comm_hook(None, all_reduce)
        except RuntimeError as error:
            caught.append(str(error))

    handle = wrapped.module.bias.register_post_accumulate_grad_hook(register)
    wrapped(torch.ones(1, 3)).sum().backward()
    handle.remove()  # it keeps the module alive: torch does not find this cycle
    with together():
        assert caught
        assert "cannot be registered during a backward pass" in caught[0]


@several
def test_another_hook_on_another_rank():
    wrapped = DDP(nn.Linear(3, 2))
    with together(), pytest.raises(RuntimeError, match="different communication hooks") as got:
        wrapped.register_comm_hook(None, all_reduce if RANK else debugging_hooks.noop_hook)
    with together():
        assert "gradients travel as all_reduce does it, but as noop_hook" in str(got.value)
