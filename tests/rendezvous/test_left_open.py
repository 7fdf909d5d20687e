"""What a program leaves open is told by a ResourceWarning, and a failed save by a line."""

import os
import subprocess
import textwrap
from pathlib import Path

import mpirun
import pytest
from script_runs import start

pytestmark = pytest.mark.timeout(90)

BEGIN = """\
import os, sys
import torch
import mpiddp
from mpiddp import checkpoint, preemption
"""


def run(
    folder: Path, source: str, *options: str, ranks: int = 1
) -> "subprocess.CompletedProcess[str]":
    script = folder / "script.py"
    script.write_text(BEGIN + textwrap.dedent(source))
    if ranks == 1:
        return start(*options, script, folder=folder)
    done = mpirun.run(ranks, [*options, script], timeout=80)
    print(done.stdout, done.stderr)
    return done


@pytest.mark.essential
@pytest.mark.thorough
@pytest.mark.once
def test_a_world(tmp_path: Path) -> None:
    source = "mpiddp.init_process_group()\npreemption.install()\n"
    done = run(tmp_path, source, "-W", "always::ResourceWarning", ranks=2)
    assert done.returncode == 0
    for rank in range(2):
        assert (
            f"ResourceWarning: rank {rank}: mpiddp.destroy_process_group() has not been called; "
            f"mpiddp.preemption is installed"
        ) in done.stderr


@pytest.mark.once
def test_operations(tmp_path: Path) -> None:
    """Those that all ranks have called end before MPI is finalised, which may fail of them."""
    source = """
        from mpiddp.process_group import call_pages
        call_pages.make_call_table = lambda world, requests: None  # as between nodes
        mpiddp.init_process_group()
        for count in (5, 5000) * 2:
            torch.distributed.all_reduce(torch.ones(count), async_op=True)
    """
    for _ in range(3):
        assert run(tmp_path, source, ranks=2).returncode == 0


@pytest.mark.thorough
@pytest.mark.once
def test_as_an_error(tmp_path: Path) -> None:
    """Everything has been stopped before it is raised."""
    done = run(tmp_path, "mpiddp.init_process_group()\n", "-W", "error::ResourceWarning")
    assert done.returncode == 0
    assert "ResourceWarning: rank 0: mpiddp.destroy_process_group()" in done.stderr


@pytest.mark.once
def test_nothing(tmp_path: Path) -> None:
    """In development mode a program that ends what it began hears nothing."""
    done = run(
        tmp_path,
        f"""
        mpiddp.init_process_group()
        preemption.install()
        model = mpiddp.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()
        with checkpoint.Snapshots("left-open-{os.getpid()}", folder="{tmp_path}") as snapshots:
            assert snapshots.step(lambda: {{"a": 1}}, 1)
        assert checkpoint.async_save({{"a": 1}}, "folder", step=1).result()
        checkpoint.async_save({{"a": 2}}, "folder", step=2)
        mpiddp.destroy_process_group()
        """,
        "-X",
        "dev",
        "-W",
        "error::ResourceWarning",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == [
        "000001-step-1",
        "000002-step-2",
    ]


@pytest.mark.thorough
@pytest.mark.once
def test_snapshots(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        f"""
        left = checkpoint.Snapshots("left", folder="{tmp_path}", share=1)
        failed = checkpoint.Snapshots("failed", folder="{tmp_path}", share=1)
        unused = checkpoint.Snapshots("unused", folder="{tmp_path}")
        open(failed.root, "w").close()
        assert left.step(lambda: {{"a": 1}}, 1)
        assert failed.step(lambda: {{"a": 1}}, 1)
        try:
            failed.close()
        except OSError:
            pass
        else:
            raise AssertionError
        failed = checkpoint.Snapshots("failed", folder="{tmp_path}", share=1)
        assert failed.step(lambda: {{"a": 1}}, 1)
        """,
        "-W",
        "always::ResourceWarning",
    )
    assert done.returncode == 0
    warned = [line for line in done.stderr.splitlines() if "ResourceWarning: snapshots" in line]
    assert len(warned) == 2
    assert "-left have not been closed" in done.stderr
    assert "mpiddp: the last snapshot at " in done.stderr
    assert "-failed has failed: " in done.stderr


@pytest.mark.thorough(keep=1)
@pytest.mark.once
@pytest.mark.parametrize("asked", [False, True])
def test_a_save_that_failed(tmp_path: Path, asked: bool) -> None:
    """The last one, which no later save tells of."""
    (tmp_path / "file").touch()
    done = run(
        tmp_path,
        f"""
        saving = checkpoint.async_save({{"a": 1}}, "file", step=1)
        if {asked}:
            assert isinstance(saving.exception(), FileExistsError)
        """,
        "-W",
        "error::ResourceWarning",
    )
    assert done.returncode == 0
    told = (
        "mpiddp: rank 0: the last asynchronous save has failed, and nobody has asked for its "
        "result: FileExistsError"
    )
    assert (told in done.stderr) == (not asked)
    assert not asked or done.stderr == ""
