"""Two jobs in one folder are told; and what cannot be removed there does not stop a save."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import patience
import pytest
import torch
import torch.distributed as dist
from replicas import RANK, SIZE, together
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mpiddp import checkpoint
from mpiddp.checkpoint.writer_lock import only_writer

pytestmark = pytest.mark.mpi


def names(root: Path) -> list[str]:
    return sorted(each.name for each in root.iterdir())


HOLD = """
import sys
from pathlib import Path
from mpiddp.checkpoint.writer_lock import only_writer
with only_writer(Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(mpi_tmp_path):
    """The process of another job, which saves into the folder until it is killed."""
    process = None
    if RANK == 0:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, mpi_tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
    dist.barrier()
    yield process
    if process is not None:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def plain():
    return {"a": 1}


def sharded():
    mesh = init_device_mesh("cpu", (SIZE,))
    return {"a": distribute_tensor(torch.ones(4 * SIZE), mesh, [Shard(0)])}


@pytest.mark.thorough(keep=1)
@pytest.mark.essential(keep=1)
@pytest.mark.parametrize("state", [plain, sharded])
@pytest.mark.parametrize("call", ["save", "async_save"])
def test_another_job(mpi_tmp_path, other, state, call):
    """All ranks are told who it is, and what it has half-written stays until it has ended."""
    half = mpi_tmp_path / ".000001-step-9.writing"
    if RANK == 0:
        half.mkdir()
    dist.barrier()
    raised = None
    try:
        saved = getattr(checkpoint, call)(state(), mpi_tmp_path, step=1)
        if call == "async_save":
            saved.result()
    except (BlockingIOError, RuntimeError) as error:
        raised = error
    with together():
        if RANK == 0:
            assert isinstance(raised, BlockingIOError)
            assert f"process {other.pid} on {os.uname().nodename}" in str(raised)
            assert "Two jobs need a folder each" in str(raised)
        elif call == "save" or state is sharded:
            assert "rank 0: BlockingIOError: process" in str(raised)
        assert names(mpi_tmp_path) == [half.name, ".lock"]
    dist.barrier()
    if RANK == 0:
        other.kill()
        other.wait()
    dist.barrier()
    if call == "async_save":
        with together(), pytest.raises(RuntimeError, match="the last asynchronous save has"):
            checkpoint.save(state(), mpi_tmp_path, step=1)
    checkpoint.save(state(), mpi_tmp_path, step=2)
    dist.barrier()
    with together():
        assert names(mpi_tmp_path) == ["000001-step-2"]


def test_a_process_forked_meanwhile(tmp_path):
    """It has the file open, and does not hold the lock."""
    reading, writing = os.pipe()
    with only_writer(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    try:
        with only_writer(tmp_path):
            pass
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
    assert names(tmp_path) == []


@pytest.mark.thorough
def test_one_after_the_other(tmp_path):
    """Many writers at once: each holds the lock alone, or is told."""
    code = """
    import random, sys, time
    from pathlib import Path
    from mpiddp.checkpoint.writer_lock import only_writer
    root, held, told = Path(sys.argv[1]), 0, 0
    end = time.monotonic() + 60
    while held < 30 and time.monotonic() < end:
        try:
            with only_writer(root):
                (root / "alone").mkdir()
                (root / "alone").rmdir()
                held += 1
        except BlockingIOError:
            told += 1
            time.sleep(random.random() / 1000)
    print(held)
    """
    if RANK:
        return
    command = [sys.executable, "-c", textwrap.dedent(code), tmp_path]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=patience.enough(100))[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert said == ["30\n"] * 3
    assert names(tmp_path) == []


def test_checkpoints_of_another_job(mpi_tmp_path):
    """The second job has come between two saves of this one."""
    checkpoint.save({"a": 1}, mpi_tmp_path, step=1)
    if RANK == 0:
        code = "import sys; from mpiddp import checkpoint; "
        code += "checkpoint.save({'a': 2}, sys.argv[1], step=50)"
        lone = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI"))}
        subprocess.run([sys.executable, "-c", code, mpi_tmp_path], check=True, env=lone)
        with pytest.warns(RuntimeWarning, match=r"000002-step-50 was not saved by this process"):
            checkpoint.save({"a": 1}, mpi_tmp_path, step=2)
    else:
        checkpoint.save({"a": 1}, mpi_tmp_path, step=2)
    checkpoint.save({"a": 1}, mpi_tmp_path, step=3)
    with together():
        assert names(mpi_tmp_path) == ["000002-step-50", "000003-step-2", "000004-step-3"]


@pytest.mark.essential
@pytest.mark.parametrize("kind", ["link", "broken link", "file"])
def test_an_old_one_that_is_no_folder(mpi_tmp_path, kind):
    """Such as one moved to a larger disk: the link goes, and what it leads to stays."""
    root, elsewhere = mpi_tmp_path / "all", mpi_tmp_path / "elsewhere"
    for step in (1, 2):
        checkpoint.save({"a": step}, root, step=step, keep=2)
    if RANK == 0:
        old = root / "000001-step-1"
        old.rename(elsewhere)
        if kind == "file":
            old.touch()
        else:
            old.symlink_to(elsewhere if kind == "link" else mpi_tmp_path / "nowhere")
    for step in (3, 4):
        checkpoint.save({"a": step}, root, step=step, keep=2)
    with together():
        assert names(root) == ["000003-step-3", "000004-step-4"]
        assert names(elsewhere) == ["SHA256SUMS", "state.pt"]


def test_links_in_place_of_what_is_left_over(mpi_tmp_path):
    if RANK == 0:
        (mpi_tmp_path / "elsewhere").mkdir()
        for name in (".000001-step-1.writing", ".000002-step-2.removing"):
            (mpi_tmp_path / name).symlink_to(mpi_tmp_path / "elsewhere")
    dist.barrier()
    checkpoint.save({"a": 1}, mpi_tmp_path, step=3)
    with together():
        assert names(mpi_tmp_path) == ["000001-step-3", "elsewhere"]


AS_NOBODY = """
import os, sys, tempfile, warnings
from pathlib import Path
from mpiddp import checkpoint
with tempfile.TemporaryDirectory() as folder:
    # What torch imports late may lie where nobody else may read.
    checkpoint.save({"a": 1}, folder, step=1)
    assert checkpoint.load(folder).state == {"a": 1}
if os.getuid() == 0:
    os.setgid(54321)
    os.setuid(54321)
for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
    os.environ.pop(name, None)
root = Path(sys.argv[1])
"""


def run_as_nobody(tmp_path: Path, code: str) -> None:
    """Run code for one process: as root it is a user without a name, whom access rights bind."""
    root = tmp_path / "all"
    root.mkdir()
    for folder in (root, *root.parents[:3]):
        folder.chmod(0o777)
    lone = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI"))}
    command = [sys.executable, "-c", AS_NOBODY + textwrap.dedent(code), root]
    subprocess.run(command, check=True, env=lone, cwd="/")


@pytest.mark.thorough
def test_old_ones_that_cannot_be_removed(tmp_path):
    """The save is whole all the same; what is left is tried again, and told."""
    if RANK:
        return
    code = """
    for step in range(1, 3):
        checkpoint.save({"a": step}, root, step=step, keep=1)
        (root / f"00000{step}-step-{step}").chmod(0o500)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(3, 6):
            path = checkpoint.save({"a": step}, root, step=step, keep=1)
            assert checkpoint.load(root).state == {"a": step}
    assert any("cannot remove" in str(each.message) for each in warned)
    print(path, sorted(os.listdir(root)))
    left = {".000001-step-1.removing", ".000002-step-2.removing"}
    assert set(os.listdir(root)) == {*left, "000005-step-5"}, os.listdir(root)
    for each in left:
        (root / each).chmod(0o700)
    checkpoint.save({"a": 1}, root, step=6, keep=1)
    assert os.listdir(root) == ["000006-step-6"]
    """
    run_as_nobody(tmp_path, code)


@pytest.mark.thorough
def test_snapshots_of_a_user_without_a_name(tmp_path):
    if RANK:
        return
    code = """
    with checkpoint.Snapshots("training", share=1, folder=root) as snapshots:
        assert snapshots.step(lambda: {"a": 1}, 3)
    assert os.getuid() != 54321 or "-54321-" in snapshots.root.name
    found = checkpoint.Snapshots("training", folder=root).load()
    assert found.state == {"a": 1}
    """
    run_as_nobody(tmp_path, code)
