"""A rank that has ended without MPI: the others of its node end the job, where no launcher does."""

import re
from pathlib import Path

import patience
import pytest
from left_alone import AT_ONCE, run

pytestmark = pytest.mark.timeout(100)


@pytest.mark.parametrize(
    ("by_signal", "waits", "said"),
    [
        pytest.param(True, "dist.all_reduce(torch.ones(3))", "all_reduce(SUM) of float32 (3,)"),
        pytest.param(
            False,
            "model(torch.ones(1, 10)).sum().backward()",
            "bucket 0 of backward pass 1 of Linear",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            True, "dist.recv(torch.ones(1), src=1)", "recv of float32 (1,)", marks=pytest.mark.slow
        ),
    ],
    ids=["collective", "bucket", "message"],
)
def test_ends_the_job(tmp_path: Path, by_signal: bool, waits: str, said: str) -> None:
    done, seconds = run(
        tmp_path,
        f"""
        if rank == 1:
            die({by_signal})
        {waits}
        print("still here")
        """,
    )
    assert "still here" not in done.stdout
    assert seconds < patience.enough(AT_ONCE)
    line = re.search(
        r"mpiddp: rank [02]: rank 1 \(process \d+ on \S+\) (.*), and this rank waits for its part "
        rf"of {re.escape(said)} of group '.*'\. The job ends",
        done.stderr,
    )
    assert line is not None
    # Linux tells only once the launcher has asked for the exit status.
    known = "was ended by SIGKILL" if by_signal else "has ended with status 3"
    assert line[1] in (known, "has ended", "has ended with status 3")


@pytest.mark.slow  # elastic/test_losses.py has the like
def test_ends_the_job_without_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait look themselves, in the wait for a bucket in memory that they share."""
    monkeypatch.setenv("MPIDDP_PROGRESS_THREAD", "0")
    done, seconds = run(
        tmp_path,
        """
        if rank == 1:
            die(True)
        model(torch.ones(1, 10)).sum().backward()
        print("still here")
        """,
    )
    assert "still here" not in done.stdout
    assert seconds < patience.enough(AT_ONCE)
    assert re.search(
        r"mpiddp: rank [02]: rank 1 \(process \d+ on \S+\) .*, and this rank waits for its part of "
        r"bucket 0 of backward pass 1 of Linear of group '.*'\. The job ends",
        done.stderr,
    )


@pytest.mark.slow  # its siblings stay
def test_others_go_on_where_nobody_waits_for_it(tmp_path: Path) -> None:
    """It ends without MPI, and the others work in a group of their own."""
    done, _ = run(
        tmp_path,
        """
        if rank == 1:
            die(by_signal=False)
        work = dist.all_reduce(torch.ones(3), group=part, async_op=True)
        for _ in range(8):
            time.sleep(0.5)
            dist.all_reduce(torch.ones(3), group=part)
        print("all well", flush=True)
        os._exit(0)
        """,
    )
    assert done.stdout.count("all well") == 2
    assert "The job ends" not in done.stderr


@pytest.mark.slow  # its siblings stay
def test_a_rank_that_ends_properly_is_not_missed(tmp_path: Path) -> None:
    done, _ = run(
        tmp_path,
        """
        if rank == 1:
            sys.exit(0)
        for _ in range(8):
            time.sleep(0.5)
            dist.all_reduce(torch.ones(3), group=part)
        print("all well", flush=True)
        """,
    )
    assert done.returncode == 0
    assert done.stdout.count("all well") == 2
    assert "The job ends" not in done.stderr
