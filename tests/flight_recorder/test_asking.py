"""python -m mpiddp.flight_recorder --ask: the ranks write their files, and nothing else ends."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mpirun
import pytest

from mpiddp.flight_recorder import ranks_here
from mpiddp.flight_recorder.__main__ import main
from mpiddp.system import rank_signs

SCRIPT = """\
import os, subprocess, sys, time
import torch.distributed as dist
import mpiddp

# A word in the command line that no other job has.
word, folder = sys.argv[1:]
mpiddp.init_process_group()
rank = dist.get_rank()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
other = subprocess.Popen([sys.executable, "-c", "import sys, time; time.sleep(60)", word])
dist.barrier()
if rank == 0:
    asked = subprocess.run(
        [sys.executable, "-m", "mpiddp.flight_recorder", "--ask", word],
        capture_output=True, text=True,
    )
    print(asked.stdout, asked.stderr, asked.returncode)
end = time.monotonic() + 30
while len(os.listdir(folder)) < 2 and time.monotonic() < end:
    time.sleep(0.05)
assert os.waitpid(child, os.WNOHANG) == (0, 0) and other.poll() is None
os.kill(child, 9)
os.waitpid(child, 0)
other.kill()
other.wait()
dist.barrier()
mpiddp.destroy_process_group()
# Now nobody listens, and the signal ends nothing.
os.kill(os.getpid(), 40)
print("done", os.getpid(), flush=True)
"""


@pytest.mark.essential
@pytest.mark.timeout(100)
@pytest.mark.once
def test_only_ranks_are_asked(tmp_path: Path) -> None:
    """Not mpirun, a forked child or another program, whose command lines have the word too."""
    folder, script = tmp_path / "dumps", tmp_path / "script.py"
    folder.mkdir()
    script.write_text(SCRIPT)
    word = f"asked-{time.monotonic_ns()}"
    env = {"TORCH_FR_DUMP_TEMP_FILE": f"{folder}/rank_", "MPIDDP_DUMP_SIGNAL": None}
    done = mpirun.run(2, [script, word, folder], timeout=90, env=env)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0", "rank_1"]
    lines = [line.strip() for line in done.stdout.splitlines()]
    ended = [line.split()[1] for line in lines if line.startswith("done")]
    asked = [line for line in lines if " writes " in line]
    assert len(ended) == len(asked) == 2
    for rank in range(2):
        (line,) = (each for each in asked if each.endswith(f" writes {folder}/rank_{rank}"))
        assert line.startswith(f"rank {rank} (process ")
        assert line.split("(process ")[1].split(":")[0] in ended


@pytest.mark.once
@pytest.mark.parametrize(
    ("options", "status", "told"),
    [
        (["--ask", "no-such-[p]rogram"], 1, "no rank of mpiddp with 'no-such-[p]rogram' in its"),
        (["--ask", "("], 2, "'(' is no regular expression"),
        ([], 2, "name a folder, or --ask"),
    ],
    ids=["none", "no pattern", "nothing"],
)
def test_nobody_to_ask(
    options: list[str], status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if options:
        assert main(options) == status
    else:
        with pytest.raises(SystemExit, match=str(status)):  # as argparse ends
            main(options)
    assert told in capsys.readouterr().err


@pytest.mark.once
def test_ranks_that_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = ranks_here.Rank(os.getpid(), 3, signal.SIGUSR1, "", "train.py")
    monkeypatch.setattr(ranks_here, "find", lambda pattern: [rank])
    assert main(["--ask"]) == 1
    told = capsys.readouterr().err
    assert "rank 3 (process " in told
    assert "cannot be asked: it has ended, or takes no signal any more" in told
    assert "no rank of mpiddp" not in told


# A process whose name, of 15 bytes, ends within a character; a rank or somebody else's.
NAMED = """\
import signal, sys, time
with open("/proc/self/comm", "wb") as file:
    file.write(b"a" * 14 + "\u00e9".encode())
if sys.argv[1] == "rank":
    from mpiddp.system import rank_signs
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    rank_signs.put_up(signal.SIGUSR1, 5, "")
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.once
def test_names_that_are_no_text() -> None:
    word = f"named-{time.monotonic_ns()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", NAMED, what, word], stdout=subprocess.PIPE, text=True
        )
        for what in ("rank", "other")
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        found = ranks_here.find(word)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [(each.process_id, each.rank) for each in found] == [(processes[0].pid, 5)]


@pytest.mark.once
def test_a_sign_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no memory")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "write", full)
    assert rank_signs.put_up(signal.SIGUSR1, 0, "") == -1
    monkeypatch.undo()
    assert os.listdir("/proc/self/fd") == before
