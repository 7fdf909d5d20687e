"""Jobs of several programs: which ranks train together, and a simulation beside a training."""

import json
import os
import re
import sys
from pathlib import Path

import mpirun
import pytest

from mpiddp.mpi.library import interface

EXAMPLES = Path(__file__).parents[2] / "examples"
# Only Open MPI's mpirun says how many ranks each program has.
TELLS = interface() == "openmpi"

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.skipif("SLURM_STEP_ID" in os.environ, reason="for mpirun"),
]

# Exchanges messages with the training by mpi4py, and never calls mpiddp.
SIMULATION = """
from mpi4py import MPI
world = MPI.COMM_WORLD
world.recv(source=world.size - 1)
"""

TRAINING = """
import json, os, sys
import torch
import torch.distributed as dist
import mpiddp
from mpi4py import MPI

world = MPI.COMM_WORLD
program = None
if "split" in sys.argv:
    program = world.Split(world.Get_attr(MPI.APPNUM))
if "--runner" in sys.argv:
    dist.init_process_group("gloo")
else:
    mpiddp.init_process_group(comm=program)
torch.manual_seed(dist.get_rank())
layer = torch.nn.Linear(2, 1)
model = mpiddp.DistributedDataParallel(layer)
model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
said = [world.rank, dist.get_rank(), dist.get_world_size(), layer.weight.grad.tolist()[0][0]]
variables = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
print(json.dumps([said, variables]), flush=True)
if world.rank == world.size - 1 and "alone" not in sys.argv:
    world.send("the end", 0)
mpiddp.destroy_process_group()
"""


def run(*programs: tuple[int, list[str]], **environment: str) -> tuple[int, str, str]:
    command = [mpirun.find()]
    for number, (ranks, arguments) in enumerate(programs):
        command += [":"] * (number > 0) + ["-n", str(ranks), sys.executable, *arguments]
    done = mpirun.run_command(command, 80, environment)
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def simulation(tmp_path: Path) -> list[str]:
    (tmp_path / "simulation.py").write_text(SIMULATION)
    return [str(tmp_path / "simulation.py")]


@pytest.fixture
def training(tmp_path: Path) -> list[str]:
    (tmp_path / "training.py").write_text(TRAINING)
    return [str(tmp_path / "training.py")]


def said(printed: str) -> list[list[object]]:
    return sorted(json.loads(line) for line in printed.splitlines() if line.startswith("[["))


OF_TWO = [[[1, 0, 2, 1.5], ["0", "2", "0"]], [[2, 1, 2, 1.5], ["1", "2", "1"]]]


class TestOfOwnProgram:
    def check(self, simulation: list[str], training: list[str]) -> None:
        code, printed, errors = run((1, simulation), (2, training), MPIDDP_PROGRAMS="own")
        if TELLS:
            assert (code, said(printed)) == (0, OF_TWO)
        else:
            assert code != 0
            assert "this launcher does not say which ranks are of which program" in errors
            assert "comm=MPI.COMM_WORLD.Split(MPI.COMM_WORLD.Get_attr(MPI.APPNUM))" in errors

    @pytest.mark.essential
    def test_by_init(self, simulation: list[str], training: list[str]) -> None:
        self.check(simulation, training)

    def test_by_the_runner(self, simulation: list[str], training: list[str]) -> None:
        self.check(simulation, ["-m", "mpiddp", *training, "--runner"])

    def test_of_the_first_program(self, training: list[str]) -> None:
        """Nobody else calls anything."""
        if not TELLS:
            pytest.skip("this launcher does not say which ranks are of which program")
        idle = ["-c", "from mpi4py import MPI"]
        code, printed, _ = run((2, [*training, "alone"]), (1, idle), MPIDDP_PROGRAMS="own")
        assert code == 0
        assert [row[0][:3] for row in said(printed)] == [[0, 0, 2], [1, 1, 2]]  # type: ignore[index]


def test_all_ranks(training: list[str]) -> None:
    """One training, of which some ranks have other options."""
    one, other = [*training, "alone"], [*training, "alone", "--other"]
    code, printed, _ = run((1, one), (2, other), MPIDDP_PROGRAMS="all")
    assert code == 0
    assert [row[0] for row in said(printed)] == [[rank, rank, 3, 2.0] for rank in range(3)]


@pytest.mark.parametrize("runner", [False, True], ids=["init", "runner"])
def test_not_said(simulation: list[str], training: list[str], runner: bool) -> None:
    """They ask at once, instead of a wait for ranks that never come."""
    arguments = ["-m", "mpiddp", *training, "--runner"] if runner else training
    code, _, errors = run((1, simulation), (2, arguments))
    assert code != 0
    if TELLS:
        assert "this job has 2 programs, of 1 and 2 ranks; this rank is of number 1" in errors
        assert "MPIDDP_PROGRAMS=own: those of this program" in errors
    else:
        assert "this rank is of program 1 of the job (MPI_APPNUM), so there are several" in errors
    assert "MPIDDP_PROGRAMS=all: all of them, as one training" in errors
    assert "comm=MPI.COMM_WORLD.Split(MPI.COMM_WORLD.Get_attr(MPI.APPNUM))" in errors


def test_communicator_that_is_passed(tmp_path: Path, training: list[str]) -> None:
    """On every MPI."""
    splitting = SIMULATION.replace(
        "world.recv", "world.Split(world.Get_attr(MPI.APPNUM))\nworld.recv"
    )
    (tmp_path / "splitting.py").write_text(splitting)
    code, printed, _ = run((1, [str(tmp_path / "splitting.py")]), (2, [*training, "split"]))
    assert (code, said(printed)) == (0, OF_TWO)


class TestExamples:
    def loss(self, printed: str, words: str) -> float:
        found = re.search(rf"^{words}: loss (\S+)$", printed, re.MULTILINE)
        assert found is not None
        return float(found[1])

    def test_solver_beside_a_training(self) -> None:
        solver, training = (str(EXAMPLES / name) for name in ("solver.py", "train_beside.py"))
        code, printed, _ = run((2, [solver]), (2, [training]))
        assert code == 0
        assert self.loss(printed, "2 ranks trained beside 2") < 1e-6

    def test_the_same_ranks_do_both(self) -> None:
        code, printed, _ = run((2, [str(EXAMPLES / "solve_and_train.py")]))
        assert code == 0
        assert self.loss(printed, "2 ranks solved and trained") < 1e-6
