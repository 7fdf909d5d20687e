"""Find out, when a collective has waited in vain, which ranks never called it.

Note [Roll call]
~~~~~~~~~~~~~~~~
Every process group counts the collectives that this process has entered and remembers the last.
Nothing is sent until a rank's wait has passed the time limit. Then it asks the others of the group,
on a communicator of the world that is used for nothing else. A thread in each process looks for
questions twice a second and answers them, wherever the program itself is at that moment: in a data
loader, in another collective, or waiting in vain and asking as well. The asking rank waits a few
seconds at most for answers. So ranks that have ended, hang without releasing the GIL or are cut off
cost no more than that, and are named as silent; for those of its node it looks itself, see
node_states.py. Where there is no such thread, those that wait look and answer while they wait, but
not while they are inside of a call of MPI that blocks.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import itertools
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from mpi4py import MPI

from mpiddp.engine.engine import look_while_waiting
from mpiddp.flight_recorder import files, ring
from mpiddp.flight_recorder.call_text import describe, place
from mpiddp.mpi import communicators
from mpiddp.system import running_time
from mpiddp.watch.roll_call_words import (
    ELSEWHERE,
    UNKNOWN_GROUP,
    Answer,
    differences,
    doing,
    in_words,
    listed,
    sentence,
    silent,
    steps_made,
    where_it_is,
    who,
)

if TYPE_CHECKING:
    from mpiddp.watch.interface import CountedGroup

__all__ = ["RollCall"]

# Seconds between two looks for a question. A look takes some microseconds.
_PERIOD = 0.5
# Seconds that all answers to one question may take together.
_PATIENCE = 2.5
# Seconds between two looks for an answer.
_NAP = 0.005

_QUESTION_TAG, _ANSWER_TAG = 1, 2
# The number of the question, the digest of a group's name and ranks, the number of a module that is
# asked about, or 0 for the group's collectives, and which of these, or -1.
_QUESTION = struct.Struct("<q16sqq")
# The number of the question, how many collectives were entered, and whether the one that was asked
# about is under way. In words, in lines, what `Answer` has follows.
_ANSWER = struct.Struct("<qqq")
_MOST_BYTES = 1024

# The number of a question that wants no answer: write what you did last.
_WRITE = 0
# The same of a message that says that a group is broken; why, in words, follows.
_BROKEN = -1

# How many ranks, the first of a group, speak for all that wait if they wait as well.
_SPEAKERS = 3


class RollCall:
    """Asks and answers for one process.

    Collective over `communicator`.

    Args:
        communicator: of all ranks; it is duplicated.
        threaded: whether a thread may answer, which needs MPI_THREAD_MULTIPLE; the same on all
            ranks.
    """

    def __init__(self, communicator: MPI.Intracomm, threaded: bool) -> None:
        self._groups: list[weakref.ref[CountedGroup]] = []
        self._asking = threading.Lock()
        self._numbers = itertools.count(1)
        self._ending = threading.Event()
        self._asked = False
        # Called twice a second by the thread that answers, or by one that waits.
        self.watches: list[Callable[[], None]] = []
        # World ranks that have ended: nothing is sent to them, see Note [MPI that does not return].
        self.lost: set[int] = set()
        # When this last came back from MPI, in running time.
        self.looked = running_time.now()
        # Messages that may not have left yet, with their memory.
        self._leaving: list[tuple[MPI.Request, bytes | bytearray]] = []
        self._leaving_lock = threading.Lock()
        # How many messages went to each rank, and how many came from it.
        self._sent = [0] * communicator.Get_size()
        self._received = [0] * communicator.Get_size()
        self._unfinished: object = None
        self._communicator: MPI.Intracomm | None = None
        self._thread: threading.Thread | None = None
        if communicator.Get_size() == 1:
            return
        self._communicator = communicators.note(communicator.Dup())
        self._communicator.Set_name("mpiddp roll call")
        self._communicator.Set_errhandler(MPI.ERRORS_RETURN)
        if threaded:
            self.start()
        else:
            look_while_waiting(self._look)

    @property
    def threaded(self) -> bool:
        """Whether a thread answers. Not collective."""
        return self._thread is not None

    def start(self) -> None:
        """Answer from now on. Not collective."""
        self._ending.clear()
        self._thread = threading.Thread(
            target=self._answer_questions, name="mpiddp roll call", daemon=True
        )
        self._thread.start()

    def groups(self) -> list[CountedGroup]:
        """Return the groups that it answers for. Not collective."""
        return [group for known in self._groups if (group := known()) is not None]

    def add(self, group: CountedGroup) -> None:
        """Answer for `group` from now on, as long as it lives. Not collective.

        It counts the collectives it enters in ``entered`` and keeps the last in ``last``.
        """
        self._groups = [*(known for known in self._groups if known() is not None)]
        self._groups.append(weakref.ref(group))

    def stop(self) -> None:
        """End the thread: from now on this process does not answer. Not collective."""
        self._ending.set()
        look_while_waiting(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def free(self) -> None:
        """End the thread and free the communicator. Collective."""
        self.stop()
        if self._communicator is not None:
            # A message that nobody takes would reach the next communicator that gets this one's
            # number, as MPICH gives them. If a rank does not come, this one keeps its number.
            if self._took_all_messages():
                communicators.free(self._communicator)
            self._communicator = None

    def explain(self, group: CountedGroup, number: int | None = None) -> str:
        """Return which ranks keep a collective of `group` waiting. Not collective.

        Takes up to some seconds. A sentence such as "rank 2 has not called it (last called:
        #16 broadcast(root 0) of float32 (10,)); rank 7 does not answer ...".

        Args:
            group: given to `add` before.
            number: which of its collectives, counted from 1; None is the last one entered.
        """
        wanted = group.entered if number is None else number
        own = Answer(group.entered, _last_of(group), call=_call_in_words(group, wanted)[0])
        self._let_the_others_write(group)
        answers = self._ask(group, number=wanted) or {}
        answers[group.rank()] = own
        return in_words(group.world_ranks, answers, wanted, group.rank())

    def explain_misfit(self, group: CountedGroup, number: int) -> tuple[str, bool]:
        """Return what the ranks have called as a collective whose messages do not fit together.

        Not collective. Takes up to some seconds. "" if they have called the same, as far as is
        known. And whether that may be right: sizes differ, where they may.

        Args:
            group: given to `add` before.
            number: which of its collectives, counted from 1.
        """
        self._let_the_others_write(group)
        answers = self._ask(group, number=number) or {}
        answers[group.rank()] = Answer(number, "", call=_call_in_words(group, number)[0])
        which = (group.world_ranks, answers, number, group.rank())
        told = sentence(differences(*which, sizes=True))
        return told, bool(told) and not differences(*which)

    def explain_bucket(self, group: CountedGroup, module: int, number: int) -> str:
        """Return which ranks keep a bucket of gradients waiting. Not collective.

        Takes up to some seconds.

        Args:
            group: the wrapped module's.
            module: its number in the group.
            number: the bucket's, as bucket_progress.py counts them.
        """
        self._let_the_others_write(group)
        answers = self._ask(group, module) or {}
        answers[group.rank()] = Answer(number, "")
        missing: dict[str, list[int]] = {}
        for rank, answer in answers.items():
            if answer.entered < number:
                where = answer.last
                if answer.entered == UNKNOWN_GROUP:
                    where = "it has no such module"
                missing.setdefault(where, []).append(rank)
        told = [
            f"{who(group.world_ranks, ranks, 'has', 'have')} not filled it ({where})"
            for where, ranks in missing.items()
        ]
        told = [listed(told)] if told else []
        told += silent(group.world_ranks, answers)
        if any(ELSEWHERE in where for where in missing):
            told[-1] += (
                ". Where several wrapped modules are trained, all ranks run their backward passes "
                "in the same order"
            )
        return sentence(told) or "All ranks have filled it: the connection is slow or has failed"

    def alert(self, group: CountedGroup) -> None:
        """Let the other ranks of the world write what they did last. Not collective.

        Takes up to some seconds.
        """
        self._let_the_others_write(group)
        self._ask(group)

    def explain_stall(self, group: CountedGroup, module: int, number: int) -> str | None:
        """Return which ranks keep an operation or a bucket waiting, and what they do instead.

        Not collective. For the thread that answers: it goes on answering. None if this rank need
        not say it: one of the first ranks waits as well and will, or this rank asks already.

        Args:
            group: given to `add` before.
            module: the number of the bucket's module in the group; 0: an operation.
            number: of the operation, or of the bucket as bucket_progress.py counts them.
        """
        first = range(min(group.rank(), _SPEAKERS))
        ahead = self._ask(group, module, first, answering=True, number=number) if first else {}
        if ahead is None:
            return None
        # One that has called something else may be through with it.
        if any(each.entered >= number and (module or each.waits) for each in ahead.values()):
            return None
        answers = self._ask(group, module, answering=True, number=number)
        if answers is None:
            return None
        own = "" if module else _call_in_words(group, number)[0]
        answers[group.rank()] = Answer(number, "", call=own)
        told: dict[str, list[int]] = {}
        for rank, answer in sorted(answers.items()):
            if answer.entered < number:
                what = answer.last if module else where_it_is(answer)
                where = answer.where or "no Python of the script runs there"
                told.setdefault("; ".join(filter(None, (what, answer.step, where))), []).append(
                    rank
                )
        lines = [
            f"{who(group.world_ranks, ranks, 'has', 'have')} not come ({what})"
            for what, ranks in told.items()
        ]
        lines = [listed(lines)] if lines else []
        lines += silent(group.world_ranks, answers)
        if not module:
            lines += differences(group.world_ranks, answers, number, group.rank(), places=True)
        text = sentence(lines)
        return text or "All ranks have come: the connection or a rank is slow, or one has failed"

    def tell_broken(self, group: CountedGroup, reason: str) -> None:
        """Tell the other ranks of `group` that it is broken, and why. Not collective."""
        if self._communicator is None:
            return
        told = _QUESTION.pack(_BROKEN, _digest(group), 0, -1)
        told += reason.encode()[: _MOST_BYTES - len(told)]
        for rank in set(group.world_ranks) - {self._communicator.Get_rank()}:
            with contextlib.suppress(MPI.Exception):  # it has ended
                self._send(told, rank, _QUESTION_TAG)

    def answers(self, rank: int) -> bool:
        """Return whether a rank of the world answers. Not collective; for the thread here."""
        for group in self.groups():
            if rank in group.world_ranks:
                place = group.world_ranks.index(rank)
                answers = self._ask(group, ranks=[place], answering=True)
                return answers is None or bool(answers)  # None: another thread asks
        return False

    # Asking.

    def _let_the_others_write(self, group: CountedGroup) -> None:
        """Let the ranks that are not in `group` write what they did last, and wait for nothing."""
        if self._communicator is None:
            return
        question = _QUESTION.pack(_WRITE, b"", 0, -1)
        for rank in set(range(self._communicator.Get_size())).difference(group.world_ranks):
            with contextlib.suppress(MPI.Exception):  # it has ended
                self._send(question, rank, _QUESTION_TAG)

    def _ask(
        self,
        group: CountedGroup,
        module: int = 0,
        ranks: Iterable[int] | None = None,
        answering: bool = False,
        number: int = -1,
    ) -> dict[int, Answer] | None:
        """Return the answers of the group's other ranks that came in time, by rank in the group.

        Args:
            group: whose ranks are asked.
            module: about which of its modules, 0: about its collectives.
            ranks: the ranks in the group to ask; None: all.
            answering: whether this thread answers, so it must go on with that, and must not wait
                for another one that asks: then the result is None.
            number: about which of its collectives; -1: about none.
        """
        answers: dict[int, Answer] = {}
        communicator = self._communicator
        deadline = time.monotonic() + _PATIENCE
        if communicator is None:
            return answers
        if not self._asking.acquire(timeout=0 if answering else _PATIENCE):
            return None if answering else answers
        try:
            own = next(self._numbers)
            question = _QUESTION.pack(own, _digest(group), module, number)
            asked = {world: rank for rank, world in enumerate(group.world_ranks)}
            for rank in (communicator.Get_rank(), *self.lost):
                asked.pop(rank, None)
            if ranks is not None:
                wanted = {group.world_ranks[rank] for rank in ranks}
                asked = {world: rank for world, rank in asked.items() if world in wanted}
            for world_rank in asked:
                self._send(question, world_rank, _QUESTION_TAG)
            while len(answers) < len(asked) and time.monotonic() < deadline:
                received = self._receive(_ANSWER_TAG, deadline)
                if received is None:
                    if not ((answering or self._thread is None) and self._answer_one()):
                        time.sleep(_NAP)
                    continue
                world_rank, data = received
                answered, entered, waits = _ANSWER.unpack_from(data)
                if answered == own:
                    text = data[_ANSWER.size :].decode(errors="replace")
                    last, where, call, step = text.split("\n", 3)
                    answers[asked[world_rank]] = Answer(
                        entered, last, where, call, step, bool(waits)
                    )
        except MPI.Exception:
            pass  # of a connection to a rank that has ended: it will be named as silent
        finally:
            self._asking.release()
        return answers

    # Answering.

    def _answer_questions(self) -> None:
        while not self._rest() and not MPI.Is_finalized():
            self._look()

    def _rest(self) -> bool:
        """Return whether to end, after a while; see Note [Running time].

        A stop is noticed here even if nobody waits. What a look takes is none: it may ask others.
        """
        clock = running_time.Clock()
        ending = self._ending.wait(_PERIOD)
        clock.now()
        return ending

    def _look(self) -> None:
        """Answer and watch: twice a second, in the thread here or in one that waits."""
        self.looked = running_time.now()
        # As in _ask: after one rank has ended, the others may still ask, and are watched.
        with contextlib.suppress(MPI.Exception):
            while self._answer_one():
                pass
        # Whoever asks has waited in vain: what this rank does now may tell why.
        if self._asked and files.dump_soon("another rank has waited in vain"):
            self._asked = False
        for watch in self.watches:
            with contextlib.suppress(MPI.Exception):
                watch()
        with self._leaving_lock, contextlib.suppress(MPI.Exception):
            self._leaving = [sent for sent in self._leaving if not sent[0].Test()]

    def _answer_one(self) -> bool:
        """Answer a question if there is one, and return whether there was."""
        received = self._receive(_QUESTION_TAG, time.monotonic() + _PATIENCE)
        if received is None:
            return False
        rank, data = received
        question, digest, module, number = _QUESTION.unpack_from(data)
        groups = self.groups()
        if question == _BROKEN:
            for group in groups:
                if _digest(group) == digest:
                    group.hear(data[_QUESTION.size :].decode(errors="replace"))
            return True
        self._asked = True
        if question == _WRITE:
            return True
        entered, last, call, waits = UNKNOWN_GROUP, "", "", False
        for group in groups:
            if _digest(group) == digest and not module:
                entered, last = group.entered, _last_of(group)
                call, waits = _call_in_words(group, number)
            elif _digest(group) == digest:
                wrapped = group.modules.get(module)
                if wrapped is not None:
                    entered, last = wrapped.buckets_filled(), doing(wrapped, group, groups)
        step = "" if module else steps_made(groups)
        rest = f"\n{place()}\n{call}\n{step}".encode()
        text = last.encode()[: max(_MOST_BYTES - _ANSWER.size - len(rest), 0)] + rest
        self._send(_ANSWER.pack(question, entered, waits) + text, rank, _ANSWER_TAG)
        return True

    # Messages, small enough for MPI to send them before the receiver looks.

    def _send(self, data: bytes, rank: int, tag: int) -> None:
        assert self._communicator is not None
        if rank in self.lost:
            return
        request = self._communicator.Isend([data, MPI.BYTE], dest=rank, tag=tag)
        with self._leaving_lock:
            self._leaving.append((request, data))
            self._sent[rank] += 1

    def _receive(self, tag: int, deadline: float) -> tuple[int, bytes] | None:
        """Return the sender and the content of a message that has come, or None."""
        assert self._communicator is not None
        status = MPI.Status()
        if not self._communicator.Iprobe(source=MPI.ANY_SOURCE, tag=tag, status=status):
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        rank = status.Get_source()
        self._received[rank] += 1
        request = self._communicator.Irecv([data, MPI.BYTE], source=rank, tag=tag)
        while not request.Test():
            if time.monotonic() > deadline:
                with self._leaving_lock:
                    self._leaving.append((request, data))
                return None
            time.sleep(_NAP)
        return rank, bytes(data)

    def _took_all_messages(self) -> bool:
        """Take in what nobody waits for any more; return whether the communicator may be freed.

        Collective, for ranks that come within some seconds.
        """
        assert self._communicator is not None
        deadline = time.monotonic() + _PATIENCE
        sent, coming = array.array("i", self._sent), array.array("i", self._sent)
        try:
            told = self._communicator.Ialltoall([sent, MPI.INT], [coming, MPI.INT])
            while not told.Test() or self._received != list(coming):
                for tag in (_QUESTION_TAG, _ANSWER_TAG):
                    self._receive(tag, deadline)
                if time.monotonic() > deadline:
                    self._unfinished = (told, sent, coming)
                    return False
                time.sleep(0)
        except MPI.Exception:
            pass  # a rank was lost, and the communicator is revoked
        self._leaving.clear()
        return True


def _last_of(group: CountedGroup) -> str:
    return "" if group.last is None else describe(group.last)


def _call_in_words(group: CountedGroup, number: int) -> tuple[str, bool]:
    """Return one of a group's collectives, and whether it is under way; "" if nobody knows."""
    found = ring.find_call(group.source.number, number)
    if found is not None:
        return describe(found[0]), found[1]
    return (_last_of(group) if group.entered == number else ""), False


def _digest(group: CountedGroup) -> bytes:
    """Return what identifies `group` on all of its ranks."""
    text = f"{group.group_name}\n{','.join(map(str, group.world_ranks))}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
