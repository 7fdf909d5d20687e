"""A rank whose program ends with a status that is not 0 ends the job: the others wait for it."""

from pathlib import Path

import mpirun
import pytest

pytestmark = [pytest.mark.timeout(120), pytest.mark.once]

SCRIPT = """\
import atexit
import contextlib
import sys
import time
import torch
import torch.distributed as dist
import mpiddp

mpiddp.init_process_group()
atexit.register(lambda: print("own function of atexit", flush=True))


@contextlib.contextmanager
def cleaning():
    try:
        yield
    finally:
        print("cleaned", flush=True)


def main():
    with contextlib.suppress(SystemExit):
        sys.exit(9)
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        with cleaning():
            {what}
    dist.all_reduce(torch.ones(1))
    time.sleep({seconds})


main()
"""


def run(folder: Path, what: str, *runner: str, seconds: int = 300) -> tuple[int, str, str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(what=what, seconds=seconds))
    done = mpirun.run(2, [*runner, script], timeout=60)
    print(done.stdout, done.stderr)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("runner", [(), ("-m", "mpiddp")], ids=["alone", "runner"])
@pytest.mark.parametrize(
    ("what", "status"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit('some words')", 1),
        ("quit(4)", 4),
        ("import argparse; argparse.ArgumentParser().parse_args(['--no'])", 2),
    ],
)
def test_it_ends_the_job(tmp_path: Path, what: str, status: int, runner: tuple[str, ...]) -> None:
    code, out, err = run(tmp_path, what, *runner)
    assert code == status
    assert f"mpiddp: rank 1 exited with status {status} while other ranks are in the job" in err
    assert out.count("cleaned") == 1
    assert out.count("own function of atexit") == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    "what",
    [
        "pass",
        "try:\n                sys.exit(5)\n            except SystemExit:\n                pass",
    ],
    ids=["nothing", "caught"],
)
def test_one_that_was_caught_does_not(tmp_path: Path, what: str) -> None:
    code, out, err = run(tmp_path, what, seconds=0)
    assert code == 0
    assert "exited with status" not in err
    assert out.count("own function of atexit") == 2
