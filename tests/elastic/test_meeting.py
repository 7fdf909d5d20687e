"""A job comes to another one that runs, at a folder."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import create_connection

import mpirun
import patience
import pytest
from elastic_runs import OPEN_MPI
from script_runs import SCRIPTS
from two_users import as_nobody, open_to_all, two_users

from mpiddp.rendezvous import meeting
from mpiddp.system.listening import listen

pytestmark = pytest.mark.timeout(100)

needs_connections = pytest.mark.skipif(OPEN_MPI, reason="Open MPI connects no jobs of two mpiruns")

STEPS = 50
# What the address in the folder is in, see mpiddp/rendezvous/meeting.py.
ADDRESS = "mpiddp-job.json"


_started: "list[subprocess.Popen[str]]" = []


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    while _started:
        job = _started.pop()
        job.kill()
        job.communicate()


def start(ranks: int, folder: Path, **env: str) -> "subprocess.Popen[str]":
    script = [str(SCRIPTS / "elastic_training.py"), str(STEPS), "--admit", str(folder)]
    job = subprocess.Popen(
        [mpirun.find(), "-n", str(ranks), sys.executable, *script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**mpirun.os.environ, **mpirun.ENVIRONMENT, **env},
    )
    _started.append(job)
    return job


def come(ranks: int, folder: Path, **env: str) -> "subprocess.Popen[str]":
    return start(ranks, folder, MPIDDP_JOIN=str(folder), **env)


def end(job: "subprocess.Popen[str]") -> "tuple[int, list[dict], str]":
    """Return the exit status, what the ranks said at their end, and stderr."""
    printed, errors = job.communicate(timeout=60)
    print(printed, errors)  # pytest shows it when the test fails
    ended = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return job.returncode, ended, errors


def address(folder: Path) -> "dict":
    """Wait for the job that runs to listen."""
    deadline = time.monotonic() + 40
    while not (folder / ADDRESS).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return json.loads((folder / ADDRESS).read_bytes())


@needs_connections
def test_jobs_train_together(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there yet"
    jobs = [start(2, folder), come(1, folder)]
    status, ended, errors = end(jobs[0])
    come_status, come_ended, _ = end(jobs[1])
    assert (status, come_status) == (0, 0)
    assert "mpiddp: rank 0: 1 has come; training goes on with 3 after" in errors
    assert [size for each in ended for size, _ in each["worlds"]] == [2, 3] * 2
    assert [size for each in come_ended for size, _ in each["worlds"]] == [3]
    assert len({each["bits"] for each in ended + come_ended}) == 1
    assert {each["steps"] for each in ended + come_ended} == {ended[0]["worlds"][1][1] + STEPS}
    assert list(folder.iterdir()) == []


@needs_connections
@pytest.mark.thorough
def test_who_is_not_let_in(tmp_path: Path) -> None:
    """The job that runs goes on, whoever comes; and one comes that waits in vain."""
    job = start(2, tmp_path)
    where = address(tmp_path)
    for said in (b"", b"hello\n", b'{"secret": "wrong", "ranks": 1}\n', b'{"secret": '):
        with create_connection((where["host"], where["port"]), 5) as stranger:
            stranger.sendall(said)
    status, _, errors = end(come(1, tmp_path, MPIDDP_WIRE="direct"))
    assert status != 0
    refused = f"rank 0: MPIDDP_JOIN: the job at {tmp_path} does not let this one in: MPIDDP_WIRE is"
    assert f"{refused} direct here and auto there" in errors
    status, ended, _ = end(come(1, tmp_path))
    assert (status, len(ended)) == (0, 1)
    assert end(job)[0] == 0


@pytest.mark.essential
@needs_connections
@pytest.mark.thorough
def test_nobody_is_there(tmp_path: Path) -> None:
    settings = {"MPIDDP_START_SECONDS": "3", "MPIDDP_STALL_SECONDS": "1"}
    (tmp_path / ADDRESS).write_text(json.dumps({"host": "localhost", "port": 9, "secret": ""}))
    status, ended, errors = end(come(2, tmp_path, **settings))
    assert (status != 0, ended) == (True, [])
    words = f"for the job at {tmp_path}, which lets others in when it calls elastic.admit()"
    assert f"mpiddp: waits {words}" in errors
    assert f"this job has waited 3 s {words}, and MPIDDP_START_SECONDS are over" in errors


@pytest.mark.once
@two_users
@pytest.mark.parametrize("how", ["file", "link", "pipe"])
def test_an_address_of_another_user(how: str, tmp_path: Path) -> None:
    """Who wrote it could pretend to be the job; and nobody waits for who reads a pipe."""
    own = tmp_path / "own"
    own.write_text("{}")
    with open_to_all() as folder:
        file = folder / ADDRESS
        made = {"file": 'echo {} > "$1"', "link": 'ln -s "$2" "$1"', "pipe": 'mkfifo "$1"'}
        as_nobody(made[how], file, own)
        with pytest.raises(OSError, match=r"another user's|symbolic links"):
            meeting._read_address(file)
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(PermissionError, match="or no file"):
            meeting._read_address(file)


@pytest.mark.once
@two_users
def test_an_address_that_others_have_made_first(tmp_path: Path) -> None:
    """None of them can read the secret; in a folder like /tmp the job says that it cannot write."""
    with open_to_all() as folder:
        as_nobody('touch "$1" && chmod 666 "$1"', folder / ADDRESS)
        folder.chmod(0o777)  # and in one where all may rename
        door = meeting._Door(folder)
        try:
            status = (folder / ADDRESS).stat()
            assert (status.st_uid, status.st_mode & 0o777) == (0, 0o600)
            assert meeting._read_address(folder / ADDRESS)["port"] == door._entrance.port
        finally:
            door.close()
        assert list(folder.iterdir()) == []


@pytest.mark.once
def test_another_program_has_the_port_of_a_job_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the other end to speak, as a web server does; then a job lets others in."""
    monkeypatch.setenv("MPIDDP_START_SECONDS", f"{patience.enough(20.0)}")
    with listen("127.0.0.1") as silent, ThreadPoolExecutor(1) as pool:
        left = {"host": "127.0.0.1", "port": silent.getsockname()[1], "secret": "00"}
        (tmp_path / ADDRESS).write_text(json.dumps(left))
        coming = pool.submit(meeting._ask, tmp_path, 1, "MPICH")
        kept, _ = silent.accept()
        door = meeting._Door(tmp_path)
        with kept:
            while not door.look():
                assert not coming.done()
                time.sleep(0.01)
        door._guests[0].connection.sendall(meeting._line({"refused": "it is full"}))
        with pytest.raises(RuntimeError, match="it is full"):
            coming.result()
        door.close()


@pytest.mark.skipif(not OPEN_MPI, reason="with MPICH a job comes")
def test_open_mpi_says_that_it_cannot(tmp_path: Path) -> None:
    status, _, errors = end(come(1, tmp_path))
    assert status != 0
    assert "MPIDDP_JOIN: Open MPI does not connect the jobs of two mpiruns" in errors


@pytest.mark.thorough
def test_a_program_that_gives_its_own_world(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import mpiddp\nfrom mpi4py import MPI\nimport torch.distributed as dist\n"
        "mpiddp.init_process_group(MPI.COMM_WORLD)\n"
        "print('world of', dist.get_world_size())\n"
        "mpiddp.destroy_process_group()\n"
    )
    done = mpirun.run(2, [script], timeout=60, env={"MPIDDP_JOIN": str(tmp_path)})
    assert done.returncode == 0
    assert done.stdout.count("world of 2") == 2
    assert done.stderr == ""


@pytest.mark.thorough
def test_a_rank_that_comes_late_to_look(tmp_path: Path) -> None:
    """It says that it has not come, not that it knows of no such thing."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\nimport torch.distributed as dist\nimport mpiddp\n"
        "from mpiddp import elastic\n"
        "mpiddp.init_process_group()\n"
        "@elastic.run\n"
        "def train(state):\n"
        "    if dist.get_rank() == 0:\n"
        "        time.sleep(6)\n"
        "    elastic.admit(sys.argv[1])\n"
        "train(elastic.State(step=0))\n"
        "mpiddp.destroy_process_group()\n"
    )
    done = mpirun.run(2, [script, tmp_path], timeout=60, env={"MPIDDP_STALL_SECONDS": "1"})
    assert done.returncode == 0
    assert "mpiddp: rank 1: elastic.admit has waited" in done.stderr
    where = f"now at {script}:9 in train)"
    assert f"Rank 0 has not come (no collective of this group so far; {where}" in done.stderr
