"""Errors in a part of the world name ranks by their numbers in the world, and say so."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import loss_of
from replicas import RANK, SIZE, together

from mpiddp import DistributedDataParallel as DDP
from mpiddp import checkpoint

pytestmark = [pytest.mark.mpi(min_size=3), pytest.mark.sizes]

# The innocent one has the guilty one's number in the group.
MEMBERS = [1, SIZE - 1]
GUILTY = RANK == SIZE - 1


@pytest.fixture
def group() -> Iterator[Any]:
    made = dist.new_group(MEMBERS, timeout=timedelta(seconds=20))
    yield made
    if RANK in MEMBERS:
        dist.destroy_process_group(made)


class Branches(torch.nn.Module):
    """Uses one of two layers only on the guilty rank, from its third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = self.always(inputs)
        return out if GUILTY and self.calls > 2 else out + self.sometimes(inputs)


def other_model(group: Any) -> None:
    DDP(torch.nn.Linear(3, 4 if GUILTY else 5), process_group=group)


def other_argument(group: Any) -> None:
    DDP(torch.nn.Linear(3, 4), process_group=group, init_sync=GUILTY)


def unused(group: Any, **arguments: Any) -> None:
    model = DDP(Branches(), process_group=group, **arguments)
    for _ in range(4):
        loss_of(model, torch.ones(2, 3)).backward()


def static_graph(group: Any) -> None:
    unused(group, static_graph=True)


def hook(group: Any) -> None:
    def raise_there(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if GUILTY:
            raise ValueError("mine")
        return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()

    model = DDP(torch.nn.Linear(3, 4), process_group=group)
    model.register_comm_hook(None, raise_there)
    if GUILTY:  # the other one would wait for it
        loss_of(model, torch.ones(2, 3)).backward()


def save(group: Any) -> None:
    checkpoint.save({}, "nowhere", step=SIZE if GUILTY else 0, group=group)


@pytest.mark.parametrize("fail", [other_model, other_argument, unused, static_graph, save, hook])
def test_who_differs(group: Any, fail: Callable[[Any], None]) -> None:
    words = ""
    if RANK in MEMBERS:
        if fail is hook and not GUILTY:
            fail(group)
        else:
            with pytest.raises(RuntimeError) as caught:
                fail(group)
            words = str(caught.value)
    with together():
        if fail is hook:
            assert not GUILTY or words.startswith(f"rank {RANK} of the world: the communication")
        elif words:
            assert f"rank {SIZE - 1}" in words
            # Not the number in the group, unless that is a world rank as well.
            assert "rank 0" not in words


@pytest.mark.parametrize("source", [SIZE - 1, None], ids=["one rank", "any rank"])
def test_from_whom_a_message_is_waited_for(group: Any, source: "int | None") -> None:
    with together():
        if RANK == 1:
            group.set_timeout(timedelta(seconds=1))  # no rank sends anything
            with pytest.raises(RuntimeError, match="has waited 1 s") as caught:
                dist.recv(torch.ones(3), src=source, group=group)
            if source is None:
                caught.match("recvAnySource from any rank")
            else:
                caught.match(f"rank 0 of 2, world rank 1: recv from world rank {source} on")


def test_a_message_of_another_size(group: Any) -> None:
    with together():
        if RANK == 1:
            with pytest.raises(RuntimeError) as caught:
                dist.recv(torch.ones(3), src=SIZE - 1, group=group)
            caught.match(rf"rank 1 of the world: a message of 4 bytes from world rank {SIZE - 1} ")
        elif GUILTY:
            dist.send(torch.ones(1), 1, group=group)


@pytest.mark.parametrize(
    "odd",
    [
        lambda module: {"init_sync": False},
        lambda module: {"static_graph": True},
        lambda module: {
            "delay_all_reduce_named_params": [("0.weight", module[0].weight)],
            "param_to_hook_all_reduce": module[1].weight,
        },
    ],
    ids=["init_sync", "static_graph", "delayed parameters"],
)
def test_arguments_that_change_what_is_sent(odd: Callable[[Any], "dict[str, Any]"]) -> None:
    """They are compared before anything is, and refused with both values."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    arguments = odd(module)
    with together(), pytest.raises(RuntimeError, match="in different ways") as caught:
        DDP(module, **(arguments if GUILTY else {}))
    with together():
        caught.match(rf"on rank {SIZE - 1} argument {next(iter(arguments))} is .* but .* on rank 0")
