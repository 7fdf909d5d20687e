"""Nobody waits in silence, or for ever, for the agreement on a step; and one rank agrees alone."""

import re
import textwrap
from pathlib import Path

import left_alone
import mpirun
import patience
import pytest
from script_runs import start

pytestmark = [pytest.mark.timeout(90), pytest.mark.once]

PREAMBLE = """\
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
import mpiddp
from mpiddp import preemption
from mpiddp.rendezvous import world

mpiddp.init_process_group()
rank = dist.get_rank()
dist.barrier()
# Not from the start: on a busy machine the ranks come far apart.
world._world.timeout = timedelta(seconds=2)
dist.group.WORLD.set_timeout(world._world.timeout)

def go_on(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if preemption.requested():
            return True
        time.sleep(0.01)
    return False

"""
INSTALL = """preemption.install()
dist.barrier()
"""


def script(folder: Path, source: str, first: str = INSTALL) -> Path:
    path = folder / "script.py"
    path.write_text(PREAMBLE + first + textwrap.dedent(source))
    return path


def test_a_world_of_one(tmp_path: Path) -> None:
    """No thread looks for messages there."""
    done = start(
        script(
            tmp_path,
            """
            assert not preemption.requested()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert go_on(5)
            assert preemption.requested()
            mpiddp.destroy_process_group()
            print("asked")
            """,
        )
    )
    assert (done.returncode, done.stdout) == (0, "asked\n")


@pytest.mark.thorough
def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        go_on(60)
        """,
    )
    done = mpirun.run(3, [path], timeout=50, env={"MPIDDP_STALL_SECONDS": "1"})
    print(done.stdout, done.stderr)
    assert done.returncode != 0
    assert ": preemption.requested() after a signal has waited" in done.stderr
    assert re.search(r"Rank 2 does not answer \(process \d+ .*is stopped", done.stderr)
    assert "The time limit of 2 s is over, and the job ends" in done.stderr


@pytest.mark.thorough
def test_a_rank_that_has_died(tmp_path: Path) -> None:
    """Where the launcher lets the others wait."""
    done, seconds = left_alone.run(
        tmp_path,
        """
        import signal
        from mpiddp import preemption
        preemption.install()
        dist.barrier()
        if rank == 1:
            die(by_signal=False)
        time.sleep(1)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        while not preemption.requested():
            time.sleep(0.01)
        """,
    )
    assert seconds < patience.enough(left_alone.AT_ONCE)
    waits = "waits for its part of preemption.requested() after a signal. The job ends"
    assert waits in done.stderr
    assert "rank 1 (process" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("leaving", [2, 0], ids=["another rank", "the first rank"])
def test_a_rank_that_ends_while_others_uninstall(tmp_path: Path, leaving: int) -> None:
    path = script(
        tmp_path,
        f"""
        if rank == {leaving}:
            sys.exit()
        preemption.uninstall()  # else the job ends after the time limit
        print("uninstalled", flush=True)
        """,
    )
    done = mpirun.run(3, [path], timeout=50)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert done.stdout.count("uninstalled") == 2


@pytest.mark.thorough
@pytest.mark.parametrize(("uninstalling", "asked"), [(1, "asked"), (0, "not asked")])
def test_a_rank_that_waits_for_the_one_that_gives_up(
    tmp_path: Path, uninstalling: int, asked: str
) -> None:
    """A rank has ended, so another one gives up to uninstall while the third steps and is asked."""
    path = script(
        tmp_path,
        f"""
        if rank == 2:
            sys.exit()
        time.sleep(1.5)  # until the others know it
        if rank == 0 == {uninstalling}:
            os.kill(os.getpid(), signal.SIGUSR1)
        if rank == {uninstalling}:
            preemption.uninstall()
            print("uninstalled", flush=True)
            time.sleep(4)
        else:
            time.sleep(1)
            if rank == 0:
                os.kill(os.getpid(), signal.SIGUSR1)
            print("asked" if go_on(3) else "not asked", flush=True)
        """,
    )
    done = mpirun.run(3, [path], timeout=50)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [asked, "uninstalled"]


LATE = "if rank == 1:\n    time.sleep(60)\n"
INSTALLING = f"{LATE}preemption.install()\n"
ASKING = f"{LATE}preemption.requested()\n"
ENDING = f"{LATE}preemption.uninstall()\n"


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("source", "waits", "thread"),
    [
        pytest.param(ENDING, "preemption.uninstall()", None, id="uninstall"),
        pytest.param(INSTALLING, "preemption.install()", None, id="install"),
        pytest.param(ENDING, "preemption.uninstall()", "0", id="uninstall without a thread"),
        pytest.param(ASKING, "preemption.requested()", "0", id="requested without a thread"),
    ],
)
def test_a_rank_that_does_not_come(
    tmp_path: Path, source: str, waits: str, thread: str | None
) -> None:
    path = script(tmp_path, source, "" if source == INSTALLING else INSTALL)
    done = mpirun.run(2, [path], timeout=50, env={"MPIDDP_PROGRESS_THREAD": thread})
    print(done.stdout, done.stderr)
    assert done.returncode != 0
    assert f"mpiddp: rank 0: {waits} has waited" in done.stderr
    assert "The time limit of 2 s is over, and the job ends" in done.stderr
    if thread == "0":
        assert re.search(r"Rank 1 does not answer \(process \d+ .* waits for no other", done.stderr)
    else:
        knows = "no collective of" if source == ENDING else "not in a group of"
        assert f"Rank 1 has not come ({knows}" in done.stderr
        assert f"now at {path}:" in done.stderr
