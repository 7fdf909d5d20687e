"""The program's own MPI calls go on around, and during, steps that average gradients."""

import threading

import numpy
import pytest
import torch
from mpi4py import MPI
from replicas import RANK, SIZE
from torch import nn

from mpiddp import DistributedDataParallel as DDP

pytestmark = [pytest.mark.mpi(min_size=2)]

WORLD = MPI.COMM_WORLD
# As many as go in several messages of most MPIs.
MANY = 300_000
NEXT, BEFORE = (RANK + 1) % SIZE, (RANK - 1) % SIZE


@pytest.fixture
def model(world: None) -> DDP:
    return DDP(nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)]))


def step(model: DDP) -> None:
    """Train one step, of which the mean is known: each rank's gradient is its number and 1."""
    model.zero_grad()
    for parameter in model.parameters():
        parameter.data.fill_(1 / 64)
    model(torch.full((1, 64), 1.0 + RANK)).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, torch.full_like(parameter, (SIZE + 1) / 2))


def test_requests_that_steps_come_between(model: DDP) -> None:
    sent, got = numpy.full(MANY, float(RANK)), numpy.empty(MANY)
    total = numpy.empty(MANY)
    requests = [
        WORLD.Iallreduce(sent, total),
        WORLD.Irecv(got, BEFORE, tag=3),
        WORLD.Isend(sent, NEXT, tag=3),
    ]
    for _ in range(3):
        step(model)
    MPI.Request.Waitall(requests)
    assert (got == BEFORE).all()
    assert (total == SIZE * (SIZE - 1) / 2).all()


def test_persistent_requests(model: DDP) -> None:
    sent, got = numpy.empty(1000), numpy.empty(1000)
    requests = [WORLD.Recv_init(got, BEFORE, tag=4), WORLD.Send_init(sent, NEXT, tag=4)]
    for number in range(4):
        sent[:] = 10 * RANK + number
        MPI.Prequest.Startall(requests)
        step(model)
        MPI.Request.Waitall(requests)
        assert (got == 10 * BEFORE + number).all()
    for request in requests:
        request.Free()


def test_any_message_is_the_programs_own(model: DDP) -> None:
    """A receive from anybody, with any tag, on the world takes none of mpiddp's messages."""
    got = numpy.empty(1)
    request = WORLD.Irecv(got, MPI.ANY_SOURCE, MPI.ANY_TAG)
    for _ in range(3):
        step(model)
        assert not WORLD.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
    WORLD.Barrier()
    WORLD.Send(numpy.array([7.0 + RANK]), NEXT, tag=9)
    status = MPI.Status()
    request.Wait(status)
    assert (got[0], status.source, status.tag) == (7.0 + BEFORE, BEFORE, 9)


def test_window_of_memory(model: DDP) -> None:
    memory = numpy.zeros(1000)
    window = MPI.Win.Create(memory, comm=WORLD)
    window.Fence()
    put = numpy.full(1000, 1.0 + RANK)  # MPI reads it until the fence
    window.Put(put, NEXT)
    step(model)
    window.Fence()
    assert (memory == 1.0 + BEFORE).all()
    window.Lock(NEXT)
    step(model)
    read = numpy.empty(1000)
    window.Get(read, NEXT)
    window.Unlock(NEXT)
    assert (read == 1.0 + RANK).all()
    WORLD.Barrier()
    window.Free()


def test_thread_that_calls_mpi_meanwhile(model: DDP) -> None:
    own = WORLD.Dup()
    rounds = [0]
    wrong: list[int] = []
    over = threading.Event()

    def talk() -> None:
        got = numpy.empty(100)
        while True:
            # All threads end after the same round.
            wants = numpy.array([1.0 if over.is_set() else 0.0])
            own.Allreduce(MPI.IN_PLACE, wants, MPI.MIN)
            if wants[0]:
                return
            sent = numpy.full(100, float(RANK + rounds[0]))
            own.Sendrecv(sent, NEXT, recvbuf=got, source=BEFORE)
            if not (got == BEFORE + rounds[0]).all():
                wrong.append(rounds[0])
            rounds[0] += 1

    thread = threading.Thread(target=talk)
    thread.start()
    for _ in range(20):
        step(model)
    over.set()
    thread.join(60)
    assert not thread.is_alive()
    assert rounds[0] > 0
    assert not wrong
    own.Free()


def test_communicators_come_and_go(model: DDP) -> None:
    for number in range(30):
        part = WORLD.Split(RANK % 2, RANK)
        assert part.allreduce(1) == len(range(RANK % 2, SIZE, 2))
        if number % 10 == 0:
            step(model)
        part.Free()
    step(model)


@pytest.mark.parametrize("handler", [MPI.ERRORS_RETURN, MPI.ERRORS_ARE_FATAL])
def test_error_handlers_of_the_program(model: DDP, handler: MPI.Errhandler) -> None:
    before = WORLD.Get_errhandler()
    WORLD.Set_errhandler(handler)
    try:
        step(model)
        if handler == MPI.ERRORS_RETURN:
            with pytest.raises(MPI.Exception):
                WORLD.Send(numpy.empty(1), SIZE + 5)
        step(model)
        assert WORLD.Get_errhandler() == handler
    finally:
        WORLD.Set_errhandler(before)
