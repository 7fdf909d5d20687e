"""One training at a time keeps snapshots under a name, and finds only its own there."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import patience
import pytest
import torch
from slurm_lab import SRUN, Hosts, start_hosts

from mpiddp import checkpoint

pytestmark = [pytest.mark.timeout(200), pytest.mark.once]

# Loads, says what it has found, makes a snapshot of its own and waits for a word.
TRAINING = """\
import sys
import torch
from mpiddp import checkpoint

folder, name, weight = sys.argv[1:4]
try:
    snapshots = checkpoint.Snapshots(name if name != "-" else None, share=1, folder=folder)
    found = snapshots.load()
    snapshots.step(lambda: {"weight": torch.tensor(float(weight))}, 1)
    snapshots.wait()
    print("found", found and found.state["weight"].item(), flush=True)
except RuntimeError as error:
    print("refused", error, flush=True)
sys.stdin.readline()
snapshots.close()
"""


class Training:
    """A process of a training, in a job of SLURM as far as it can see."""

    def __init__(self, folder: Path, name: str, weight: int, start: int = 0, env: str = "") -> None:
        script = folder / "train.py"
        script.write_text(TRAINING)
        variables = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(start), "SEED": env}
        self.process = subprocess.Popen(
            [sys.executable, script, folder / "shm", name, str(weight)],
            env={**os.environ, **variables, "LOCAL_RANK": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    def end(self) -> str:
        self.process.communicate("\n")
        return self.said


@pytest.mark.thorough
def test_each_program_of_a_job_has_its_own(tmp_path: Path) -> None:
    """Steps of one allocation, at once, and both again when the job is started again."""
    first, second = Training(tmp_path, "-", 1), Training(tmp_path, "-", 2)
    assert [first.end(), second.end()] == ["found None", "found None"]
    again = [Training(tmp_path, "-", weight, start=1) for weight in (2, 1)]
    assert [each.end() for each in again] == ["found 2.0", "found 1.0"]


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("name", ["-", "mine"])
def test_two_at_once_under_one_name(tmp_path: Path, name: str) -> None:
    first = Training(tmp_path, name, 1)
    second = Training(tmp_path, name, 1, env="another seed")
    said = second.end()
    assert said.startswith("refused"), said
    assert f"process {first.process.pid} on" in said
    assert "of SLURM's job 17" in said
    assert "Snapshots(name)" in said
    assert first.end() == "found None"
    if name == "mine":
        found = checkpoint.Snapshots(name, folder=tmp_path / "shm").load()
        assert found is not None
        assert torch.equal(found.state["weight"], torch.tensor(1.0))


@pytest.mark.thorough
def test_one_after_the_other_in_one_start_of_a_job(tmp_path: Path) -> None:
    """What differs in the environment alone is told by no name but the user's."""
    assert Training(tmp_path, "-", 1).end() == "found None"
    assert "has left its snapshots there" in Training(tmp_path, "-", 1, env="other").end()
    assert Training(tmp_path, "-", 1, start=1).end() == "found 1.0"
    assert Training(tmp_path, "mine", 3).end() == "found None"
    assert Training(tmp_path, "mine", 3).end() == "found 3.0"


def test_a_killed_one_leaves_its_name(tmp_path: Path) -> None:
    first = Training(tmp_path, "mine", 1)
    first.process.kill()
    first.process.communicate()
    assert Training(tmp_path, "mine", 1).end() == "found 1.0"


STEPS = """\
import os
import sys
import torch
import torch.distributed as dist
import mpiddp
from mpiddp import checkpoint, flight_recorder

mpiddp.init_process_group()
own = float(sys.argv[1])
snapshots = checkpoint.Snapshots(share=1.0)
found = snapshots.load()
weight = torch.tensor(own)
dist.all_reduce(weight)
if dist.get_rank() == 0:
    print(own, "found", found and found.state["weight"].item(), snapshots.root, flush=True)
print("dump", own, flight_recorder.dump(), flush=True)
snapshots.step(lambda: {"weight": weight}, 1)
snapshots.wait()
dist.barrier()
snapshots.clear() if "LAST" in os.environ else snapshots.close()
mpiddp.destroy_process_group()
"""
BATCH = """\
#!/bin/bash
run() {{ srun --mpi={plugin} --exact -N2 -n2 {python} steps.py "$@" & }}
run 1; run 2; wait
echo again; export SLURM_RESTART_COUNT=1 LAST=
run 2; run 1; wait
echo done
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with start_hosts(2) as hosts:
        yield hosts


@pytest.mark.slow
def test_steps_of_one_allocation(hosts: Hosts) -> None:
    plugin, variables = SRUN[hosts.mpi]
    hosts.env |= variables | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(hosts.folder)}
    hosts.env.pop("TORCH_FR_DUMP_TEMP_FILE", None)
    (hosts.folder / "steps.py").write_text(STEPS)
    batch = hosts.folder / "job.sbatch"
    batch.write_text(BATCH.format(plugin=plugin, python=sys.executable))
    log = hosts.folder / "job.out"
    hosts.on_head("sbatch", "-N2", "-n4", f"--output={log}", f"--chdir={hosts.folder}", str(batch))
    deadline = time.monotonic() + patience.enough(90)
    while not (log.exists() and log.read_text().endswith("done\n")):
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no output"
        time.sleep(0.5)
    lines = log.read_text().splitlines()
    print("\n".join(lines))
    before, after = lines[: lines.index("again")], lines[lines.index("again") :]
    found = [[line.split()[:3] for line in part if " found " in line] for part in (before, after)]
    assert sorted(found[0]) == [["1.0", "found", "None"], ["2.0", "found", "None"]]
    assert sorted(found[1]) == [["1.0", "found", "2.0"], ["2.0", "found", "4.0"]]
    dumps = [line.split()[2] for line in before if line.startswith("dump")]
    assert len(set(dumps)) == 4
