"""A collective that some ranks never enter: the error names them and where they are."""

import contextlib
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mpirun
import pytest
import torch
import torch.distributed as dist
from group_data import rank, size

from mpiddp.torch_internals.versions import new_group_in_order

if TYPE_CHECKING:
    from mpiddp.process_group.group import ProcessGroup

# How long a wait is that is given up, once all who wait have begun.
SHORT = timedelta(seconds=0.3)
LONG = timedelta(seconds=30)
# How long silence is borne, on a busy machine too.
PATIENCE = 30.0

marked = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def _quick_answers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("mpi") is not None:
        from mpiddp.watch import roll_call

        monkeypatch.setattr(roll_call, "_PERIOD", 0.03)
        monkeypatch.setattr(roll_call, "_PATIENCE", PATIENCE)


@pytest.fixture
def part() -> Any:
    """Return a group of all ranks that gives up soon; it is not used again."""
    return dist.new_group(timeout=SHORT)


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError, match="has waited") as caught:
        call()
    return str(caught.value)


def by_the_watchdog(group: "ProcessGroup", number: int) -> str | None:
    """Return what the watchdog's thread finds out about a collective."""
    told: list[str | None] = []

    def look() -> None:
        if not told:
            told.append(roll_call.explain_stall(group, 0, number))

    roll_call = group.roll_call
    assert roll_call is not None
    roll_call.watches.append(look)
    while not told:
        time.sleep(0.01)
    roll_call.watches.remove(look)
    return told[0]


def until_all_are_here() -> None:
    """Wait on another group, as a program that goes on elsewhere would."""
    dist.barrier()


class TestMissingRanks:
    pytestmark = marked

    @pytest.mark.essential
    def test_named_with_what_they_called_last(self) -> None:
        part: Any = dist.new_group(timeout=LONG)
        dist.broadcast(torch.ones(2, 3, dtype=torch.int16), src=1, group=part)
        last = size() - 1
        if rank() != last:
            work = dist.all_reduce(torch.ones(4), group=part, async_op=True)
            assert work is not None
        until_all_are_here()
        if rank() != last:
            text = message_of(lambda: work.wait(SHORT))
            assert f"rank {rank()} of {size()}: all_reduce" in text
            assert (
                f"Rank {last} has not called it "
                f"(last called: broadcast(root 1) of int16 (2, 3), #1)" in text
            )
            assert "not answer" not in text
        until_all_are_here()

    @pytest.mark.smoke
    def test_several(self, part: "ProcessGroup") -> None:
        if rank() == 0:
            text = message_of(lambda: dist.barrier(group=part))
            who = {2: "Rank 1 has", 3: "Ranks 1 and 2 have", 4: "Ranks 1 to 3 have"}[size()]
            assert f"{who} not called it (no collective of this group so far)" in text
        until_all_are_here()

    def test_group_that_others_do_not_know(self) -> None:
        part: Any = dist.new_group(timeout=SHORT)
        if rank() > 0:
            part._set_group_name("another")
        until_all_are_here()
        if rank() == 0:
            text = message_of(lambda: dist.barrier(group=part))
            assert "not called it (not in a group of this name and these ranks)" in text
        until_all_are_here()

    def test_called_with_something_else(self, part: "ProcessGroup") -> None:
        """On one rank the collective was another: the counts are equal and nobody is missing."""
        part.entered, part.last = 5, ("barrier", None, None, (), 0)
        if rank() == 1:
            part.last = ("broadcast", "root 0", torch.float32, (3,), 1)
        until_all_are_here()
        assert part.roll_call is not None
        text = part.roll_call.explain(part)
        if rank() == 0:
            assert (
                text
                == "Rank 1 called broadcast(root 0) of float32 (3,) where rank 0 called barrier"
            )
        until_all_are_here()
        if rank() == 1:
            part.last = ("barrier", None, None, (), 0)
        until_all_are_here()
        assert part.roll_call.explain(part).startswith("All ranks have called it")
        until_all_are_here()

    @pytest.mark.mpi(min_size=3)
    def test_called_with_something_else_and_gone_on(self) -> None:
        """The root of a broadcast does not wait, and calls more. What it called then is told."""
        part: Any = dist.new_group(range(3), timeout=LONG)
        if rank() < 3:
            # Nothing is compared.
            part.state.page = part.state.blocks = part.state.memory = part.state.lanes = None
        if rank() in (0, 2):
            dist.broadcast(torch.ones(3), src=0, group=part)
        until_all_are_here()
        if rank() == 1:
            parts = [torch.ones(3) for _ in range(3)]
            work = dist.gather(parts[1], parts, dst=1, group=part, async_op=True)
            assert work is not None
            # Nobody else waits for it, so this rank has to say it.
            told = by_the_watchdog(part, 1)
            assert told is not None
            calls = ["broadcast(root 0) of float32 (3,)", "gather(root 1) of float32 (3,)"]
            assert f"anks 0 and 2 called {calls[0]} (now at " in told
            assert told.endswith(f"where rank 1 called {calls[1]}")
            assert f"anks 0 and 2 called {calls[0]} where rank 1 called {calls[1]}" in message_of(
                lambda: work.wait(SHORT)
            )
        until_all_are_here()

    def test_both_wait_in_different_calls(self, part: "ProcessGroup") -> None:
        """The line of the watchdog shows both; only the first rank says it."""
        from mpiddp.flight_recorder import ring

        mine = ("barrier", None, None, (), 0)
        if rank() == 0:
            mine = ("all_reduce", None, torch.float32, (3,), 1)
        part.entered, part.last = 5, mine
        record = ring.begin(part.source.number, 5, mine)
        until_all_are_here()
        told = by_the_watchdog(part, 5)
        until_all_are_here()
        ring.ended(record)
        if rank() > 0:
            assert told is None
            return
        assert told is not None
        assert re.match(r"Ranks? 1.* called barrier \(now at .*\) where rank 0 called all_", told)

    @pytest.mark.parametrize("later", [False, True])
    def test_messages_that_do_not_fit(self, later: bool) -> None:
        """Where nothing is compared: one has a result; the other says what both have called."""
        part: Any = dist.new_group([0, 1], timeout=timedelta(seconds=20))
        if rank() < 2:
            part.state.page = part.state.blocks = part.state.memory = part.state.lanes = None

        def broadcast(count: int) -> None:
            work = dist.broadcast(torch.ones(count), src=0, group=part, async_op=later)
            if work is not None:
                work.wait()

        if rank() == 0:
            broadcast(6)
        elif rank() == 1:
            with pytest.raises(RuntimeError, match=r"1 of process group .* does not fit") as caught:
                broadcast(4)
            assert (
                "ank 0 called broadcast(root 0) of float32 (6,) where "
                f"{part.describe_ranks([1])} called broadcast(root 0) of float32 (4,)."
            ) in str(caught.value)
            assert "with TORCH_DISTRIBUTED_DEBUG=DETAIL the ranks compare" in str(caught.value)
        until_all_are_here()

    @pytest.mark.essential
    def test_calls_that_do_not_fit(self) -> None:
        """In a node nothing is sent: the later rank says what both have called, and all hear it."""
        part: Any = dist.new_group([0, 1], timeout=timedelta(seconds=20))
        if rank() == 0:
            work = dist.broadcast(torch.ones(6), src=0, group=part, async_op=True)
            assert work is not None
        until_all_are_here()
        told = (
            "ank 0 called broadcast(root 0) of float32 (6,) where rank 1 called broadcast(root 0) "
            "of float32 (4,)."
        )
        if rank() == 1:
            with pytest.raises(RuntimeError, match="broadcast, collective 1 of pro") as caught:
                dist.broadcast(torch.ones(4), src=0, group=part)
            assert told in str(caught.value)
        until_all_are_here()
        if rank() < 2:
            with pytest.raises(
                RuntimeError, match="is broken: collective 1 does not fit"
            ) as caught:
                dist.barrier(group=part)
            assert told in str(caught.value)
        until_all_are_here()

    def test_an_error_of_which_mpi_says_nothing(self) -> None:
        """MPICH's are all of one class. Sizes that may differ need not be what is wrong."""
        from mpi4py import MPI

        from mpiddp.flight_recorder import ring

        part: Any = dist.new_group([0, 1], timeout=timedelta(seconds=20))
        if rank() < 2:
            parts = [torch.ones(3), torch.ones(4)]
            dist.all_gather([torch.zeros_like(each) for each in parts], parts[rank()], group=part)
            # As if one had been called with another dtype.
            ring.ended(part._enter("all_gather", [parts[0].double() if rank() else parts[0]]))
        until_all_are_here()
        if rank() == 0:
            for number, words in ((1, "may not fit here"), (2, "does not fit here")):
                error = part.misfit(MPI.Exception(MPI.ERR_OTHER), number)
                assert words in str(error)
            assert "does not fit here" in str(part.misfit(MPI.Exception(MPI.ERR_TRUNCATE), 1))
        until_all_are_here()

    def test_sizes_that_may_differ(self) -> None:
        from mpiddp.watch.roll_call_words import Answer, in_words

        calls = [f"all_gather of float32 ({count},)" for count in (3, 4)]
        answers = {one: Answer(1, "", call=call) for one, call in enumerate(calls)}
        assert in_words(range(2), answers, 1, 0).startswith("All ranks have called it")
        answers[1] = Answer(1, "", call="all_gather of float64 (3,)")
        assert "called all_gather of float64" in in_words(range(2), answers, 1, 0)

    def test_collective_that_was_entered_some_time_ago(self, part: "ProcessGroup") -> None:
        part.entered = 5 + (rank() == 0)
        until_all_are_here()
        assert part.roll_call is not None
        if rank() == 0:
            assert part.roll_call.explain(part, 5).startswith("All ranks have called it")
            assert "not called it" in part.roll_call.explain(part)
        until_all_are_here()

    def test_all_ask_at_once_and_from_several_threads(self, part: "ProcessGroup") -> None:
        roll_call = part.roll_call
        assert roll_call is not None
        texts: list[str] = []
        threads = [
            threading.Thread(target=lambda: texts.append(roll_call.explain(part))) for _ in range(2)
        ]
        part.entered = rank()
        until_all_are_here()
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - began < PATIENCE
        for text in texts:
            if rank() == 0:
                assert text.startswith("All ranks have called it")
            else:
                assert text.startswith("Rank 0 has" if rank() == 1 else "Ranks 0")
                assert "not answer" not in text
        until_all_are_here()

    def test_answers_while_a_file_is_being_written(self, part: "ProcessGroup") -> None:
        """After the first answer the flight recorder writes its file, however slow the disk is."""
        from mpiddp.flight_recorder import files

        roll_call = part.roll_call
        assert roll_call is not None
        with files._writing if rank() == 1 else contextlib.nullcontext():
            until_all_are_here()
            for _ in range(3):
                if rank() == 0:
                    assert "not answer" not in roll_call.explain(part)
                time.sleep(0.1)
            until_all_are_here()

    def test_what_is_asked_while_this_rank_asks(
        self, part: "ProcessGroup", monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The wish for its file is kept."""
        from mpi4py import MPI

        from mpiddp.watch import roll_call as module

        monkeypatch.setattr(module, "_PATIENCE", 1.0)
        wishes: list[threading.Thread] = []
        monkeypatch.setattr(
            module.files, "dump_soon", lambda reason: wishes.append(threading.current_thread())
        )
        roll_call = module.RollCall(MPI.COMM_WORLD, threaded=True)
        roll_call.stop()
        until_all_are_here()
        if rank() == 1:
            question = module._QUESTION.pack(module._WRITE, b"", 0, -1)
            roll_call._send(question, 0, module._QUESTION_TAG)
        until_all_are_here()
        if rank() == 0:
            roll_call._ask(part, answering=True)
        until_all_are_here()
        if rank() == 0:
            roll_call._look()
            assert threading.current_thread() in wishes
        roll_call.free()

    def test_hanging_rank_is_silent(
        self, part: "ProcessGroup", monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from mpiddp.watch import roll_call as module

        monkeypatch.setattr(module, "_PATIENCE", 3.0)
        roll_call = part.roll_call
        assert roll_call is not None
        until_all_are_here()
        if rank() == 1:
            roll_call.stop()  # as seen from outside, like one that never gives the lock away
        until_all_are_here()
        if rank() == 0:
            text = message_of(lambda: dist.barrier(group=part))
            silent = r"ank 1 does not answer \(process \d+ on \S+ (sleeps|runs) outside Python"
            assert re.search(silent, text)
        until_all_are_here()
        if rank() == 1:
            roll_call.start()
        monkeypatch.setattr(module, "_PATIENCE", PATIENCE)
        until_all_are_here()
        # The answer to the old question comes late, and is not taken for one to this.
        if rank() == 0:
            assert "not answer" not in roll_call.explain(part)
        until_all_are_here()

    def test_no_message_reaches_the_next_communicator(self) -> None:
        """MPICH gives it the number of the one that was freed."""
        from mpi4py import MPI

        from mpiddp.watch.roll_call import RollCall

        roll_call = RollCall(MPI.COMM_WORLD, threaded=True)
        roll_call.stop()
        if rank() == 0:
            time.sleep(0.3)  # the others are about to free it
            roll_call._send(b"asked late", 1, 1)
        roll_call.free()
        following = MPI.COMM_WORLD.Dup()
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            assert not following.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        following.Free()

    @pytest.mark.mpi(min_size=3)
    def test_group_smaller_than_the_world(self) -> None:
        ranks = [size() - 1, 0]
        part = new_group_in_order(ranks, timeout=SHORT)
        if rank() == 0:
            text = message_of(lambda: dist.barrier(group=part))
            assert f"World rank {size() - 1} has not called it" in text
        until_all_are_here()


def run(folder: Path, source: str, ranks: int, **env: str) -> str:
    """Run a script in which a rank must fail, and return what it printed to stderr."""
    script = folder / "script.py"
    script.write_text(
        "import os, signal, sys, time\nfrom datetime import timedelta\n"
        "import torch, torch.distributed as dist, mpiddp\n"
        "mpiddp.init_process_group()\n"
        "rank = dist.get_rank()\n"
        "dist.all_reduce(torch.ones(3))\n"
        "dist.group.WORLD.set_timeout(timedelta(seconds=1))\n" + source
    )
    done = mpirun.run(ranks, [script], timeout=60, env=env)
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    assert done.returncode != 0
    return done.stderr


@pytest.mark.thorough
@pytest.mark.once
@pytest.mark.timeout(100)
def test_rank_that_ended_and_one_that_does_something_else(tmp_path: Path) -> None:
    source = """
if rank == 2:
    sys.exit()
if rank == 1:
    time.sleep(30)
dist.barrier()
"""
    text = run(tmp_path, source, 3)
    error = re.search(r"\[rank0\]: RuntimeError: (.*)", text)
    assert error
    assert "barrier on process group '0' has waited 1 s" in error[1]
    assert "Rank 1 has not called it (last called: all_reduce(SUM) of float32 (3,), #1)" in error[1]
    assert re.search(r"rank 2 does not answer \(process \d+ on \S+ has left: its program", error[1])


@pytest.mark.timeout(100)
@pytest.mark.slow
def test_frozen_rank(tmp_path: Path) -> None:
    source = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.barrier()
"""
    assert "Rank 1 does not answer" in run(tmp_path, source, 2)


@pytest.mark.thorough
@pytest.mark.once
@pytest.mark.timeout(100)
def test_without_progress_thread(tmp_path: Path) -> None:
    source = """
import threading
assert "mpiddp roll call" not in [thread.name for thread in threading.enumerate()]
if rank == 0:
    dist.barrier()
else:
    time.sleep(30)
"""
    text = run(tmp_path, source, 2, MPIDDP_PROGRESS_THREAD="0")
    assert "Rank 1 does not answer (process " in text
    assert "waits for no other rank, or waits inside of MPI: with MPIDDP_PROGRESS_THREAD=0" in text
