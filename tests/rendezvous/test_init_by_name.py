"""torch.distributed.init_process_group("mpiddp"): ranks, size and store come from MPI.

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

# By name and before mpiddp, as PyTorch's tutorials import it.
PREAMBLE = """\
from torch.distributed import destroy_process_group, init_process_group
import os, socket, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP
import mpiddp

torch.set_num_threads(1)


def total(group=None):
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def refusal(*args, **kwargs):
    try:
        init_process_group(*args, **kwargs)
    except Exception as error:
        assert not dist.is_initialized()
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{args}, {kwargs} was accepted")


"""

# What a launcher may have left in the environment of the tests.
LAUNCHED = ("OMPI_", "PMI_", "PMI2_", "PMIX_", "MV2_", "SLURM_", "MPIDDP_", "MASTER_")


def write(folder: Path, source: str) -> Path:
    script = folder / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(source))
    return script


def start(folder: Path, source: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script in one process, without mpirun."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
    done = subprocess.run(
        [sys.executable, write(folder, source)],
        env={**clean, "OMP_NUM_THREADS": "1", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    print(done.stdout, done.stderr)  # pytest shows it when the test fails
    return done


@pytest.mark.thorough
@pytest.mark.smoke
def test_each_way_to_ask(tmp_path: Path) -> None:
    source = """
    init_process_group("mpiddp")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (size, dist.get_backend()) == (2, "mpiddp")
    assert (os.environ["RANK"], os.environ["LOCAL_WORLD_SIZE"]) == (str(rank), "2")
    assert mpiddp.get_topology().rank == rank
    # The class of torch and ours, and groups beside it.
    for kind in (TorchDDP, mpiddp.DistributedDataParallel):
        wrapped = kind(torch.nn.Linear(2, 1, bias=False))
        wrapped(torch.full((1, 2), float(rank))).sum().backward()
        assert wrapped.module.weight.grad.tolist() == [[0.5, 0.5]]
    assert total(dist.new_group(backend="gloo")) == 2
    assert total(dist.new_group([0, 1])) == 2
    # Wrappers are freed before their group, as in a function of a script that has returned.
    del wrapped
    destroy_process_group()

    # An address that no rank could reach: MPI needs none.
    os.environ.update(MASTER_ADDR="192.0.2.1", MASTER_PORT="1")
    store = dist.FileStore(f"{__file__}.store", 2)
    for call in [
        dict(backend="MPIDDP", timeout=timedelta(seconds=40)),
        dict(backend="cpu:mpiddp", init_method="env://"),
        dict(backend="mpiddp", init_method=f"env://?rank={rank}&world_size=2"),
        dict(backend="mpiddp", rank=rank),
        dict(backend="mpiddp", rank=rank, world_size=2, init_method="env://"),
        dict(backend="mpiddp", init_method="tcp://192.0.2.1:1"),
        dict(backend="mpiddp", init_method=f"tcp://[2001:db8::1]:1?rank={rank}&world_size=2"),
        dict(backend="mpiddp", init_method=f"file://{__file__}.found"),
        dict(backend="mpiddp", init_method=f"file://{__file__}.url?rank={rank}&world_size=2"),
        dict(backend="mpiddp", store=store),
    ]:
        dist.init_process_group(**call)
        assert (dist.get_rank(), dist.get_world_size(), total()) == (rank, 2, 2)
        if "timeout" in call:
            assert dist.group.WORLD.timeout == call["timeout"]
        if "store" in call:
            dist.group.WORLD.get_group_store().set("who", "us")
            assert any(b"who" in line for line in open(f"{__file__}.store", "rb"))
        # Torch's own words for what was never allowed.
        for wrong in (dict(), dict(store=store, init_method="env://", rank=0, world_size=2)):
            try:
                init_process_group("mpiddp", **wrong)
            except ValueError as error:
                assert "twice" in str(error)
            else:
                raise AssertionError("began twice")
        dist.destroy_process_group()
    assert "both init_method and store" in refusal("mpiddp", store=store, init_method="env://")

    # With an address that ranks could reach, nobody listens there: whoever connects is asked for
    # no proof.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ports = [None, None]
    dist.init_process_group("mpiddp", init_method=f"tcp://127.0.0.1:{port}")
    dist.all_gather_object(ports, port)
    store = dist.group.WORLD.get_group_store()
    store.set(str(rank), b"there")
    assert store.get(str(1 - rank)) == b"there"
    assert total(dist.new_group(backend="gloo")) == 2
    try:
        socket.create_connection(("127.0.0.1", ports[0]), 1).close()
    except ConnectionRefusedError:
        pass
    else:
        raise AssertionError("rank 0 listens there")
    dist.destroy_process_group()

    # What contradicts MPI on one rank is refused on all, and a right call begins after it.
    mine = f"MPI says that this process is rank {rank} of 2"
    told = refusal("mpiddp", rank=1 - rank)
    assert told.startswith(f"ValueError: rank={1 - rank}, but {mine}"), told
    told = refusal("mpiddp", world_size=7 if rank == 1 else -1)
    assert told.startswith("ValueError: ") and "world_size=7, but MPI says" in told, told
    assert ("rank 1: world_size=7" in told) == (rank == 0), told
    told = refusal("mpiddp", init_method=f"tcp://localhost:1?rank={rank}&world_size=3")
    assert f"world_size=3 in init_method, but {mine}" in told, told
    assert "TypeError" in refusal("mpiddp", timeout=3)

    init_process_group("mpiddp")
    mpiddp.destroy_process_group()
    mpiddp.init_process_group()
    assert total() == 2
    print("all well")
    """
    # With the parts of Open MPI that it takes by itself, as its users have it.
    env = {"GLOO_SOCKET_IFNAME": "lo", "OMPI_MCA_btl": None}
    done = mpirun.run(2, [write(tmp_path, source)], timeout=80, env=env)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.count("all well") == 2


@pytest.mark.thorough
def test_exception_ends_the_job(tmp_path: Path) -> None:
    done = mpirun.run(
        2,
        [
            write(
                tmp_path,
                """
                init_process_group("mpiddp")
                if dist.get_rank() == 1:
                    raise ValueError("broken on purpose")
                dist.barrier()
                print("still here")
                """,
            )
        ],
        timeout=60,
    )
    assert done.returncode != 0
    assert done.stderr.count("[rank1]: ValueError: broken on purpose") == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "still here" not in done.stdout


@pytest.mark.thorough
@pytest.mark.once
def test_world_of_one_and_other_backends(tmp_path: Path) -> None:
    done = start(
        tmp_path,
        """
        # Calls for other backends are torch's alone.
        assert "environment variable" in refusal("gloo")
        init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert (dist.get_backend(), total()) == ("gloo", 1)
        try:
            dist.new_group(backend="mpiddp")
        except RuntimeError as error:
            assert "needs a world of mpiddp" in str(error)
        else:
            raise AssertionError("a group without its world")
        destroy_process_group()

        init_process_group("mpiddp")
        assert (dist.get_rank(), dist.get_world_size(), total()) == (0, 1, 1)
        destroy_process_group()

        # What torchrun tells its processes, none of which is in an MPI world.
        os.environ.update(RANK="1", WORLD_SIZE="4")
        told = refusal("mpiddp")
        assert "RANK=1 in the environment, but MPI says" in told, told
        assert "rank 0 of 1. Start with mpirun or srun" in told, told
        os.environ["RANK"] = "0"
        assert "WORLD_SIZE=4 in the environment, but" in refusal("mpiddp", init_method="env://")
        init_process_group("mpiddp", store=dist.HashStore())
        print("all well")
        """,
        env={},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "all well\n"
