"""The rank that fails first shows its traceback; those that fail after it say a line."""

import fcntl
import os
import re
import struct
import textwrap
from collections.abc import Callable
from pathlib import Path

import mpirun
import pytest

from mpiddp.mpi import first_words
from mpiddp.system import memory_files

_ANSWER, _NONE = struct.Struct("=i"), -9


class Ranks:
    """Processes that do one thing after the other when they are told, and answer."""

    def __init__(self, descriptor: int, count: int, apart: bool = False) -> None:
        self._pipes = []
        for rank in range(count):
            to_child, from_parent = os.pipe()
            to_parent, from_child = os.pipe()
            number = os.fork()
            if number == 0:
                os.close(from_parent)
                os.close(to_parent)
                try:  # what fails here is not to go on as a second pytest
                    first_words.begin(rank, os.getppid(), descriptor, apart)
                    while said := os.read(to_child, 1):
                        os.write(from_child, _ANSWER.pack(self._do(said)))
                finally:
                    os._exit(0)
            os.close(to_child)
            os.close(from_child)
            self._pipes.append((from_parent, to_parent, number))

    @staticmethod
    def _do(what: bytes) -> int:
        if what == b"c":
            first = first_words.claim()
            return _NONE if first is None else first
        if what == b"n":
            first_words.note(7)
        else:  # as in `claim`, between the lock and the number
            fcntl.lockf(first_words._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _NONE

    def tell(self, rank: int, what: bytes = b"c") -> None:
        os.write(self._pipes[rank][0], what)

    def answer(self, rank: int) -> "int | None":
        (answer,) = _ANSWER.unpack(os.read(self._pipes[rank][1], _ANSWER.size))
        return None if answer == _NONE else answer

    def end(self, rank: int) -> None:
        writing, reading, number = self._pipes[rank]
        os.close(writing)
        os.waitpid(number, 0)
        os.close(reading)


@pytest.fixture
def start() -> "Callable[[int], Ranks]":
    # Forked ones inherit the descriptors of those before: so they end in the reverse order.
    return lambda count: Ranks(memory_files.create("test-first-words"), count)


@pytest.mark.essential
def test_one_of_all_is_first(start: "Callable[[int], Ranks]") -> None:
    ranks = start(4)
    for rank in range(4):
        ranks.tell(rank)
    answers = [ranks.answer(rank) for rank in range(4)]
    (first,) = [rank for rank in range(4) if answers[rank] is None]
    assert [each for each in answers if each is not None] == [first] * 3
    for rank in reversed(range(4)):
        ranks.end(rank)


def test_it_stays_so_when_that_one_has_ended(start: "Callable[[int], Ranks]") -> None:
    ranks = start(2)
    ranks.tell(1)
    assert ranks.answer(1) is None
    ranks.end(1)
    ranks.tell(0)
    assert ranks.answer(0) == 1
    ranks.end(0)


def test_one_that_has_the_lock_is_first(start: "Callable[[int], Ranks]") -> None:
    """Also before its number is there, which the others do not wait long for."""
    ranks = start(3)
    ranks.tell(2, b"l")
    assert ranks.answer(2) is None
    for rank in range(2):
        ranks.tell(rank)
        assert ranks.answer(rank) == first_words.UNKNOWN
    ranks.end(2)  # and so it says nothing
    ranks.tell(1)
    assert ranks.answer(1) is None
    ranks.tell(0)
    assert ranks.answer(0) == 1
    for rank in reversed(range(2)):
        ranks.end(rank)


def test_word_of_another_node(start: "Callable[[int], Ranks]") -> None:
    ranks = start(2)
    ranks.tell(0, b"n")
    assert ranks.answer(0) is None
    for rank in range(2):
        ranks.tell(rank)
        assert ranks.answer(rank) == 7
    for rank in reversed(range(2)):
        ranks.end(rank)


def test_without_a_file_everybody_speaks() -> None:
    first_words.begin(0, os.getpid(), -1, False)
    assert first_words.claim() is None
    assert first_words.known() == first_words.UNKNOWN


SCRIPT = """
    import sys, time
    import torch.distributed as dist
    import mpiddp

    HOOK
    mpiddp.init_process_group()
    dist.barrier()

    def fail():
        raise ValueError("on all ranks\\nat once")

    fail()
"""
MINE = "sys.excepthook = lambda kind, error, trace: print('mine:', kind.__name__, file=sys.stderr)"
SHORT = re.compile(
    r"^\[rank(\d)\]: rank (\d) has failed before, see there\. Here, at \S+script\.py:\d+ in fail: "
    r"ValueError: on all ranks at once$",
    re.MULTILINE,
)


@pytest.mark.parametrize("runner", [False, True], ids=["script", "runner"])
def test_ranks_that_all_raise(tmp_path: Path, runner: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.replace("HOOK", "")))
    done = mpirun.run(3, [*(["-m", "mpiddp"] * runner), script], timeout=80)
    print(done.stdout, done.stderr)
    assert done.returncode != 0
    said = done.stderr + done.stdout
    (first,) = re.findall(r"^\[rank(\d)\]: Traceback", said, re.MULTILINE)
    short = SHORT.findall(said)
    # Those that the launcher was quicker with have said nothing.
    assert len({rank for rank, _ in short}) == len(short) <= 2
    assert all(other == first != rank for rank, other in short)
    assert said.count("ValueError: on all ranks") == 1 + len(short)


def test_a_hook_of_the_user_gets_all(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.replace("HOOK", MINE)))
    done = mpirun.run(2, [script], timeout=80)
    print(done.stdout, done.stderr)
    said = done.stderr + done.stdout
    assert done.returncode != 0
    assert "mine: ValueError" in said
    assert "has failed before" not in said
