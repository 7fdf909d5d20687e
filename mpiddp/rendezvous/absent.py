"""Say which ranks have not come to init_process_group, where they are, and what they do there.

Note [Who is absent at the start]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Before a world begins there is no roll call, and no message may be sent in the user's communicators.
Two sources know something all the same:

- Under `python -m mpiddp` all ranks have met once: `begin` gives them a communicator for questions.
  A rank that has waited for long asks. One that waits as well answers between two looks. For one
  whose program is elsewhere a thread answers, with the line that the program is at. It sleeps for
  two seconds at first, and ends when its rank comes: a quick start makes no more calls.
- Otherwise, and for ranks that do not answer, Linux tells of the processes of this node, see
  launched_here.py. So there it is two ranks of each node that look, and speak if ranks of their own
  node are absent.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mpiddp import settings
from mpiddp.flight_recorder.call_text import place, ranks_in_words
from mpiddp.mpi import communicators, losses
from mpiddp.rendezvous import launched_here

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["begin", "duplicate", "end"]

# Seconds between two looks for a question; that all answers may take; between two looks for one.
_PERIOD = 0.5
_PATIENCE = 2.5
_NAP = 0.005
_QUESTION, _ANSWER = 1, 2
# After how many seconds a thread answers for a program at the latest: a wait's limit may be short.
_PATIENT = 2.0
# After how many seconds of waiting others can see it.
_SOON = 0.1
# How many ranks speak, of the job or of a node: one of them may be the one that has not come.
_SPEAKERS = 2
# In so small a job every rank may ask all others before it raises.
_FEW = 64
# How many absent ranks are told of one by one.
_SHOWN = 4


class _Questions:
    """Asks the other ranks, and answers them.

    Collective over `communicator`, which is duplicated.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicators.note(communicator.Dup())
        self._communicator.Set_name("mpiddp start")
        # The host and the process of each rank.
        own = (socket.gethostname(), os.getpid())
        self.processes: list[tuple[str, int]] = communicator.allgather(own)
        self._number = 0
        self._waits = False
        self.is_over = False
        self._looked = 0.0
        self._leaving: list[tuple[MPI.Request, bytes]] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._answer_for, name="mpiddp start", daemon=True)
        self._thread.start()

    def numbers_in(self, communicator: MPI.Intracomm) -> list[int] | None:
        """Return the numbers here of a communicator's ranks, None if one is not of this job."""
        from mpi4py import MPI

        theirs, here = communicator.Get_group(), self._communicator.Get_group()
        numbers: list[int] = theirs.Translate_ranks(list(range(theirs.Get_size())), here)
        theirs.Free()
        here.Free()
        return None if MPI.UNDEFINED in numbers else numbers

    def arrive(self) -> None:
        """Answer between two looks of this rank from now on, not in the thread. Not collective."""
        self.stop()
        self._waits = True

    def stop(self) -> None:
        """End the thread: nothing calls MPI any more. Not collective."""
        self._ending.set()
        self._thread.join()

    def _answer_for(self) -> None:
        """Answer for a program that is elsewhere, from when a wait may have ended."""
        if self._ending.wait(min(settings.STALL_SECONDS.read_before_init() / 2, _PATIENT)):
            return
        while not self._ending.wait(_PERIOD):
            self._answer()

    def look(self) -> None:
        """Answer, if the last time is a while ago. Not collective."""
        now = time.monotonic()
        if now - self._looked > _PERIOD / 2:
            self._looked = now
            self._answer()

    def _answer(self) -> None:
        from mpi4py import MPI

        with contextlib.suppress(MPI.Exception):
            while (question := self._receive(_QUESTION)) is not None:
                rank, said = question
                answer = {"number": said, "waits": self._waits, "place": place()}
                self._send(answer, rank, _ANSWER)
            self._leaving = [each for each in self._leaving if not each[0].Test()]

    def ask(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return what those of the ranks say that answer within some seconds. Not collective."""
        self._number += 1
        missing = set(ranks)
        answers: dict[int, dict[str, Any]] = {}
        for rank in missing:
            self._send(self._number, rank, _QUESTION)
        deadline = time.monotonic() + _PATIENCE
        while missing and time.monotonic() < deadline:
            self._answer()
            received = self._receive(_ANSWER)
            if received is None:
                time.sleep(_NAP)
            elif received[1]["number"] == self._number:
                rank, said = received
                missing.discard(rank)
                answers[rank] = said
        return answers

    # Messages, small enough for MPI to send them before the receiver looks.

    def _send(self, what: object, rank: int, tag: int) -> None:
        from mpi4py import MPI

        data = json.dumps(what).encode()
        request = self._communicator.Isend([data, MPI.BYTE], dest=rank, tag=tag)
        self._leaving.append((request, data))

    def _receive(self, tag: int) -> tuple[int, Any] | None:
        from mpi4py import MPI

        status = MPI.Status()
        if not self._communicator.Iprobe(source=MPI.ANY_SOURCE, tag=tag, status=status):
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        rank = status.Get_source()
        self._communicator.Recv([data, MPI.BYTE], source=rank, tag=tag)
        return rank, json.loads(data)


_questions: _Questions | None = None


def begin(communicator: MPI.Intracomm) -> None:
    """Let this process answer for its program until it comes to a world.

    Collective over `communicator`, in which nothing else is under way: all ranks of the job.
    """
    global _questions
    from mpi4py import MPI

    enough = communicator.Get_size() > 1 and not losses.can_go_on()
    if enough and all(communicator.allgather(MPI.Query_thread() == MPI.THREAD_MULTIPLE)):
        _questions = _Questions(communicator)


def end() -> None:
    """Answer no more: MPI is about to end. Not collective."""
    if _questions is not None:
        _questions.stop()


def duplicate(communicator: MPI.Intracomm, timeout: timedelta) -> MPI.Intracomm:
    """Return a duplicate for a new world, or raise if not all ranks want one in time.

    Collective. As `communicators.duplicate`, which also says who is absent, and at what line.
    """
    waiting = _Waiting(communicator)
    try:
        made = communicators.duplicate(
            communicator, timeout.total_seconds(), "init_process_group", waiting
        )
    finally:
        waiting.end()
    if _questions is not None:
        _questions.is_over = True  # from here on roll call answers
    return made


class _Waiting:
    """What `communicators.duplicate` asks while it waits."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._rank, self._size = communicator.Get_rank(), communicator.Get_size()
        self._communicator = communicator
        self._sign = -1
        if _questions is not None:
            _questions.arrive()

    def end(self) -> None:
        if self._sign >= 0:
            os.close(self._sign)
            self._sign = -1

    def look(self, waited: float) -> None:
        """Let others see that this rank waits. Not collective."""
        if _questions is not None:
            _questions.look()
        if self._sign < 0 and waited > _SOON:
            self._sign = launched_here.put_up_sign()

    def absent(self, at_last: bool) -> str | None:
        """Return who is absent, "" if it is unknown, None if another rank says it.

        Not collective.

        Args:
            at_last: whether this rank is about to raise.
        """
        for_itself = at_last and self._size <= _FEW
        if _questions is None or _questions.is_over:
            return self._absent_here(for_itself)
        numbers = _questions.numbers_in(self._communicator)
        if numbers is None:
            return self._absent_here(for_itself)
        hosts = [_questions.processes[number][0] for number in numbers]
        answers: dict[int, dict[str, Any]] = {}
        asked = {self._rank}
        others = range(self._size)
        for ranks in (*_before(self._rank, hosts), others):
            new = set(ranks) - asked
            asked |= new
            told = _questions.ask([numbers[rank] for rank in new])
            answers |= {rank: told[numbers[rank]] for rank in new if numbers[rank] in told}
            if for_itself or ranks is others:
                continue
            if any(answer["waits"] for answer in answers.values()):
                return None
        return self._in_words(numbers, hosts, answers)

    def _in_words(
        self, numbers: list[int], hosts: list[str], answers: dict[int, dict[str, Any]]
    ) -> str:
        """Return who is absent, by what the ranks have answered."""
        assert _questions is not None
        here = launched_here.find()
        told = []
        for rank, number in enumerate(numbers):
            answer = answers.get(rank)
            if rank == self._rank or (answer is not None and answer["waits"]):
                continue
            host, process = _questions.processes[number]
            words = f"process {process} on {host}"
            if answer is not None:
                words += f", {answer['place'] or 'in no code of the program'}"
            elif host == hosts[self._rank] and number in here:
                words = f"{here[number]}; it does not answer"
            else:
                words += ", which does not answer"
            told.append((rank, words))
        return _in_words(told)

    def _absent_here(self, for_itself: bool) -> str | None:
        """Return who is absent of this node, None if it is for others to speak."""
        from mpi4py import MPI

        found = launched_here.find()
        world, ours = MPI.COMM_WORLD.Get_group(), self._communicator.Get_group()
        numbers = world.Translate_ranks([rank for rank in found if rank < world.Get_size()], ours)
        world.Free()
        ours.Free()
        here = {
            number: process
            for number, process in zip(numbers, found.values(), strict=False)
            if number not in (MPI.UNDEFINED, self._rank)
        }
        absent = [(rank, str(one)) for rank, one in sorted(here.items()) if not one.waits]
        before = [rank for rank, one in here.items() if one.waits and rank < self._rank]
        speaks = self._rank < _SPEAKERS or (absent and len(before) < _SPEAKERS)
        if not (speaks or for_itself):
            return None
        if not absent and len(here) + 1 < self._size:
            return f"All that Linux shows of the job on {socket.gethostname()} wait as well"
        return _in_words(absent)


def _before(rank: int, hosts: Sequence[str]) -> Iterator[list[int]]:
    """Yield the ranks that speak instead of this one if they wait: some, and then more.

    With thousands of ranks not all of them can ask all others.
    """
    lower = range(rank)
    yield [other for other in lower if other < _SPEAKERS]
    first: dict[str, list[int]] = {}
    for other in lower:
        first.setdefault(hosts[other], []).append(other)
    yield [other for each in first.values() for other in each[:_SPEAKERS]]
    yield first.get(hosts[rank], [])


def _in_words(absent: Sequence[tuple[int, str]]) -> str:
    """Return a sentence about ranks, "" without any."""
    told = [f"rank {rank} ({words})" for rank, words in absent[:_SHOWN]]
    more = [rank for rank, _ in absent[_SHOWN:]]
    if more:
        told.append(ranks_in_words(range(max(more) + 1), more))
    return f"Absent: {', '.join(told)}" if told else ""
