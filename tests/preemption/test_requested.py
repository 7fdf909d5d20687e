"""preemption.requested: a signal on any rank, and all ranks stop at the same step."""

import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from replicas import RANK, SIZE, gather, together

from mpiddp import preemption

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def uninstalled():
    """Each test leaves the handlers as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    preemption.uninstall()
    with together():
        for number, handler in before.items():
            assert signal.getsignal(number) == handler


def steps_until_requested(step, most=5000):
    for number in range(most):
        step(number)
        if preemption.requested():
            return number
    return None


@pytest.mark.thorough(keep=3)
@pytest.mark.essential(keep=3)
@pytest.mark.smoke(keep=1)
@pytest.mark.parametrize("who", ["first", "last", "all"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_all_stop_at_one_step(who, number):
    preemption.install()
    told = {"first": [0], "last": [SIZE - 1], "all": range(SIZE)}[who]

    def step(count):
        if count == 20 and RANK in told:
            os.kill(os.getpid(), number)
        ones = torch.ones(10)
        dist.all_reduce(ones)
        time.sleep(0.001)

    stopped = gather(steps_until_requested(step))
    with together():
        assert stopped[0] is not None
        assert stopped[0] >= 20
        assert stopped == [stopped[0]] * SIZE
        assert preemption.requested()


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_do_not_wait_for_each_other(seed):
    """They are in steps far from each other when the signal comes."""
    preemption.install()
    draw = random.Random(10 * seed + RANK)
    kill_at = random.Random(seed).randrange(30)

    def step(count):
        if count == kill_at and seed % SIZE == RANK:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(draw.uniform(0, 0.03))

    stopped = gather(steps_until_requested(step))
    with together():
        assert stopped[0] is not None
        assert stopped == [stopped[0]] * SIZE


@pytest.mark.essential
def test_nothing_happens():
    preemption.install()
    assert steps_until_requested(lambda count: None, 10_000) is None


def test_costs():
    """Without a signal a check sends nothing and takes about a microsecond."""
    preemption.install()
    times = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(1000):
            preemption.requested()
        times.append((time.perf_counter() - began) / 1000)
    with together():
        assert min(times) < 5e-6


def test_the_others_have_ended():
    """A signal after the last step of another rank keeps nobody waiting."""
    preemption.install()
    for _ in range(3):
        assert not preemption.requested()
    if RANK == 0:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGUSR1)
        # The other ranks are in uninstall already.
        for _ in range(100):
            preemption.requested()
            time.sleep(0.005)


def test_the_handler_that_was_there():
    called = []
    signal.signal(signal.SIGUSR2, lambda number, frame: called.append(number))
    try:
        preemption.install([signal.SIGUSR2])
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.01)
        with together():
            assert called == [signal.SIGUSR2]
        preemption.uninstall()
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.01)
        with together():
            assert called == [signal.SIGUSR2] * 2
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_without_threads(monkeypatch):
    monkeypatch.setenv("MPIDDP_PROGRESS_THREAD", "0")
    preemption.install()

    def step(count):
        if count == 5 and RANK == SIZE - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    stopped = gather(steps_until_requested(step))
    with together():
        assert stopped == [5] * SIZE


@pytest.mark.essential
def test_wrong_use():
    with pytest.raises(RuntimeError, match=r"call mpiddp.preemption.install\(\) after init"):
        preemption.requested()
    problems = []

    def in_a_thread():
        try:
            preemption.install()
        except RuntimeError as error:
            problems.append(str(error))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    with together():
        assert problems == ["call mpiddp.preemption.install() in the main thread"]
    preemption.install()
    with pytest.raises(RuntimeError, match="has been called before"):
        preemption.install()
