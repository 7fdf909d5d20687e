"""The table by which compiled code calls MPI: filled from the MPI that mpi4py uses."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mpirun
import pytest

from mpiddp.mpi import calls, library

# A tool as Score-P and mpiP are: it stands before MPI, notes a call and hands it on.
TOOL = """
#include <mpi.h>
#include <stdio.h>

int MPI_Iallreduce(const void *from, void *to, int count, MPI_Datatype type, MPI_Op op,
                   MPI_Comm comm, MPI_Request *request)
{
    fputs("seen\\n", stderr);
    return PMPI_Iallreduce(from, to, count, type, op, comm, request);
}
"""

REDUCING = """
import torch, mpiddp
mpiddp.init_process_group()
layer = torch.nn.Linear(2, 1)
model = mpiddp.DistributedDataParallel(layer)
model(torch.ones(1, 2)).sum().backward()
assert layer.weight.grad.tolist() == [[1.0, 1.0]]
"""


@pytest.fixture
def mpicc() -> str:
    found = shutil.which("mpicc", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("there is no mpicc beside this Python or on PATH")
    return found


def test_mpi_that_lacks_a_function(mpicc: str, tmp_path: Path) -> None:
    """Nothing of the table has changed then."""
    source = Path(__file__).parents[2] / "cython" / "mpi" / "binary_interface.c"
    # As for a wheel: linked to no MPI.
    compiled, interface = tmp_path / "calls.o", tmp_path / "calls.so"
    subprocess.run([mpicc, "-c", "-fPIC", source, "-o", compiled], check=True, timeout=60)
    subprocess.run(["cc", "-shared", compiled, "-o", interface], check=True, timeout=60)
    program = f"""
from mpiddp.mpi import calls, library
try:
    calls.fill({str(interface)!r}, "libm.so.6")
except ImportError as error:
    print(error)
print(library.linked_version().strip())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    first, version = done.stdout.split("\n", 1)
    assert first == "the MPI that libm.so.6 uses has no MPI_Initialized"
    assert version.strip("\n\0") == library.linked_version().strip("\n\0")


def test_file_that_fills_nothing() -> None:
    with pytest.raises(ImportError, match=r"libm\.so\.6 is no file of mpiddp"):
        calls.fill("libm.so.6", "libm.so.6")


def test_file_that_is_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "calls.so")
    with pytest.raises(ImportError, match="cannot open shared object file"):
        calls.fill(missing, "libm.so.6")
    with pytest.raises(ImportError, match="cannot open shared object file"):
        calls.load(missing)


def test_tool_that_stands_before_mpi(mpicc: str, tmp_path: Path) -> None:
    (tmp_path / "tool.c").write_text(TOOL)
    tool = tmp_path / "tool.so"
    compile_it = [mpicc, "-shared", "-fPIC", "-o", tool, tmp_path / "tool.c"]
    subprocess.run(compile_it, check=True, timeout=60)
    script = tmp_path / "reducing.py"
    script.write_text(REDUCING)
    environment = {"LD_PRELOAD": str(tool), "MPIDDP_TRANSPORT": "mpi"}
    done = mpirun.run(2, [script], timeout=80, env=environment)
    assert (done.returncode, done.stdout) == (0, "")
    assert set(done.stderr.split()) == {"seen"}
