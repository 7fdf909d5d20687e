"""Processes that a rank starts, and that begin a world of torch's: refused, or said, in a sentence.

Each test starts a job of its own.
"""

import re
from pathlib import Path

import pytest
from script_runs import free_port, launch, objects_in, start

pytestmark = [pytest.mark.timeout(100), pytest.mark.once]

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"
STARTS = SCRIPTS / "starts_processes.py"

BEGIN = r"init_process_group was called in process \d+, which rank {} \(process \d+\) of python -m "
OF_RANK = [BEGIN.format(rank) + "mpiddp has started" for rank in (0, 1)]
# The first rank that fails ends the job: the other may say nothing.
OF_ONE = BEGIN.format("[01]") + "mpiddp has started"


@pytest.mark.essential
@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_ranks_at_the_job_s_own_port(how: str) -> None:
    """The script takes MASTER_PORT as it is: two worlds of two would meet there."""
    done = launch(STARTS, how, "world")
    assert done.returncode == 1
    assert re.search(f"RuntimeError: {OF_ONE}, with that rank's own MASTER_ADDR", done.stderr)
    assert not objects_in(done.stdout)


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_ranks_at_a_port_of_the_script(tmp_path: Path, how: str) -> None:
    """Each rank starts all of them: one of the two worlds begins at most."""
    port = str(free_port())
    done = launch(STARTS, how, "world", port, env={"STARTS_PROCESSES": str(tmp_path)})
    assert done.returncode == 1
    refused = [
        rank
        for rank, whose in enumerate(OF_RANK)
        if re.search(
            f"RuntimeError: {whose}, and processes of rank {1 - rank} meet at the same place, "
            rf"127\.0\.0\.1:{port}: each rank of MPI runs the script",
            done.stderr,
        )
    ]
    assert refused
    assert {int(one["started by"]) for one in objects_in(done.stdout)} <= {0, 1} - set(refused)


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_worlds_of_their_own(how: str) -> None:
    """A rank may have such helpers; rank 0 of each says that mpiddp has no part in it."""
    done = launch(STARTS, how, "own")
    assert done.returncode == 0
    found = objects_in(done.stdout)
    assert [one["total"] for one in found] == [2.0] * 4
    assert {one["backend"] for one in found} == {"gloo"}
    for whose in OF_RANK:
        said = rf"^mpiddp: {whose}: its world is torch's, on gloo, and mpiddp has no part in it$"
        assert len(re.findall(said, done.stderr, re.M)) == 1


@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_process_that_begins_no_world(how: str) -> None:
    done = launch(STARTS, how, "logger")
    assert done.returncode == 0
    assert len(objects_in(done.stdout)) == 4
    assert [line for line in done.stderr.splitlines() if line.startswith("mpiddp:")] == [
        line for line in done.stderr.splitlines() if line.startswith("mpiddp: 2 ranks, replaced:")
    ]


def test_without_the_check() -> None:
    """What --keep-spawn asks for, a world of one rank, and a world of the script's own launcher."""
    done = launch("--keep-spawn", STARTS, "spawn", "world", ranks=1)
    assert done.returncode == 0
    assert [one["total"] for one in objects_in(done.stdout)] == [2.0] * 2


def test_one_rank() -> None:
    """There is one world, at the port that it finds: it runs, and says what it is."""
    done = launch(STARTS, "fork", "world", ranks=1)
    assert done.returncode == 0
    assert [one["total"] for one in objects_in(done.stdout)] == [2.0] * 2
    assert "its world is torch's, on gloo" in done.stderr


LATE = """
import multiprocessing, os, sys

def work(rank):
    from torch.distributed import init_process_group
    init_process_group("gloo", rank=rank, world_size=2)

if __name__ == "__main__":
    both = [multiprocessing.get_context("spawn").Process(target=work, args=(n,)) for n in (0, 1)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    sys.exit(any(one.exitcode for one in both))
"""


def test_a_process_that_imports_torch_late(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LATE)
    done = launch(script)
    assert done.returncode == 1
    assert re.search(f"RuntimeError: {OF_ONE}, with that rank's own MASTER_ADDR", done.stderr)


def test_accelerate_launch(tmp_path: Path) -> None:
    """It starts the script by subprocess, with the rank's variables."""
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    script.write_text("print('trains')")
    done = launch("-m", "accelerate.commands.launch", "--cpu", script)
    assert done.returncode == 1
    said = r"RuntimeError: rank [01]: accelerate starts '\S*python\S* \S*script.py' as a process"
    assert re.search(said, done.stderr)
    assert "trains" not in done.stdout


STARTS_PYTHON = """
import os, subprocess, sys
env = {**os.environ, "MASTER_PORT": "1"} if "elsewhere" in sys.argv else None
subprocess.run(["true"])
subprocess.run([sys.executable, "-c", "pass"], check=True, env=env)
if "begins" in sys.argv:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("words", "lines"), [((), 1), (("begins",), 0), (("elsewhere",), 0)], ids=str
)
def test_a_program_of_python(tmp_path: Path, words: tuple[str, ...], lines: int) -> None:
    """Where the ranks began no world it may be what trained."""
    script = tmp_path / "script.py"
    script.write_text(STARTS_PYTHON)
    done = launch(script, *words)
    assert done.returncode == 0
    said = "mpiddp: the 2 ranks of MPI have begun no world of torch.distributed, and rank 0 has"
    assert done.stderr.count(said) == lines


FORKS = """
import multiprocessing, os, sys, mpiddp
def work():
    try:
        mpiddp.init_process_group()
    except RuntimeError as error:
        print("refused:", error, flush=True)
one = multiprocessing.get_context("fork").Process(target=work)
one.start()
one.join()
child = os.fork()
if child == 0:
    sys.exit(3)  # as the interpreter ends, which must not wait in MPI_Finalize
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""


def test_a_forked_process_that_asks_for_mpi() -> None:
    done = launch("-c", FORKS)
    assert done.returncode == 0
    said = "refused: init_process_group was called in a process that was forked from rank {} of 2"
    for rank in (0, 1):
        assert said.format(rank) in done.stdout


def test_torch_alone_is_left_alone() -> None:
    """An import of torch imports nothing of mpiddp: other programs use the environment as well."""
    code = (
        "import sys, torch.distributed as d; print(d.init_process_group.__module__, "
        "*(name for name in sys.modules if name.startswith('mpiddp')))"
    )
    done = start("-c", code)
    assert done.returncode == 0
    assert done.stdout == "torch.distributed.distributed_c10d\n"
