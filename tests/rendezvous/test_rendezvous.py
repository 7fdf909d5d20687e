"""From MPI's world to torch.distributed's and back: start, topology, variables, end.

Each test starts processes of its own, since a process can initialise MPI only once.
"""

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import mpirun
import pytest

pytestmark = pytest.mark.timeout(100)

# What a launcher or a scheduler may have left in the environment of the tests.
LAUNCHED = ("OMPI_", "PMI_", "PMI2_", "PMIX_", "MV2_", "SLURM_", "MPIDDP_")

PREAMBLE = """\
import os, sys, time
import torch
import torch.distributed as dist
import mpiddp
from mpiddp import DistributedDataParallel as DDP

torch.set_num_threads(1)


NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"
)


def variables():
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def train():
    wrapped = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    for _ in range(2):
        wrapped(torch.ones(2, 4)).sum().backward()


def total(group=None):
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


"""


def write(folder: Path, source: str) -> Path:
    script = folder / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(source))
    return script


def launch(
    folder: Path, source: str, ranks: int = 2, env: Mapping[str, str | None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script with mpirun."""
    done = mpirun.run(ranks, [write(folder, source)], timeout=60, env=env)
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    return done


def start(
    folder: Path, source: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script in one process, without mpirun."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
    done = subprocess.run(
        [sys.executable, write(folder, source)],
        env={**clean, "OMP_NUM_THREADS": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    print(done.stdout, done.stderr)
    return done


def assert_clean(done: subprocess.CompletedProcess[str], says: str = "", ranks: int = 1) -> None:
    """Assert that the script ended well, without a word on stderr, and said something a rank."""
    assert done.returncode == 0
    assert done.stderr == ""
    if says:
        assert done.stdout.count(says) == ranks


def test_import_does_not_initialise_mpi(tmp_path: Path) -> None:
    done = start(
        tmp_path,
        """
        import mpiddp.reducer.bucket
        import mpiddp.reducer.assignment
        import mpiddp.ddp.wrapper
        import mpiddp.engine.engine
        import mpiddp.mpi.errors
        import mpiddp.transports.messages
        import mpiddp.mpi.library
        import mpiddp.mpi.compatibility
        import mpiddp.ddp.logger
        import mpiddp.reducer.reducer
        import mpiddp.rendezvous.world
        import mpiddp.reducer.model_check

        assert "mpi4py.MPI" not in sys.modules
        assert mpiddp.compiled_against()[0] in mpiddp.mpi.library.linked_version()
        assert "mpi4py.MPI" not in sys.modules

        import mpi4py
        mpi4py.rc.initialize = False
        from mpi4py import MPI
        assert not MPI.Is_initialized()
        print("not initialised")
        """,
    )
    assert_clean(done, "not initialised")


@pytest.mark.smoke
@pytest.mark.thorough
@pytest.mark.once
def test_world_of_one_without_mpirun(tmp_path: Path) -> None:
    done = start(
        tmp_path,
        """
        mpiddp.init_process_group()
        assert mpiddp.get_topology() == mpiddp.Topology(0, 1, 0, 1, 0, 1)
        assert variables() == dict(zip(NAMES, "010101", strict=True))
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "mpiddp")
        assert total() == 1
        train()
        mpiddp.destroy_process_group()
        assert variables() == {}
        mpiddp.init_process_group()
        train()
        print("trained twice")
        """,
    )
    assert_clean(done, "trained twice")


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_topology_variables_and_communicators(tmp_path: Path, ranks: int) -> None:
    done = launch(
        tmp_path,
        """
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        assert variables() == {}

        # The world. All ranks are on this machine.
        mpiddp.init_process_group()
        rank, size = world.rank, world.size
        assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
        topology = mpiddp.get_topology()
        assert topology == mpiddp.Topology(
            rank=rank, world_size=size, local_rank=rank, local_world_size=size, node_rank=0,
            node_count=1,
        )
        expected = dict(zip(NAMES, map(str, (rank, size, rank, size, 0, 1)), strict=True))
        assert variables() == expected
        assert topology.as_environment() == expected
        assert total() == size
        train()
        mpiddp.destroy_process_group()
        assert variables() == {}
        assert not dist.is_initialized()
        for call in (mpiddp.destroy_process_group, mpiddp.get_topology):
            try:
                call()
            except RuntimeError as error:
                assert "init_process_group" in str(error)
            else:
                raise AssertionError(f"{call} after destroy_process_group")

        # Again, with variables that the user has set: they stay.
        os.environ.update(LOCAL_RANK="77", GROUP_RANK="88")
        mpiddp.init_process_group()
        assert (os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"]) == ("77", "88")
        assert os.environ["RANK"] == str(rank)
        assert dist.get_world_size() == size
        mpiddp.destroy_process_group()
        assert variables() == {"LOCAL_RANK": "77", "GROUP_RANK": "88"}
        del os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"]

        # A world for each rank.
        mpiddp.init_process_group(MPI.COMM_SELF)
        assert (dist.get_rank(), dist.get_world_size(), total()) == (0, 1, 1)
        train()
        mpiddp.destroy_process_group()

        # Two worlds beside each other, with the ranks the other way round.
        part = world.Split(color=rank % 2, key=-rank)
        mpiddp.init_process_group(comm=part)
        assert (dist.get_rank(), dist.get_world_size()) == (part.rank, part.size)
        assert os.environ["RANK"] == str(part.rank)
        assert os.environ["LOCAL_WORLD_SIZE"] == str(part.size)
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor)
        assert tensor.item() == sum(range(rank % 2, size, 2))
        dist.broadcast(tensor.fill_(rank), src=0)
        assert tensor.item() == (size - 1 if (size - 1 - rank) % 2 == 0 else size - 2)
        everyone = [None] * part.size
        dist.all_gather_object(everyone, rank, group=dist.new_group(backend="gloo"))
        assert everyone == sorted(range(rank % 2, size, 2), reverse=True)
        train()
        mpiddp.destroy_process_group()

        # The user's communicators are as they were.
        assert part.allreduce(1) == part.size
        part.Free()
        assert world.allreduce(1) == size
        print("all well")
        """,
        ranks,
        env={"GLOO_SOCKET_IFNAME": "lo"},
    )
    assert_clean(done, "all well", ranks)


ENDINGS = {
    "without a word": "",
    "by torch": "dist.destroy_process_group()",
    "by us": "mpiddp.destroy_process_group()",
    "by torch and by us": "dist.destroy_process_group(); mpiddp.destroy_process_group()",
}


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=1)
@pytest.mark.once
@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(code, id=name, marks=[pytest.mark.slow] * (name == "by torch and by us"))
        for name, code in ENDINGS.items()
    ],
)
def test_end(tmp_path: Path, ending: str) -> None:
    done = launch(
        tmp_path,
        f"""
        import warnings
        warnings.simplefilter("error")
        # Of a world that is not destroyed, see test_left_open.py.
        warnings.filterwarnings({"ignore" if ending == "" else "error"!r}, category=ResourceWarning)
        mpiddp.init_process_group()
        wrapped = DDP(torch.nn.Linear(4, 4))
        wrapped(torch.ones(2, 4)).sum().backward()
        half = dist.new_group([1])
        other = dist.new_group(backend="gloo")
        assert total() == 2
        print("trained", flush=True)
        {ending}
        """,
        env={"GLOO_SOCKET_IFNAME": "lo"},
    )
    assert_clean(done, "trained", 2)


@pytest.mark.essential
@pytest.mark.thorough
def test_begin_again_after_torchs_own_end(tmp_path: Path) -> None:
    """Scripts written for torch end with torch's function; ours must then begin afresh."""
    done = launch(
        tmp_path,
        """
        for _ in range(3):
            mpiddp.init_process_group()
            train()
            dist.destroy_process_group()
        mpiddp.init_process_group()
        assert total() == 2
        if dist.get_rank() == 1:
            raise ValueError("broken on purpose")
        dist.barrier()
        print("still here")
        """,
    )
    assert done.returncode != 0
    assert "RecursionError" not in done.stderr
    assert done.stderr.count("ValueError: broken on purpose") == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "still here" not in done.stdout


@pytest.mark.thorough
@pytest.mark.once
@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("", id="exit"),
        pytest.param("mpiddp.destroy_process_group()", id="destroy", marks=pytest.mark.slow),
    ],
)
def test_mpi4py_told_not_to_initialise(tmp_path: Path, ending: str) -> None:
    done = launch(
        tmp_path,
        f"""
        import mpi4py
        mpi4py.rc.initialize = False
        mpiddp.init_process_group()
        train()
        assert total() == 2
        print("trained", flush=True)
        {ending}
        """,
    )
    assert_clean(done, "trained", 2)


class TestThreadLevel:
    SERIALIZED = """
        import mpi4py
        mpi4py.rc.thread_level = "serialized"
    """

    @pytest.mark.thorough
    def test_below_multiple_is_refused(self, tmp_path: Path) -> None:
        done = start(tmp_path, self.SERIALIZED + "    mpiddp.init_process_group()\n")
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith("RuntimeError: MPI was initialised with THREAD_SERIALIZED")
        assert "THREAD_MULTIPLE" in last
        assert "MPIDDP_PROGRESS_THREAD=0" in last

    @pytest.mark.thorough
    def test_is_enough_without_the_thread(self, tmp_path: Path) -> None:
        done = launch(
            tmp_path,
            self.SERIALIZED
            + """
        mpiddp.init_process_group()
        train()
        assert total() == 2
        assert not dist.group.WORLD.engine.has_thread
        print("trained")
        """,
            env={"MPIDDP_PROGRESS_THREAD": "0"},
        )
        assert_clean(done, "trained", 2)

    @pytest.mark.thorough
    def test_funneled_is_never_enough(self, tmp_path: Path) -> None:
        done = start(
            tmp_path,
            """
            import mpi4py
            mpi4py.rc.thread_level = "funneled"
            mpiddp.init_process_group()
            """,
            env={"MPIDDP_PROGRESS_THREAD": "0"},
        )
        assert done.returncode == 1
        assert "THREAD_FUNNELED, but mpiddp needs THREAD_SERIALIZED" in done.stderr


class TestWrongLauncher:
    """Every process believes that it is alone, although a launcher started several."""

    @pytest.mark.essential(keep=1)
    @pytest.mark.thorough(keep=1)
    @pytest.mark.parametrize(
        "variables",
        [
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
            {"PMI_SIZE": "4", "PMI_RANK": "1"},
        ],
        ids=["mpirun of Open MPI", "mpirun of MPICH"],
    )
    def test_is_refused(self, tmp_path: Path, variables: dict[str, str]) -> None:
        done = start(tmp_path, "mpiddp.init_process_group()\n", env=variables)
        assert done.returncode == 1
        assert done.stderr.count("Traceback") == 1
        last = done.stderr.splitlines()[-1]
        name = next(iter(variables))
        assert last.startswith(f"RuntimeError: this process is rank 0 of 1, although {name}=4")
        # How to mend it: the right launcher, or say that it is meant.
        assert str(Path(sys.executable)) in last
        assert "srun --mpi=pmix" in last
        assert "srun --mpi=pmi2" in last
        assert "comm=MPI.COMM_SELF" in last

    @pytest.mark.thorough
    def test_variables(self, tmp_path: Path) -> None:
        done = start(
            tmp_path,
            """
            from mpi4py import MPI

            def begins(comm=None, **variables):
                os.environ.update(variables)
                try:
                    mpiddp.init_process_group(comm)
                    mpiddp.destroy_process_group()
                    return True
                except RuntimeError as error:
                    assert all(f"{name}={value}" in str(error) for name, value in variables.items())
                    assert not dist.is_initialized()
                    assert "RANK" not in os.environ
                    return False
                finally:
                    for name in variables:
                        del os.environ[name]

            for name in (
                "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS",
                "SLURM_STEP_NUM_TASKS", "SUBMITIT_LOCAL_NTASKS",
            ):
                assert not begins(**{name: "2"}), name
                assert begins(**{name: "1"}), name
                assert begins(MPI.COMM_SELF, **{name: "2"}), name
            # mpirun -n 1 inside of a larger allocation, and what is no number.
            assert begins(OMPI_COMM_WORLD_SIZE="1", SLURM_NTASKS="8")
            assert begins(SLURM_NTASKS="many")
            print("all tried")
            """,
        )
        assert_clean(done, "all tried")

    @pytest.mark.thorough
    def test_right_launcher_in_a_larger_allocation(self, tmp_path: Path) -> None:
        done = launch(
            tmp_path,
            "mpiddp.init_process_group()\nprint('began')\n",
            ranks=1,
            env={"SLURM_NTASKS": "8"},
        )
        assert_clean(done, "began")


@pytest.mark.thorough
def test_finalised_mpi_is_refused(tmp_path: Path) -> None:
    done = start(
        tmp_path,
        """
        from mpi4py import MPI
        MPI.Finalize()
        mpiddp.init_process_group()
        """,
    )
    assert done.returncode == 1
    assert "RuntimeError: MPI has been finalised" in done.stderr.splitlines()[-1]


@pytest.mark.thorough
def test_without_tcp_between_the_ranks(tmp_path: Path) -> None:
    """Only groups of other backends need a store."""
    done = launch(
        tmp_path,
        """
        import socket
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 1:
            def refuse(*args, **kwargs):
                raise OSError("no route to host")
            socket.create_connection = refuse
        mpiddp.init_process_group()
        train()
        assert total(dist.new_group([0, 1])) == 2
        if dist.get_rank() == 1:
            try:
                dist.new_group([1], backend="gloo", use_local_synchronization=True)
            except ConnectionError as error:
                assert "rank 1 does not reach" in str(error), error
        mpiddp.destroy_process_group()
        print("trained")
        """,
    )
    assert_clean(done, "trained", 2)
