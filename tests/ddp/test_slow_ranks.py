"""A rank that the others wait for is found and told, and `mpiddp.metrics` has the numbers."""

import re
import time
import weakref

import mpirun
import numpy
import pytest
import torch
import torch.distributed as dist
from replicas import RANK
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import mpiddp
from mpiddp import DistributedDataParallel as DDP
from mpiddp.ddp.slow_ranks import Window, slowest_of
from mpiddp.reducer.step_times import COMPARED

# Longer than what a busy machine adds to a step now and then.
LATE = 0.01


def window_of(waits: numpy.ndarray, hosts: list[int], step: float = 0.1) -> Window:
    """Return what ranks have said whose steps all take so long."""
    rows = numpy.zeros((len(waits), 7 + COMPARED))
    rows[:, 0] = hosts
    rows[:, 1] = step * COMPARED
    rows[:, 7:] = waits
    return Window(rows)


@pytest.mark.once
class TestWindow:
    def test_last_rank_waits_least(self) -> None:
        waits = numpy.full((3, COMPARED), 0.031)
        waits[1] = 0.001
        waits[1, 0], waits[2, 0] = 0.031, 0.001
        found = window_of(waits, [1, 1, 1])
        assert found.last.tolist() == [2] + [1] * (COMPARED - 1)
        assert found.lead == pytest.approx([0.03] * COMPARED)
        assert found.waited == pytest.approx(
            [0.03, 0.03 / COMPARED, 0.03 * (COMPARED - 1) / COMPARED]
        )
        slow = slowest_of([found, found])
        assert slow is not None
        assert slow.is_worth_telling()
        assert (slow.ranks, slow.steps, slow.of) == ([1], 2 * (COMPARED - 1), 2 * COMPARED)
        assert slow.lost == pytest.approx(0.03)
        assert slow.step == pytest.approx(0.1)

    def test_communication_alone_makes_nobody_late(self) -> None:
        generator = numpy.random.default_rng(0)
        waits = 0.05 + generator.uniform(0, 0.001, (4, COMPARED))
        found = window_of(waits, [1, 1, 2, 2])
        assert set(found.last) == {-1}
        assert slowest_of([found]) is None

    def test_ranks_without_inputs_are_left_out(self) -> None:
        waits = numpy.full((3, COMPARED), 0.031)
        waits[0] = numpy.nan
        waits[1] = 0.001
        waits[1:, :5] = numpy.nan  # nobody has inputs
        waits[1, 5] = numpy.nan  # one rank alone
        found = window_of(waits, [1, 1, 1])
        assert found.last.tolist() == [-1] * 6 + [1] * (COMPARED - 6)
        assert found.waited.tolist()[0] == 0.0

    def test_ranks_of_a_slow_host_are_late_in_turn(self) -> None:
        waits = numpy.full((6, COMPARED), 0.051)
        for step in range(COMPARED):
            waits[2 + step % 2, step] = 0.001
            waits[3 - step % 2, step] = 0.004
        windows = [window_of(waits, [1, 1, 2, 2, 3, 3])] * 2
        slow = slowest_of(windows)
        assert slow is not None
        assert slow.ranks == [2, 3]
        assert slow.is_worth_telling()
        # On one host these are not a host among others.
        alone = slowest_of([window_of(waits, [1] * 6)] * 2)
        assert alone is not None
        assert not alone.is_worth_telling()

    def test_what_costs_little_is_not_told(self) -> None:
        waits = numpy.full((2, COMPARED), 0.004)
        waits[1] = 0.001
        slow = slowest_of([window_of(waits, [1, 1])])
        assert slow is not None
        assert slow.ranks == [1]
        assert not slow.is_worth_telling()


@pytest.fixture
def model(world: None) -> DDP:
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def train(model: nn.Module, steps: int, late: int = -1) -> None:
    for _ in range(steps):
        loss = model(torch.ones(2, 8)).sum()
        if late == RANK:
            time.sleep(LATE)
        loss.backward()


@pytest.mark.mpi
class TestMetrics:
    def test_before_the_first_step(self, model: DDP) -> None:
        found = mpiddp.metrics(model)
        assert found.pop("bytes") > 0
        assert found.pop("bucket_cap_mb") > 0
        assert found.pop("slowest_rank") == -1
        assert set(found.values()) == {0}

    def test_parts_of_a_step(self, model: DDP) -> None:
        train(model, 3)
        began = time.perf_counter()
        mpiddp.metrics(model)
        time.sleep(0.02)  # the optimizer
        loss = model(torch.ones(2, 8)).sum()
        time.sleep(0.03)
        loss.backward()
        found = mpiddp.metrics(model)
        took = (time.perf_counter() - began) * 1e3
        assert (found["step"], found["steps"]) == (4, 1)
        assert 20 <= found["between_ms"] < took
        assert 30 <= found["backward_ms"] < took
        assert found["forward_ms"] > 0
        assert found["exposed_ms"] > 0
        parts = ("between_ms", "forward_ms", "backward_ms", "exposed_ms")
        assert found["step_ms"] == pytest.approx(sum(found[name] for name in parts))
        assert found["mean_step_ms"] == pytest.approx(found["step_ms"])
        assert 0 <= found["hidden_share"] < 1

    def test_means_since_the_last_question(self, model: DDP) -> None:
        train(model, 5)
        mpiddp.metrics(model)
        steps = []
        for _ in range(4):
            train(model, 1)
            steps.append(model.reducer.times.last()[0] * 1e3)
        found = mpiddp.metrics(model)
        assert found["steps"] == 4
        assert found["mean_step_ms"] == pytest.approx(sum(steps) / 4)
        assert mpiddp.metrics(model)["steps"] == 0

    def test_bytes_are_those_that_travel(self, model: DDP) -> None:
        gradients = sum(each.nbytes for each in model.parameters())
        before = mpiddp.metrics(model)["bytes"]
        assert gradients < before < gradients + 4096
        model.register_comm_hook(None, fp16_compress_hook)
        train(model, 1)
        assert mpiddp.metrics(model)["bytes"] == before / 2

    @pytest.mark.mpi(min_size=2)
    @pytest.mark.parametrize("late", [0, 1])
    def test_slowest_rank(self, model: DDP, late: int) -> None:
        train(model, COMPARED + 1, late)
        found = mpiddp.metrics(model)
        assert found["slowest_rank"] == late
        assert found["slowest_share"] > 0.7
        if late == RANK:
            assert found["waiting_ms"] < LATE * 1e3 / 2
        else:
            assert found["waiting_ms"] > LATE * 1e3 / 2

    @pytest.mark.mpi(min_size=2)
    def test_uneven_inputs(self, model: DDP) -> None:
        """Ranks without inputs take part in comparisons, as in reductions, and are never late."""
        with model.join():
            train(model, COMPARED + 5 if RANK == 0 else 3, late=0)
        found = mpiddp.metrics(model)
        assert found["step"] >= COMPARED
        with model.join():  # the parameters, and what was compared, are those of all ranks
            train(model, 1)
        dist.barrier()

    def test_several_forwards_of_a_step(self, model: DDP) -> None:
        mpiddp.metrics(model)
        with model.no_sync():
            train(model, 2, late=RANK)
        train(model, 1)
        found = mpiddp.metrics(model)
        assert found["steps"] == 1
        train(model, 1)
        with model.no_sync():
            train(model, 2, late=RANK)
        train(model, 1)
        assert mpiddp.metrics(model)["between_ms"] >= 2 * LATE * 1e3

    def test_compiled_model(self, model: DDP) -> None:
        compiled = torch.compile(model, backend="eager")
        train(model, 2)
        assert mpiddp.metrics(compiled)["step"] == 2

    @pytest.mark.mpi(min_size=2)
    def test_backward_that_fails_on_all_ranks(self, model: DDP) -> None:
        """What it has begun ends by itself; the module is wrapped again, as the errors say."""
        train(model, COMPARED)
        parameter = next(model.parameters())
        handle = parameter.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(model, 1)
        handle.remove()
        again = DDP(model.module)
        train(again, COMPARED + 1)
        assert again.reducer.comparison.last is not None

    def test_memory_of_old_buckets_is_not_kept(self, model: DDP) -> None:
        """The buckets of the first step make way for others, whoever has asked for their size."""
        model(torch.ones(2, 8)).sum().backward()
        mpiddp.metrics(model)
        old = [weakref.ref(bucket.buffer) for bucket in model.reducer.buckets]
        assert not model.reducer.has_rebuilt_buckets
        model.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        assert model.reducer.has_rebuilt_buckets
        assert [each() for each in old] == [None] * len(old)

    def test_what_is_not_wrapped_is_refused(self) -> None:
        with pytest.raises(TypeError, match="not Linear"):
            mpiddp.metrics(nn.Linear(1, 1))

    def test_it_is_cheap(self, model: DDP) -> None:
        train(model, 1)
        began = time.perf_counter()
        for _ in range(1000):
            mpiddp.metrics(model)
        assert (time.perf_counter() - began) / 1000 < 50e-6

    @pytest.mark.mpi(min_size=2)
    def test_other_device_by_default(self, model: DDP) -> None:
        """Comparing makes no tensors: the user may have said where new ones are."""
        train(model, 2)
        with torch.device("meta"):
            for _ in range(COMPARED):
                model(torch.ones(2, 8, device="cpu")).sum().backward()
        train(model, 1)
        assert model.reducer.comparison.last is not None

    @pytest.mark.mpi(min_size=2)
    def test_one_after_another(self, model: DDP) -> None:
        """A module that goes right after a comparison leaves nothing behind."""
        for _ in range(3):
            other = DDP(nn.Linear(4, 4))
            for _ in range(COMPARED + 1):
                other(torch.ones(2, 4)).sum().backward()
            assert other.reducer.comparison.last is not None
            del other


PROGRAM = """
import os, time, torch, mpiddp
mpiddp.init_process_group()
rank = mpiddp.get_topology().rank
model = mpiddp.DistributedDataParallel(torch.nn.Linear(8, 8))
for _ in range(8 * 25 + 1):
    loss = model(torch.ones(2, 8)).sum()
    if rank == 1:
        time.sleep(0.01)
    loss.backward()
if os.environ["LEAVES"] == "1":
    mpiddp.destroy_process_group()
"""


@pytest.mark.smoke
@pytest.mark.timeout(120)
@pytest.mark.parametrize("leaves", ["0", "1"])
def test_it_is_told_once(leaves: str) -> None:
    done = mpirun.run(3, ["-c", PROGRAM], timeout=60, env={"LEAVES": leaves})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "have waited for" in line]
    assert len(lines) == 1, done.stderr
    assert "have waited for rank 1 on " in lines[0]
    assert re.search(r"More than the others it spends .*\d ms in the backward\.", lines[0])


@pytest.mark.smoke
@pytest.mark.timeout(120)
def test_it_can_be_turned_off() -> None:
    env = {"LEAVES": "1", "MPIDDP_SLOW_RANKS": "0"}
    done = mpirun.run(2, ["-c", PROGRAM], timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    assert "have waited for" not in done.stderr
