"""What becomes of a job that saves: a real SLURM cancels, requeues and restarts it."""

import sys
import time
from collections.abc import Callable, Iterator

import patience
import pytest
from script_runs import SCRIPTS
from slurm_lab import SRUN, Hosts, start_hosts

pytestmark = [pytest.mark.slow, pytest.mark.once, pytest.mark.timeout(300)]


class Jobs:
    """Batch jobs on two nodes."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.plugin, variables = SRUN[hosts.mpi]
        hosts.env |= variables | {"OMP_NUM_THREADS": "1"}
        self.count = 0

    def submit(self, lines: str, *options: str) -> str:
        """Submit a script in which RUN starts the training on two ranks; return the number."""
        self.count += 1
        self.log = self.hosts.folder / f"job-{self.count}.out"
        batch = self.hosts.folder / f"job-{self.count}.sbatch"
        run = f"srun --mpi={self.plugin} --exact -N2 -n2 {sys.executable} "
        run += str(SCRIPTS / "save_when_asked.py")
        batch.write_text(f"#!/bin/bash\n{lines.replace('RUN', run)}\n")
        return self.hosts.on_head(
            *("sbatch", "--parsable", "--requeue", "--open-mode=append", "-N2", "-n4"),
            *(f"--output={self.log}", f"--chdir={self.hosts.folder}", *options, str(batch)),
        )

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait(self, job: str, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + patience.enough(80)
        while not what():
            assert time.monotonic() < deadline, f"{self.told(job)}\n{self.output()}"
            time.sleep(0.3)

    def wait_for(self, job: str, words: str) -> None:
        self.wait(job, lambda: words in self.output())

    def told(self, job: str) -> dict[str, str]:
        said = self.hosts.on_head("scontrol", "--oneliner", "show", "job", job)
        return dict(word.partition("=")[::2] for word in said.split())

    def wait_for_end(self, job: str) -> dict[str, str]:
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait(job, lambda: self.told(job)["JobState"] in ends)
        print(self.output())
        return self.told(job)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with start_hosts(2) as hosts:
        yield Jobs(hosts)


def test_a_cancelled_job_saves_and_stays_so(jobs: Jobs) -> None:
    job = jobs.submit("exec RUN one 0")
    jobs.wait_for(job, "started 0 on 2")
    time.sleep(1)
    jobs.hosts.on_head("scancel", job)
    told = jobs.wait_for_end(job)
    assert (told["JobState"], told["Restarts"]) == ("CANCELLED", "0")
    assert "one saved" in jobs.output()
    assert f"job {job} has been cancelled: it is not put back" in jobs.output()
    assert "started 1" not in jobs.output()


def test_a_job_that_somebody_requeues_is_not_refused(jobs: Jobs) -> None:
    """SLURM has put it back itself before it says so by SIGTERM."""
    job = jobs.submit("exec RUN one 0")
    jobs.wait_for(job, "started 0 on 2")
    time.sleep(1)
    jobs.hosts.on_head("scontrol", "requeue", job)
    told = jobs.wait_for_end(job)
    assert (told["JobState"], told["Restarts"]) == ("COMPLETED", "1")
    assert "one requeue() True" in jobs.output()
    assert "Traceback" not in jobs.output()
    assert "one started 1 on 2" in jobs.output()


def test_of_an_array_one_task_is_started_again(jobs: Jobs) -> None:
    """The last one, whose number for itself is that of the array."""
    lines = "[ $SLURM_ARRAY_TASK_ID = 2 ] && AT=20; exec RUN task$SLURM_ARRAY_TASK_ID 0 $AT"
    job = jobs.submit(lines, "--array=1-2", "-n2")
    jobs.wait_for(job, "task2 started 1")
    jobs.wait_for(job, "task2 ended")
    # The other one has gone on meanwhile.
    assert jobs.told(f"{job}_1")["Restarts"] == "0"
    jobs.hosts.on_head("scancel", "--signal=USR1", f"{job}_1")
    jobs.wait_for(job, "task1 started 1")
    assert jobs.output().count("task1 started 0") == 1
    assert jobs.output().count("task2 started") == 2


def test_a_step_waits_until_others_have_saved(jobs: Jobs) -> None:
    """Of two trainings of a job, one saves for 5 s."""
    job = jobs.submit("RUN fast 0 20 & RUN slow 5 20 & wait")
    told = jobs.wait_for_end(job)
    said = jobs.output()
    assert (told["JobState"], told["Restarts"]) == ("COMPLETED", "1")
    assert "fast saved" in said
    assert "slow saved" in said
    assert said.count("fast started 1") == said.count("slow started 1") == 1
    assert said.index("slow saved") < said.index("started 1")
    assert "Traceback" not in said


def test_a_step_that_never_ends_is_not_waited_for_for_ever(jobs: Jobs) -> None:
    job = jobs.submit("srun --exact -N1 -n1 sleep 500 & RUN one 0 10; wait -n")
    jobs.wait_for(job, "one saved")
    jobs.wait_for(job, "one started 1")
    assert "one requeue() " in jobs.output()
    jobs.hosts.on_head("scancel", job)
