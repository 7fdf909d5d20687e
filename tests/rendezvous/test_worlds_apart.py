"""Launchers that would make several worlds of one job are refused, and what fits is let go on."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import mpirun
import pytest
from slurm_lab import Hosts, start_hosts

pytestmark = [pytest.mark.timeout(300), pytest.mark.once]

SCRIPT = """\
import os
import torch.distributed as dist
import mpiddp
{start}
print(f"world of {{dist.get_world_size()}}, rank {{dist.get_rank()}}", flush=True)
mpiddp.destroy_process_group()
"""
STARTS = {
    "ours": "mpiddp.init_process_group()",
    "by name": "dist.init_process_group('mpiddp')",
    "horovod": "import mpiddp.horovod as hvd; hvd.init()",
}
# What the start of the tests may have left.
CLEAN: dict[str, str | None] = dict.fromkeys(
    name for name in os.environ if name.startswith(("OMPI_COMM", "PMI", "SLURM_"))
)


def script(folder: Path, start: str = "ours") -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(start=STARTS[start]))
    return path


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("start", STARTS)
def test_torchrun_alone(tmp_path: Path, start: str) -> None:
    done = mpirun.run_torchrun(2, [script(tmp_path, start)], timeout=60, env=CLEAN)
    assert done.returncode != 0
    assert "world of" not in done.stdout
    assert "RuntimeError: torchrun, or a launcher that uses it such as accelerate" in done.stderr
    assert "mpirun -n 2 python SCRIPT" in done.stderr


@pytest.mark.thorough
def test_one_process_of_torchrun_is_a_world_of_one(tmp_path: Path) -> None:
    done = mpirun.run_torchrun(1, [script(tmp_path)], timeout=60, env=CLEAN)
    assert (done.returncode, done.stdout) == (0, "world of 1, rank 0\n")


@pytest.mark.thorough
def test_torchrun_below_mpirun(tmp_path: Path) -> None:
    inner = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = mpirun.run(2, [*inner, script(tmp_path)], timeout=90)
    assert done.returncode != 0
    assert "world of" not in done.stdout
    assert "RuntimeError: torchrun, or a launcher" in done.stderr


@pytest.mark.essential
def test_a_variable_of_one_rank_that_contradicts_mpi(tmp_path: Path) -> None:
    """All ranks raise: none waits for the one that has it."""
    code = (
        "import os, mpi4py.MPI as MPI\n"
        "if MPI.COMM_WORLD.rank == 1:\n"
        "    os.environ['{name}'] = '7'\n"
        "import mpiddp, torch.distributed as dist\n"
        "try:\n"
        "    mpiddp.init_process_group()\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "mpiddp.init_process_group(MPI.COMM_WORLD)\n"
        "assert dist.get_world_size() == 2\n"
        "mpiddp.destroy_process_group()\n"
    )
    for name in ("RANK", "WORLD_SIZE"):
        path = tmp_path / f"{name}.py"
        path.write_text(code.replace("{name}", name))
        done = mpirun.run(2, [path], timeout=60)
        print(done.stdout, done.stderr)
        assert done.returncode == 0
        said = f"{name}=7 in the environment, but MPI says that this process is rank 1 of 2"
        assert done.stdout.count(said) == 2


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with start_hosts(2) as hosts:
        yield hosts


@pytest.mark.slow
class TestSlurm:
    """By a real SLURM, on two nodes."""

    def test_torchrun_below_srun(self, hosts: Hosts) -> None:
        inner = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
        inner += ["--rdzv-endpoint=node1:29534", str(script(hosts.folder))]
        done = hosts.srun("-m", "torch.distributed.run", *inner, ranks=2, timeout=90)
        assert done.returncode != 0
        assert "world of" not in done.stdout
        assert done.stderr.count("RuntimeError: torchrun, or a launcher") >= 1

    def test_what_fits(self, hosts: Hosts) -> None:
        """Srun's ranks, also below a shell; mpirun's in an allocation, all or one of them."""
        path = str(script(hosts.folder))
        worlds = "".join(f"world of 2, rank {rank}\n" for rank in (0, 1))
        done = hosts.srun(path, ranks=2)
        assert (done.returncode, "".join(sorted(done.stdout.splitlines(True)))) == (0, worlds)
        here = Path(sys.executable)
        for command, said in (
            (f"{here.parent}/mpirun {here} {path}", worlds),
            (f"{here.parent}/mpirun -n 1 {here} {path}", "world of 1, rank 0\n"),
        ):
            allocation = ("salloc", "-N2", "-n2", f"--chdir={hosts.folder}", "bash", "-c", command)
            told = hosts.cluster("run", "head", *allocation, timeout=60)
            assert "".join(sorted(told.splitlines(True))) == said

    def test_what_an_outer_step_has_left(self, hosts: Hosts) -> None:
        """An srun within another's step, without the plugin: each process would be that rank."""
        inner = f"srun --overlap --mpi=none -n2 {sys.executable} {script(hosts.folder)}"
        outer = [sys.executable, "-c", f"import os; os.execvp('bash', ['bash', '-c', '{inner}'])"]
        done = hosts.srun(*outer[1:], ranks=1, nodes=1, options=["--cpus-per-task=2"])
        assert done.returncode != 0
        assert "world of" not in done.stdout
        assert "an outer one: MPI would take it for a rank there" in done.stderr
        # One that says that it is a single rank, which Open MPI does not read.
        program = f"PMI_SIZE=1 exec {sys.executable} {script(hosts.folder)}"
        options = ["srun", "--mpi=none", "-N1", "-n2", f"--chdir={hosts.folder}"]
        done = hosts.try_cluster("run", "head", *options, "bash", "-c", program, timeout=60)
        assert done.returncode != 0
        assert "world of" not in done.stdout
        assert hosts.mpi == "MPICH" or "although SLURM_STEP_NUM_TASKS=2" in done.stderr
