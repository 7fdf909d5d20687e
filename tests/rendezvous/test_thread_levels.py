"""Programs that initialise MPI themselves, with some thread level, and finalise it themselves."""

import os
import re
from pathlib import Path

import mpirun
import pytest

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.skipif("SLURM_STEP_ID" in os.environ, reason="for mpirun"),
]

SCRIPT = """
import sys
import mpi4py

mpi4py.rc.initialize = False
from mpi4py import MPI

MPI.Init_thread(getattr(MPI, "THREAD_" + sys.argv[1]))
import torch
import mpiddp

mpiddp.init_process_group()
world = MPI.COMM_WORLD
layer = torch.nn.Linear(2, 1)
model = mpiddp.DistributedDataParallel(layer)
for _ in range(5):
    model.zero_grad()
    model(torch.full((1, 2), 1.0 + world.rank)).sum().backward()
    assert layer.weight.grad.tolist() == [[(world.size + 1) / 2] * 2]
    assert world.allreduce(world.rank) == world.size * (world.size - 1) // 2
if "finalize first" in sys.argv:
    MPI.Finalize()
if "destroy" in sys.argv:
    mpiddp.destroy_process_group()
if "finalize" in sys.argv:
    MPI.Finalize()
print("done", flush=True)
"""

ENDS = [
    ("destroy",),
    ("finalize first",),
    ("finalize first", "destroy"),
    ("finalize",),
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("level", "thread", "needed"),
    [
        ("SINGLE", "1", "MULTIPLE"),
        ("SERIALIZED", "1", "MULTIPLE"),
        ("FUNNELED", "0", "SERIALIZED"),
        ("SERIALIZED", "0", ""),
        ("MULTIPLE", "1", ""),
    ],
)
def test_own_init_and_finalize(
    tmp_path: Path, ranks: int, level: str, thread: str, needed: str
) -> None:
    """Right gradients, or one sentence; and MPI may be finalised after destroy_process_group."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {"MPIDDP_PROGRESS_THREAD": thread}
    arguments = [tmp_path / "script.py", level, "destroy", "finalize"]
    done = mpirun.run(ranks, arguments, 60, environment)
    print(done.stdout, done.stderr)
    if needed:
        assert done.returncode != 0
        said = f"MPI was initialised with THREAD_{level}, but mpiddp needs THREAD_{needed}: let "
        assert said in done.stderr
        assert (" or set MPIDDP_PROGRESS_THREAD=0, " in done.stderr) == (needed == "MULTIPLE")
        # One sentence, and where the program has called mpiddp: no place in mpiddp.
        assert not re.search(rf"{re.escape(said)}.*\. ", done.stderr)
        assert "mpiddp.init_process_group()" in done.stderr
        assert not re.search(r'File ".*[\\/]mpiddp[\\/]', done.stderr)
    else:
        assert (done.returncode, done.stdout.count("done")) == (0, ranks)


def test_a_low_level_can_be_caught(tmp_path: Path) -> None:
    script = SCRIPT.replace(
        "mpiddp.init_process_group()",
        "try:\n    mpiddp.init_process_group()\n"
        "except RuntimeError as error:\n    print(f'caught {error}')\n    sys.exit()",
    )
    (tmp_path / "script.py").write_text(script + "\n")
    done = mpirun.run(2, [tmp_path / "script.py", "FUNNELED"], 60)
    print(done.stdout, done.stderr)
    assert done.stdout.count("caught MPI was initialised with THREAD_FUNNELED") == 2


@pytest.mark.parametrize("end", ENDS, ids=" and ".join)
def test_own_finalize(tmp_path: Path, end: tuple[str, ...]) -> None:
    """The program finalises MPI before or after destroy_process_group, or without it, or never."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = mpirun.run(2, [tmp_path / "script.py", "MULTIPLE", *end], 60)
    print(done.stdout, done.stderr)
    assert done.stdout.count("done") == 2
    nobody = end == ("destroy",)  # Open MPI takes that for a failure
    assert done.returncode == 0 or nobody
    assert "Traceback" not in done.stderr
