"""A rank that fails ends the job whatever is wrong with its output, its hooks or its threads.

Each test starts a job of its own with mpirun: the script itself, and as `python -m mpiddp` runs it.
"""

import io
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import mpirun
import patience
import pytest

pytestmark = pytest.mark.timeout(100)

# Seconds from the failure to the end of the job, on a machine that is busy. Where output blocks,
# 8 of them are waited for it.
AT_ONCE = 15

PREAMBLE = """\
import os, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
import mpiddp
from mpiddp import DistributedDataParallel as DDP

torch.set_num_threads(1)


def note_the_time():
    with open(__file__ + ".failed", "w") as file:
        file.write(str(time.monotonic()))


def fail():
    # The others are where they wait by now.
    time.sleep(0.5)
    note_the_time()
    raise ValueError("broken on purpose")


def redirect(path):
    for stream in (1, 2):
        os.dup2(os.open(path, os.O_WRONLY), stream)


def redirect_to_full_pipe():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writing, True)
    for stream in (1, 2):
        os.dup2(writing, stream)


def run_in_thread(function, daemon=False):
    thread = threading.Thread(target=function, name="trainer", daemon=daemon)
    thread.start()
    return thread


def train():
    wrapped = DDP(torch.nn.Linear(4, 4))
    wrapped(torch.ones(2, 4)).sum().backward()
    return wrapped


"""

INIT = """\
mpiddp.init_process_group(timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
"""

WAIT = """\
dist.barrier()
print("still here")
"""


@dataclass
class Job:
    """A job that has ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds_after_failure: float

    def assert_ended_at_once(self, status: int | None = None) -> None:
        assert self.returncode != 0
        assert status is None or self.returncode == status
        assert "still here" not in self.stdout
        assert self.seconds_after_failure < patience.enough(AT_ONCE)


def run(folder: Path, source: str, runner: bool = False, ranks: int = 2) -> Job:
    """Run a script that calls note_the_time() where it fails."""
    script = folder / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(source))
    done = mpirun.run(ranks, [*(["-m", "mpiddp"] * runner), script], timeout=80)
    ended = time.monotonic()
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    failed = folder / "script.py.failed"
    began = float(failed.read_text()) if failed.exists() else -1e9
    return Job(done.returncode, done.stdout, done.stderr, ended - began)


# What is wrong with the output of the rank that fails, and where its traceback is printed.
OUTPUTS = {
    "stdout on a full disk": ("sys.stdout = open('/dev/full', 'w')", "stderr"),
    "stderr on a full disk": ("sys.stderr = open('/dev/full', 'w')", "stderr"),
    "a full disk": ("redirect('/dev/full')", ""),
    "closed": ("sys.stdout.close(); sys.stderr.close()", ""),
    "closed descriptors": ("os.close(1); os.close(2)", ""),
    "no streams": ("sys.stdout = sys.stderr = None", "stderr"),
    "a pipe that nobody reads": ("redirect_to_full_pipe()", ""),
}


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("output", "runner"),
    [
        pytest.param("a full disk", False, id="a full disk"),
        pytest.param("a pipe that nobody reads", False, id="a pipe that nobody reads"),
        pytest.param("a full disk", True, id="runner, a full disk"),
        pytest.param(
            "a pipe that nobody reads",
            True,
            id="runner, a pipe that nobody reads",
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(output, False, id=output, marks=[pytest.mark.once, *slow])
            for output, slow in (
                ("stdout on a full disk", []), ("stderr on a full disk", [pytest.mark.slow]),
                ("closed", []), ("closed descriptors", [pytest.mark.slow]),
                ("no streams", [pytest.mark.slow]),
            )
        ),
    ],
)  # fmt: skip
def test_output_that_fails(tmp_path: Path, output: str, runner: bool) -> None:
    breaking, printed = OUTPUTS[output]
    # Python itself flushes stdout before it calls any hook, and blocks there.
    held_back = runner or output != "a pipe that nobody reads"
    job = run(
        tmp_path,
        INIT
        + f"""
if rank == 1:
    {breaking}
    if {held_back} and sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.write("held back")
    fail()
"""
        + WAIT,
        runner,
    )
    job.assert_ended_at_once()
    if printed:
        assert job.stderr.count("[rank1]: ValueError: broken on purpose") == 1


@pytest.mark.thorough
@pytest.mark.once
def test_traceback_on_stdout_where_stderr_takes_none(tmp_path: Path) -> None:
    source = "if rank == 1:\n    os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n    fail()\n"
    job = run(tmp_path, INIT + source + WAIT)
    job.assert_ended_at_once(1)
    assert job.stdout.count("[rank1]: ValueError: broken on purpose") == 1


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["SIGTERM", "words"])
def test_other_ends_with_output_that_blocks(tmp_path: Path, ending: str) -> None:
    end = (
        "signal.raise_signal(15); time.sleep(100)"
        if ending == "SIGTERM"
        else "sys.exit('last words')"
    )
    job = run(
        tmp_path,
        INIT
        + f"""
if rank == 1:
    time.sleep(0.5)
    note_the_time()
    print("held back", end="")
    redirect_to_full_pipe()
    {end}
"""
        + WAIT,
        runner=True,
    )
    job.assert_ended_at_once()


# Hooks of a user, installed after ours. rich is pip's own copy.
HOOKS = {
    "rich": (
        "from pip._vendor.rich.traceback import install; install()",
        "ValueError: broken on purpose",
    ),
    "raises": ("sys.excepthook = lambda *error: 1 / 0", "broken on purpose"),
    "calls ours": (
        "before = sys.excepthook; sys.excepthook = lambda *error: before(*error)",
        "[rank1]: ValueError: broken on purpose",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "hook",
    ["rich", *(pytest.param(name, marks=pytest.mark.once) for name in HOOKS if name != "rich")],
)
def test_hook_that_is_installed_later(tmp_path: Path, hook: str) -> None:
    installing, said = HOOKS[hook]
    job = run(
        tmp_path,
        INIT
        + f"""
train()
{installing}
# Python would wait for it.
threading.Thread(target=time.sleep, args=(100,)).start()
if rank == 1:
    fail()
"""
        + WAIT,
    )
    job.assert_ended_at_once(1)
    assert said in job.stderr


@pytest.mark.thorough
@pytest.mark.once
@pytest.mark.parametrize(
    ("doing", "runner"),
    [
        ("1 / 0", False),
        pytest.param("time.sleep(100)", False, marks=pytest.mark.slow),
        ("sys.exit(0)", True),
    ],
)
def test_hook_of_before_that_does_not_end(tmp_path: Path, doing: str, runner: bool) -> None:
    source = f"def hook(*error):\n    {doing}\n\n\nsys.excepthook = hook\n"
    job = run(tmp_path, source + INIT + "if rank == 1:\n    fail()\n" + WAIT, runner)
    job.assert_ended_at_once(1)
    assert (doing != "1 / 0") or "ValueError: broken on purpose" in job.stderr


@pytest.mark.thorough
@pytest.mark.once
def test_keyboard_interrupt_with_a_later_hook(tmp_path: Path) -> None:
    job = run(
        tmp_path,
        INIT
        + """
sys.excepthook = lambda *error: print("interrupted", file=sys.stderr)
if rank == 1:
    time.sleep(0.5)
    note_the_time()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(100)
"""
        + WAIT,
    )
    job.assert_ended_at_once(130)
    assert job.stderr.count("interrupted") == 1


@pytest.mark.thorough
@pytest.mark.once
def test_exception_that_somebody_else_noted(tmp_path: Path) -> None:
    """Pytest, for one, notes exceptions that it has caught where the interpreter does."""
    job = run(
        tmp_path,
        INIT
        + """
def note():
    try:
        1 / 0
    except ZeroDivisionError as error:
        sys.last_type, sys.last_value = type(error), error
        sys.last_traceback = error.__traceback__

note()
dist.barrier()
""",
    )
    assert job.returncode == 0
    assert "abort" not in job.stderr.lower()


# What the thread has done before it fails, in a function of its own.
PARTS = {
    "collective": "dist.barrier()",
    "forward": "wrapped(torch.ones(2, 4)).sum().backward()",
}


@pytest.mark.essential
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("part", "runner"),
    [("collective", False), pytest.param("forward", True, marks=pytest.mark.slow)],
)
def test_thread_that_trains(tmp_path: Path, part: str, runner: bool) -> None:
    job = run(
        tmp_path,
        INIT
        + f"""
wrapped = train()


def work():
    {PARTS[part]}
    if rank == 1:
        fail()
    dist.barrier()
    print("still here")


run_in_thread(work).join()
""",
        runner,
    )
    job.assert_ended_at_once(1)
    assert job.stderr.count("ValueError: broken on purpose") == 1
    assert "[rank1]: thread 'trainer' has failed. The job ends: " in job.stderr


@pytest.mark.thorough
@pytest.mark.once
def test_first_forward_of_a_thread_raises(tmp_path: Path) -> None:
    source = """
    wrapped = train()
    wrapped(torch.ones(2, 4)).sum().backward()  # its forward has compared the ranks' parameters
    note_the_time()
    run_in_thread((lambda: wrapped(None)) if rank == 1 else dist.barrier).join()
    """
    job = run(tmp_path, INIT + textwrap.dedent(source))
    job.assert_ended_at_once(1)
    assert "[rank1]: thread 'trainer' has failed" in job.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("sys.exit(3)", 3),
        pytest.param("sys.exit('words')", 1, marks=pytest.mark.once),
        pytest.param("os.kill(os.getpid(), 2)", 130, marks=pytest.mark.slow),
    ],
)
def test_thread_that_trains_exits(tmp_path: Path, ending: str, status: int) -> None:
    job = run(
        tmp_path,
        INIT
        + f"""
def work():
    # Somebody has replaced the hook for threads: the next thread that takes part has ours again.
    threading.excepthook = threading.__excepthook__
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
        note_the_time()
        {ending}
    dist.barrier()


run_in_thread(work, daemon=True).join()
""",
    )
    job.assert_ended_at_once(status)
    if "sys.exit" in ending:
        assert f"[rank1]: thread 'trainer' has called {ending}. The job ends: " in job.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["world", pytest.param("one", marks=pytest.mark.slow)])
def test_threads_that_do_not_end_the_job(tmp_path: Path, kind: str) -> None:
    """Those that nobody waits for, that exit well, or that fail when all is over."""
    job = run(
        tmp_path,
        INIT
        + """
train()
ending = threading.Event()


def exit_well():
    dist.barrier()
    sys.exit(0)


def fail_later():
    dist.barrier()
    ending.wait()
    raise ValueError("broken late")


def fail_of_one():
    dist.barrier()
    raise ValueError("broken in a world of one")


run_in_thread(fail).join()
run_in_thread(exit_well).join()
thread = run_in_thread(fail_later)
time.sleep(0.2)
dist.barrier()
if size == 1:
    run_in_thread(fail_of_one).join()
mpiddp.destroy_process_group()
ending.set()
thread.join()
print("all well")
""",
        ranks=2 if kind == "world" else 1,
    )
    assert job.returncode == 0
    assert job.stdout.count("all well") == (2 if kind == "world" else 1)
    assert "ValueError: broken on purpose" in job.stderr


# What rank 1 alone does wrong when the job starts.
STARTS = {
    "before MPI is used": "from mpi4py import MPI; mpiddp.init_process_group(timeout=3)",
    "before the first message": "mpiddp.init_process_group(comm='world')",
    "in torch": "dist.init_process_group('mpiddp', timeout=3)",
    "twice": "from mpi4py import MPI; dist.init_process_group('mpiddp', store=1, init_method='2')",
}


@pytest.mark.essential(keep=1)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("start", "runner"),
    [
        ("in torch", False),
        ("before the first message", False),
        pytest.param("before the first message", True, marks=pytest.mark.once),
        pytest.param("before MPI is used", False, marks=pytest.mark.once),
        pytest.param("twice", False, marks=pytest.mark.slow),
    ],
)
def test_exception_in_the_start(tmp_path: Path, start: str, runner: bool) -> None:
    job = run(
        tmp_path,
        f"""
if "1" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
    note_the_time()
    {STARTS[start]}
dist.init_process_group("mpiddp")
print("still here")
dist.barrier()
""",
        runner,
    )
    job.assert_ended_at_once(1)
    assert job.stderr.count("Traceback (most recent call last)") == 1
    assert 'script.py", line ' in job.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("runner", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exception_in_the_start_that_is_caught(tmp_path: Path, runner: bool) -> None:
    """The other ranks have begun: nobody could begin again."""
    job = run(
        tmp_path,
        """
if "1" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
    note_the_time()
    try:
        dist.init_process_group("mpiddp", timeout=3)
    except TypeError:
        print("still here")
        time.sleep(100)
dist.init_process_group("mpiddp")
dist.barrier()
""",
        runner,
    )
    job.assert_ended_at_once(1)
    assert job.stderr.count("Traceback (most recent call last)") == 1
    assert "[rank1]: TypeError: " in job.stderr
    assert 'script.py", line ' in job.stderr
    assert "runpy" not in job.stderr


@pytest.mark.once
def test_one_of_two_streams_is_enough() -> None:
    """The traceback of a rank with a log file is printed though the file's disk is full."""
    from mpiddp.runner import output

    class Full(io.StringIO):
        def write(self, text: str, /) -> int:
            raise OSError("no space left on device")

        def flush(self) -> None:
            raise OSError("no space left on device")

    terminal = io.StringIO()
    print("last words", file=output._Both(Full(), terminal), flush=True)
    assert terminal.getvalue() == "last words\n"
    with pytest.raises(OSError, match="no space left"):
        print("last words", file=output._Both(Full(), Full()))
