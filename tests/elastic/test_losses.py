"""Ranks are killed while a program trains under mpiddp.elastic."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_runs import OPEN_MPI, learned, needs_ulfm, said, start, train

pytestmark = pytest.mark.timeout(150)


def of_open_mpi(done: "subprocess.CompletedProcess[str]") -> str:
    """What Open MPI's own faults have made of a job, see docs/how-to/elastic.md; "" for nothing."""
    crashes = ("ompi_comm_revoke_local", "ompi_errhandler_proc_failed_internal")
    ends = (*crashes, "a new world was not made within 150 s: this rank gives up")
    return next((words for words in ends if words in done.stderr), "")


def assert_learned(ended: "list[dict]", steps: int) -> None:
    """The ranks have the loss that so many ranks have after these steps, without a loss of any."""
    (worlds,) = {str(each["worlds"]) for each in ended}
    (loss,) = {each["loss"] for each in ended}
    assert loss == pytest.approx(learned(ended[0]["worlds"], steps), rel=1e-6), worlds


@pytest.mark.essential
@needs_ulfm
@pytest.mark.parametrize(
    "transport",
    [
        "auto",
        pytest.param("exchange", marks=pytest.mark.slow),
        pytest.param("mpi", id="through MPI", marks=pytest.mark.slow),
    ],
)
def test_others_go_on(transport: str) -> None:
    """They have learned what so many ranks learn, and no time limit has to pass first."""
    done = train(3, 300, "--kill=1:0.3", MPIDDP_TRANSPORT=transport)
    assert done.returncode == 0
    ended = said(done)
    assert [each["rank"] for each in ended] == [0, 2]
    for each in ended:
        assert each["steps"] == 300
        (first, _), (second, step) = each["worlds"]
        assert (first, second) == (3, 2)
        assert 0 <= step < 300  # 0: lost before the first step, on a busy machine
    assert_learned(ended, 300)
    told = re.search(
        r"mpiddp: rank 0: 1 of 3 ranks was lost; training goes on with 2 after (\d+\.\d) s",
        done.stderr,
    )
    assert told
    assert float(told[1]) < 20  # two seconds on a machine at rest


@pytest.mark.thorough
@needs_ulfm
@pytest.mark.parametrize(
    "transport", ["auto", pytest.param("mpi", id="through MPI", marks=pytest.mark.slow)]
)
def test_ranks_that_wait_hear_of_a_loss_without_a_thread(transport: str) -> None:
    """A rank waits in memory that the ranks share, of which MPI knows nothing."""
    done = train(3, 60, "--kill-at=1:20", MPIDDP_PROGRESS_THREAD="0", MPIDDP_TRANSPORT=transport)
    assert done.returncode == 0
    ended = said(done)
    assert [each["rank"] for each in ended] == [0, 2]
    assert [[ranks for ranks, _ in each["worlds"]] for each in ended] == [[3, 2]] * 2
    assert {each["steps"] for each in ended} == {60}


@pytest.mark.thorough
@needs_ulfm
@pytest.mark.parametrize("thread", ["1", "0"])
def test_an_end_that_was_announced_before_a_loss(thread: str) -> None:
    """The signal does not come again: the ranks that are left end at the same step all the same."""
    options = ["--announce-at=0:20", "--kill-at=1:20"]
    done = train(3, 100_000, *options, MPIDDP_PROGRESS_THREAD=thread)
    assert done.returncode == 0
    ended = said(done)
    assert [each["rank"] for each in ended] == [0, 2]
    (steps,) = {each["steps"] for each in ended}
    assert 20 < steps < 100_000


@needs_ulfm
@pytest.mark.slow
def test_same_bits_as_a_run_of_the_others() -> None:
    """A rank that is lost before the first step leaves no trace."""
    left, alone = said(train(3, 40, "--kill-at=2:0")), said(train(2, 40))
    assert [each["worlds"] for each in left] == [[[3, 0], [2, 0]]] * 2
    assert [each["bits"] for each in left] == [each["bits"] for each in alone]


@needs_ulfm
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_two_ranks_at_random_moments() -> None:
    """Never a hang, and what is learned is what so many ranks learn in as many steps."""
    draw = random.Random(1)
    ended_by_it = 0
    for number in range(200):
        first, second = draw.sample(range(4), 2)
        began = draw.uniform(0, 1.2)
        later = draw.choice([began, began + draw.uniform(0, 1), draw.uniform(0, 1.5)])
        transport = draw.choice(["auto", "auto", "mpi", "exchange"])
        kills = [f"--kill={first}:{began:.3f}", f"--kill={second}:{later:.3f}"]
        done = train(4, 500, *kills, limit=240, MPIDDP_TRANSPORT=transport)
        if words := of_open_mpi(done):
            ended_by_it += 1
            print(f"job {number} of 200: {kills}: ended by Open MPI: {words}")
            continue
        assert done.returncode == 0, kills
        ended = said(done)
        assert {each["rank"] for each in ended} >= set(range(4)) - {first, second}, kills
        assert {each["steps"] for each in ended} == {500}
        assert_learned(ended, 500)
    print(f"{ended_by_it} of 200 jobs were ended by faults of Open MPI")
    assert ended_by_it < 20


@needs_ulfm
@pytest.mark.slow
@pytest.mark.timeout(700)
def test_two_of_sixteen() -> None:
    """On machines with fewer cores, too: the ranks take turns."""
    draw = random.Random(16)
    lost = draw.sample(range(16), 2)
    kills = [f"--kill={rank}:{draw.uniform(0, 4):.3f}" for rank in lost]
    for _ in range(2):
        done = train(16, 100, *kills, limit=300)
        if not of_open_mpi(done):
            break
    ended = said(done)
    assert {each["rank"] for each in ended} >= set(range(16)) - set(lost)
    assert {each["steps"] for each in ended} == {100}
    assert ended[0]["worlds"][-1][0] == len(ended)
    assert_learned(ended, 100)


@pytest.mark.thorough
@needs_ulfm
def test_a_loss_in_the_second_function() -> None:
    """What noticed losses for the first one does not take the new world for lost."""
    done = train(3, 200, "--kill-at=1:50", "--after-another")
    assert done.returncode == 0
    assert [each["worlds"] for each in said(done)] == [[[3, 0], [2, 50]]] * 2
    assert done.stderr.count("training goes on with") == 1


@needs_ulfm
@pytest.mark.slow
def test_last_rank_goes_on_alone() -> None:
    (ended,) = said(train(3, 300, "--kill=0:0.3", "--kill=2:0.8"))
    assert ended["rank"] == 1
    assert ended["worlds"][-1][0] == 1
    assert ended["steps"] == 300
    assert_learned([ended], 300)


@needs_ulfm
@pytest.mark.slow
def test_all_are_lost() -> None:
    """The job ends; Open MPI's mpirun says that all is well."""
    assert not train(2, 10**6, "--kill=0:0.3", "--kill=1:0.5").stdout


@needs_ulfm
@pytest.mark.slow
def test_too_few_are_left() -> None:
    done = train(3, 10**6, "--kill=2:0.3", '--options={"min_ranks": 3}')
    assert "rank 0: 2 of 3 ranks are left, fewer than min_ranks=3" in done.stderr


@needs_ulfm
@pytest.mark.slow
def test_too_many_losses() -> None:
    done = train(3, 10**6, "--kill=2:0.3", "--kill=1:1.8", '--options={"most_losses": 1}')
    assert "rank 0: ranks were lost 2 times, more often than most_losses=1" in done.stderr


@pytest.mark.skipif(OPEN_MPI, reason="Open MPI goes on")
def test_says_that_a_lost_rank_ends_the_job() -> None:
    done = train(2, 20)
    assert done.returncode == 0
    said_once = (
        "mpiddp: rank 0: a rank that is lost ends this job, since MPICH ends a job that loses a "
        "rank. Started again, it begins anew, since its State has neither a name nor checkpoints"
    )
    assert done.stderr.count(said_once) == 1
    assert len(said(done)) == 2


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("given", "then"),
    [
        ({}, "None"),
        ({"OMPI_MCA_mpi_ft_enable": "1"}, "self,tcp"),
        ({"OMPI_MCA_mpi_ft_enable": "1", "OMPI_MCA_btl": "self,sm"}, "self,sm"),
        ({"OMPI_MCA_mpi_ft_enable": "1", "OMPI_MCA_btl": "^ofi"}, "self,tcp"),
        ({"OMPI_MCA_mpi_ft_enable": "1", "OMPI_MCA_btl": "^ofi,tcp"}, "^ofi,tcp"),
    ],
)
def test_how_open_mpi_sends_where_ranks_may_be_lost(given: dict[str, str], then: str) -> None:
    program = "import os, mpiddp; print(os.environ.get('OMPI_MCA_btl'))"
    env = {name: value for name, value in os.environ.items() if name != "OMPI_MCA_btl"} | given
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == then


@pytest.mark.thorough
@needs_ulfm
def test_a_rank_that_is_stopped_at_the_end_is_spoken_of(tmp_path: Path) -> None:
    """The others are through with the function, and wait for its agreement only."""
    script = tmp_path / "stopped.py"
    script.write_text(
        "import os, signal, subprocess\n"
        "import torch.distributed as dist, mpiddp\n"
        "from mpiddp import elastic\n"
        "mpiddp.init_process_group()\n"
        "@elastic.run\n"
        "def train(state):\n"
        "    if dist.get_rank() == 1:\n"
        "        subprocess.Popen(['sh', '-c', f'sleep 5; kill -CONT {os.getpid()}'])\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "train(elastic.State(step=0))\n"
        "print('all well')\n"
    )
    done = start(2, str(script), MPIDDP_STALL_SECONDS="1")
    assert done.returncode == 0
    assert done.stdout.count("all well") == 2
    assert "mpiddp: rank 0: the end of the elastic function has waited" in done.stderr
    assert re.search(r"Rank 1 does not answer \(process \d+ .*is stopped", done.stderr)
