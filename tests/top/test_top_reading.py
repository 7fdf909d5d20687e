"""What is read of a rank's page, whose ranks are shown, and what is made of it."""

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from two_users import NOBODY, two_users

from mpiddp.flight_recorder import page, ring, sources
from mpiddp.flight_recorder.call_text import call_of
from mpiddp.reducer import step_times
from mpiddp.system import memory_files, rank_signs
from mpiddp.top import pages
from mpiddp.top.cells import printable, ranks_in_short
from mpiddp.top.finding import Finder
from mpiddp.top.pages import BUCKETS, Pace
from mpiddp.top.rates import Counter
from mpiddp.version import __version__

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are found in /proc"),
]


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    ring.allocate(4)
    with mmap.mmap(page.share(), page.BYTES, prot=mmap.PROT_READ) as mapped:
        yield mapped
    ring.allocate(2000)


def test_both_readers_find_the_same(memory: mmap.mmap) -> None:
    """That of this room has no compiled code."""
    source = sources.add(sources.Source("7", range(2)))
    call = call_of("broadcast", (3,), [torch.ones(2, 5), torch.ones(1)])
    ring.begin(source.number, 12, call)
    for _ in range(2):
        operation = page.read(memory[:])[0]
        found = pages.read(memory, page.layout()).operation
        assert operation is not None
        assert found is not None
        assert found == pages.Act(*operation)
        assert found.words == "broadcast(root 3) of float32 (2, 5) and 1 more"
        ring.fail_source(source.number)
    assert found.ended < 0
    assert "7" in pages.read(memory, page.layout()).sources


def test_buckets_are_numbered_as_in_the_records() -> None:
    assert BUCKETS == sources.BUCKETS


WRITER = """\
import sys, time
import torch
from mpiddp.flight_recorder import page, ring, sources
from mpiddp.flight_recorder.call_text import call_of

ring.allocate(64)
descriptor = page.share()
calls = [
    call_of("all_reduce", None, [torch.ones(1)]),
    call_of("a" * 40, (5,), [torch.ones(2, 3, 4, dtype=torch.float64)] * 3),
]
print(descriptor, flush=True)
while True:
    for _ in range(1000):
        for call in calls:
            ring.begin(-1, len(call[0]), call)
"""


def test_a_page_that_is_written_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the writer may have to wait for a core in the middle.
    monkeypatch.setattr(pages, "_PATIENCE", 10.0)
    wanted = {
        (10, "all_reduce of float32 (1,)"),
        (40, "a" * 40 + "(root 5) of float64 (2, 3, 4) and 2 more"),
    }
    seen = set()
    with subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            number = int(writer.stdout.readline())
            with open(f"/proc/{writer.pid}/fd/{number}", "rb") as file:
                memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            layout = page.layout()
            end, count = time.monotonic() + 2, 0
            while time.monotonic() < end:
                found = pages.read(memory, layout)
                if found.operation is not None:
                    seen.add((found.operation.number, found.operation.words))
                    assert found.operations.count >= count
                    count = found.operations.count
            memory.close()
        finally:
            writer.kill()
    assert seen == wanted
    assert count > 1000


def test_a_step_costs_a_handful_of_stores() -> None:
    """It takes 10 ns or so; sanitizers and busy machines take longer."""
    assert 0 < min(step_times.seconds_per_show(100_000) for _ in range(5)) < 1e-6


def test_places_are_given_back() -> None:
    for _ in range(20):
        assert step_times.seconds_per_show(1) > 0


def pretend(told: Any, word: str, **more: Any) -> "subprocess.Popen[str]":
    """Start a process with a sign that says `told`; it knows nothing of mpiddp.

    Another user's hides from debuggers: then its folder in /proc is root's.
    """
    code = (
        "import json, os, sys, time\n"
        "told = json.loads(sys.argv[2])\n"
        "told['process'] = os.getpid()\n"
        "memory = os.memfd_create('mpiddp-last-done')\n"
        "os.ftruncate(memory, 1 << 14)\n"
        "if told.get('world'):\n"
        "    told['world']['page'] = memory\n"
        "os.write(os.memfd_create('mpiddp-rank'), json.dumps(told).encode())\n"
        "if os.getuid() == 65534:\n"
        "    import ctypes\n"
        "    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE\n"
        "print('ready', flush=True)\n"
        "time.sleep(100)\n"
    )
    # Another user may not be let into the folder of this Python.
    python = SYSTEM_PYTHON if more else sys.executable
    command = [python, "-I", "-S", "-c", code, word, json.dumps(told)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/", **more)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def look_at(told: Any, **more: Any) -> list[Any]:
    word = f"pretended-{time.monotonic_ns()}"
    process = pretend(told, word, **more)
    finder = Finder(word)
    try:
        return finder.look()
    finally:
        finder.close()
        process.kill()
        process.communicate()


SYSTEM_PYTHON = "/usr/bin/python3"
SIGN = {"signal": 0, "rank": 3, "path": ""}
WORLD = {"job": "j", "size": 4}


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        pytest.param(SIGN, f"runs an older mpiddp, and this is {__version__}: ask", id="older"),
        pytest.param(
            {**SIGN, "version": "9.1", "world": {**WORLD, "layout": page.layout()}},
            f"runs mpiddp 9.1, and this is {__version__}: ask with the Python of that job",
            id="newer",
        ),
        pytest.param(
            {**SIGN, "version": __version__, "world": {**WORLD, "layout": {"bytes": 8}}},
            f"runs another build of mpiddp {__version__}: what it shows has another form",
            id="other form",
        ),
        pytest.param(
            {
                **SIGN,
                "version": __version__,
                "world": {**WORLD, "layout": {**page.layout(), "bytes": 64}},
            },
            f"runs another build of mpiddp {__version__}: what it shows has another form",
            id="cut off",
        ),
    ],
)
def test_another_version_says_so(told: Any, problem: str) -> None:
    (rank,) = look_at(told)
    assert rank.rank == 3
    assert rank.page is None
    assert rank.problem.startswith(problem)


def test_a_rank_that_has_come_to_no_world() -> None:
    assert look_at({**SIGN, "version": __version__, "world": None}) == []


@two_users
@pytest.mark.skipif(not os.path.exists(SYSTEM_PYTHON), reason="Python is not there for all users")
def test_another_user() -> None:
    """Not even where it is root that looks, and the process hides from debuggers."""
    told = {**SIGN, "version": __version__, "world": {**WORLD, "layout": page.layout()}}
    assert len(look_at(told)) == 1
    assert look_at(told, user=NOBODY, group=NOBODY, extra_groups=[]) == []


def test_memory_of_another_name_is_not_read(tmp_path: Path) -> None:
    """The sign says which descriptor it is; that may be any file."""
    other = memory_files.create("something-else")
    world = {**WORLD, "page": other, "layout": page.layout()}
    sign = rank_signs.put_up(0, 0, "", world)
    finder = Finder()
    try:
        (own,) = (rank for rank in finder.look() if rank.process_id == os.getpid())
    finally:
        finder.close()
        rank_signs.take_down(sign)
        os.close(other)
    assert own.page is None
    assert own.problem == "shares no memory in which it could be seen"


def test_rates() -> None:
    counter = Counter()
    assert counter.per_second(0.0) is None
    counter.add(Pace(1, 10.0, 1, 10.0))
    assert counter.per_second(10.5) is None
    # One look: from the mark on.
    counter = Counter()
    counter.add(Pace(50, 20.0, 10, 10.0), seconds=3.0, before_seconds=1.0)
    assert counter.per_second(20.1) == pytest.approx(4.0)
    assert counter.share() == pytest.approx(0.2)
    # More looks: of the last ten seconds.
    for second in range(1, 31):
        counter.add(Pace(50 + 10 * second, 20.0 + second, 40, 19.0), seconds=3.0 + second / 2)
    assert counter.per_second(50.0) == pytest.approx(10.0)
    assert counter.share() == pytest.approx(0.5)
    # Nothing comes any more.
    assert counter.per_second(51.9) == pytest.approx(10.0)
    assert counter.per_second(52.1) == 0
    # It counts anew.
    counter.add(Pace(1, 60.0, 1, 60.0))
    assert counter.per_second(60.0) is None


def test_slow_steps_have_a_rate() -> None:
    counter = Counter()
    counter.add(Pace(5, 500.0, 1, 100.0))
    assert counter.per_second(700.0) == pytest.approx(0.01)
    counter.add(Pace(6, 550.0, 1, 100.0))
    assert counter.per_second(560.0) == pytest.approx(0.02)


def test_words() -> None:
    assert ranks_in_short([7, 0, 1, 2, 9, 10]) == "0-2,7,9-10"
    assert printable("train\x1b[2J.py\n") == "train?[2J.py?"


@pytest.mark.parametrize("command", [["-m", "mpiddp.top"], ["mpiddp", "top"]])
def test_neither_torch_nor_mpi_is_imported(tmp_path: Path, command: list[str]) -> None:
    for name in ("torch", "mpi4py", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')\n")
    if command[0] == "mpiddp":
        command = [str(Path(sys.executable).parent / "mpiddp"), *command[1:]]
    else:
        command = [sys.executable, *command]
    done = subprocess.run(
        [*command, "--json", "no-such-program"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["jobs"] == []


def test_a_wrong_pattern() -> None:
    command = [sys.executable, "-m", "mpiddp.top", "("]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd="/")
    assert done.returncode == 2
    assert "mpiddp.top: '(' is no regular expression: " in done.stderr
