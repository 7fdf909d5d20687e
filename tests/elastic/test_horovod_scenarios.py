"""The scenarios of Horovod's own elastic tests, by hvd.elastic.

Of test/integration/elastic_common.py: those that do not come of a driver that discovers hosts, see
docs/how-to/elastic.md. Hosts that are added are processes that come, hosts that are removed are
ranks that are killed.
"""

import subprocess

import pytest
from elastic_runs import needs_ulfm, said, start

pytestmark = [pytest.mark.timeout(300), needs_ulfm]

# Horovod's tests end a rank in both of these ways.
WAYS = ["kill", "exception"]


def train(ranks: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return start(ranks, "horovod_elastic.py", *arguments, limit=200)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["kill", pytest.param("exception", marks=pytest.mark.slow)])
def test_single_rank_failure(how: str) -> None:
    done = train(3, "--lose=1:5", f"--how={how}")
    if how == "kill":
        assert done.returncode == 0
    ended = said(done)
    assert [each["rank"] for each in ended] == [0, 2]
    for each in ended:
        assert each["worlds"] == [3, 2]
        assert each["total"] == 2
        assert each["rate"] == 0.02
        assert each["left"] == dict.fromkeys("0123", 0)
    if how == "exception":
        assert done.stderr.count("ValueError: rank 1 fails") == 1
        assert "mpiddp: rank 1 ends with this exception; the others go on" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_fault_tolerance_without_scaling(how: str) -> None:
    """As many ranks as before: another process comes for the one that was lost."""
    done = train(
        3, "--lose=1:5", f"--how={how}",
        '--options={"replace": true, "exceptions_are_losses": true}',
    )  # fmt: skip
    came, *others = said(done)
    assert came["rank"] == -1
    assert came["worlds"] == [3]
    assert [each["rank"] for each in others] == [0, 2]
    assert [each["worlds"] for each in others] == [[3, 3]] * 2
    assert {each["rate"] for each in (came, *others)} == {0.03}


@pytest.mark.slow
def test_hosts_added_and_removed() -> None:
    """One comes; then one that was there from the beginning goes, and it was rank 0."""
    done = train(2, "--grow=4:1", "--lose=0:10")
    came, other = said(done)
    assert (came["rank"], other["rank"]) == (-1, 1)
    assert came["worlds"] == [3, 2]
    assert other["worlds"] == [2, 3, 2]
    assert {each["total"] for each in (came, other)} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_all_ranks_failure(how: str) -> None:
    """The job ends, by itself, and says why if it can."""
    done = train(3, "--lose=0:5", "--lose=1:5", "--lose=2:5", f"--how={how}")
    assert not done.stdout
    if how == "exception":
        assert done.returncode != 0
        for rank in range(3):
            assert f"ValueError: rank {rank} fails" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("most", "goes_on"), [(1, False), (2, True)])
def test_reset_limit(most: int, goes_on: bool) -> None:
    done = train(4, "--lose=1:5", "--lose=2:9", f'--options={{"most_losses": {most}}}')
    told = f"ranks were lost 2 times, more often than most_losses={most}"
    if goes_on:
        assert done.returncode == 0
        ended = said(done)
        assert [each["rank"] for each in ended] == [0, 3]
        assert [each["worlds"] for each in ended] == [[4, 3, 2]] * 2
        assert told not in done.stderr
    else:
        assert done.returncode != 0
        assert not done.stdout
        assert told in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_too_few_are_left(how: str) -> None:
    """What stands for Horovod's test_min_hosts_timeout; nobody waits for hosts."""
    done = train(
        3, "--lose=1:5", f"--how={how}",
        '--options={"min_ranks": 3, "exceptions_are_losses": true}',
    )  # fmt: skip
    assert not done.stdout
    assert "2 of 3 ranks are left, fewer than min_ranks=3" in done.stderr


@pytest.mark.slow
def test_an_exception_ends_the_job_by_default() -> None:
    done = train(3, "--lose=1:5", "--how=exception", "--options={}")
    assert done.returncode != 0
    assert not done.stdout
    assert "ValueError: rank 1 fails" in done.stderr
