"""`python -m mpiddp`: scripts written for torchrun run as they are, and end as they should.

The scripts lie in tests/support/scripts/. Each test starts processes of its own.
"""

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import patience
import pytest
import torch
from script_runs import by_rank, free_port, launch, start, start_on_gloo

from mpiddp.runner import advice

pytestmark = pytest.mark.timeout(100)

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"

# Seconds from the failure to the end of the job, on a machine that is busy.
AT_ONCE = 15

REPLACED = (
    "mpiddp: 2 ranks, replaced: torch's backends (nccl, gloo, none) by mpiddp; "
    "torch's DistributedDataParallel by mpiddp's"
)


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What scripts/trainer.py says under torchrun with Gloo."""
    snapshot = tmp_path_factory.mktemp("torchrun") / "snapshot.pt"

    def command() -> list[str]:
        options = ["--nproc-per-node", "2", "--master-port", str(free_port())]
        script = [str(SCRIPTS / "trainer.py"), "3", "--snapshot", str(snapshot)]
        return ["-m", "torch.distributed.run", *options, *script]

    # Unbuffered, a line and its end are written apart, and the ranks' lines mix.
    return start_on_gloo(command, 2, env={"PYTHONUNBUFFERED": ""})


@pytest.mark.smoke
@pytest.mark.once
def test_same_losses_as_under_torchrun(tmp_path: Path, torchrun: dict[int, dict[str, Any]]) -> None:
    snapshot = tmp_path / "snapshot.pt"
    arguments = [SCRIPTS / "trainer.py", "3", "--snapshot", snapshot, "--workers", "1"]
    done = launch(*arguments, env={"OMP_NUM_THREADS": None})
    assert done.returncode == 0
    assert done.stderr == f"{REPLACED}; the unset OMP_NUM_THREADS by 1\n"
    trained = by_rank(done.stdout)
    assert sorted(trained) == sorted(torchrun) == [0, 1]
    for rank, mine in trained.items():
        assert mine["ddp"] == "mpiddp"
        assert torchrun[rank]["ddp"] == "torch.nn.parallel.distributed"
        assert (mine["world"], mine["threads"], len(mine["losses"])) == (2, 1, 12)
        assert mine["losses"] == pytest.approx(torchrun[rank]["losses"], rel=1e-5)
    assert snapshot.exists()


@pytest.mark.slow
def test_what_is_kept(tmp_path: Path, torchrun: dict[int, dict[str, Any]]) -> None:
    """Nothing is replaced, so MPI does only what torchrun would do."""
    done = launch(
        "--backend", "keep", "--keep-ddp",
        SCRIPTS / "trainer.py", "3", "--snapshot", tmp_path / "snapshot.pt",
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == "mpiddp: 2 ranks, nothing replaced\n"
    trained = by_rank(done.stdout)
    for rank in (0, 1):
        assert trained[rank]["ddp"] == "torch.nn.parallel.distributed"
        assert trained[rank]["losses"] == pytest.approx(torchrun[rank]["losses"], rel=1e-5)


@pytest.mark.essential
@pytest.mark.thorough
@pytest.mark.once
def test_what_scripts_hold_of_torch() -> None:
    done = start("-m", "mpiddp", SCRIPTS / "held.py")
    assert (done.returncode, done.stdout) == (0, "all well\n")
    assert done.stderr == REPLACED.replace("2 ranks", "1 rank") + "\n"


@pytest.mark.essential(keep=1)
@pytest.mark.thorough
@pytest.mark.once
@pytest.mark.parametrize(
    "kind",
    [
        *("script", "module", "package"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("folder", "archive")),
    ],
)
def test_as_python_itself_runs_it(tmp_path: Path, kind: str) -> None:
    """What the program sees is the same with and without `-m mpiddp`."""
    source = (SCRIPTS / "seen.py").read_text()
    package = tmp_path / "package"
    package.mkdir()
    for name in ("__init__.py", "__main__.py", "seen.py"):
        package.joinpath(name).write_text("" if name == "__init__.py" else source)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", source)
    program = {
        "script": ["package/seen.py"],
        "module": ["-m", "package.seen"],
        "package": ["-m", "package"],
        "folder": ["package"],
        "archive": ["archive.zip"],
    }[kind]
    arguments = ["--backend", "of the script", "-m", "too"]
    arguments += {"script": ["spawn", "fail"], "module": ["spawn"]}.get(kind, [])
    plain = start(*program, *arguments, folder=tmp_path)
    ours = start("-m", "mpiddp", *program, *arguments, folder=tmp_path)
    assert json.loads(ours.stdout) == json.loads(plain.stdout)
    said, _, rest = ours.stderr.partition("\n")
    assert said.startswith("mpiddp: 1 rank, replaced: ")
    assert (rest, ours.returncode) == (plain.stderr, plain.returncode)
    assert ours.returncode == (kind == "script")


GPU_ADVICE = (
    f"mpiddp: the script asks for a GPU, and torch {torch.__version__} finds none here. Let it "
    f"choose: device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
)


@pytest.mark.once
@pytest.mark.skipif(torch.cuda.is_available(), reason="such scripts run here")
class TestScriptForGpus:
    """What it needs elsewhere is said in a line after torch's own words."""

    @pytest.mark.parametrize(
        "call",
        [
            "torch.nn.Linear(1, 1).cuda()",
            pytest.param("torch.cuda.set_device(0)", marks=pytest.mark.thorough),
        ],
    )
    def test_alone(self, call: str) -> None:
        done = start("-m", "mpiddp", "-c", f"import torch; {call}")
        assert done.returncode == 1
        assert done.stderr.endswith(GPU_ADVICE)
        assert done.stderr.count("Traceback") == 1

    def test_on_a_rank(self) -> None:
        code = "import os, torch; os.environ['RANK'] == '1' and torch.zeros(1, device='cuda')"
        done = launch("-c", code)
        assert done.returncode == 1
        # A torch for GPUs looks for one first.
        assert re.search(r"\[rank1\]: \w+Error: (Torch not compiled|Found no NVIDIA)", done.stderr)
        assert done.stderr.count(GPU_ADVICE) == 1

    def test_other_errors(self) -> None:
        assert advice.advice_on(ValueError("a wrong number")) == ""
        assert advice.advice_on(RuntimeError("Found no NVIDIA driver on your system")) != ""


@pytest.mark.thorough(keep=1)
@pytest.mark.once
@pytest.mark.parametrize(("option", "said"), [("--version", "mpiddp 0."), ("--help", "usage: ")])
def test_what_needs_no_mpi(option: str, said: str) -> None:
    program = f"""
import sys
from mpiddp.runner.command import main
assert main([{option!r}]) == 0
assert "mpi4py.MPI" not in sys.modules
"""
    done = start("-c", program)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(said)
    assert start("-c", program, env={"PMIX_RANK": "1"}).stdout == ""


@pytest.mark.slow
def test_code_and_what_cannot_be_run(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv, sys.path[0] == '', __name__); sys.exit(259)"
    done = start("-m", "mpiddp", "-c", code, "-x", "y")
    assert (done.returncode, done.stdout) == (3, "['-c', '-x', 'y'] True __main__\n")

    broken = tmp_path / "broken.py"
    broken.write_text("x = (\n")
    done = start("-m", "mpiddp", broken)
    assert done.returncode == 1
    assert "SyntaxError: '(' was never closed" in done.stderr
    # Nothing of how the script was reached.
    assert "mpiddp/" not in done.stderr
    assert "frozen" not in done.stderr

    done = start("-m", "mpiddp", "--tagoutput", broken)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: mpirun -n N python -m mpiddp [options]")
    assert done.stderr.endswith("error: unrecognized arguments: --tagoutput\n")

    done = start("-m", "mpiddp", "-c", "", env={"WORLD_SIZE": "4"})
    assert done.returncode == 2
    assert "rank 0: WORLD_SIZE=4 in the environment, but MPI says 1" in done.stderr
    done = start("-m", "mpiddp", "--log-dir", "/proc/no", "-c", "")
    assert done.returncode == 1
    assert "No such file or directory: '/proc/no'" in done.stderr


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.py", "-m"], "there is no file 'missing.py'"),
        ([], "the script to run is missing"),
        (["--keep-ddp", "-m"], "the module to run is missing"),
        (["--log-dir"], "argument --log-dir: expected one argument"),
        (["--backend", "carrier pigeon", __file__], "there is no backend 'carrier pigeon'"),
        (["--back", "gloo", __file__], "unrecognized arguments: --back"),
    ],
)
def test_wrong_command_line(arguments: list[str], said: str) -> None:
    from mpiddp.runner import command

    with pytest.raises(command._UsageError, match=said):
        command._parse(command._make_parser(), arguments)


@pytest.mark.once
def test_module_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpiddp.runner.program import Program, without_own_frames

    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises(ImportError, match="No module named no_such_module") as caught:
        Program("module", "no_such_module", ()).run()
    ours = caught.tb
    while ours is not None and ours.tb_frame.f_code.co_filename == __file__:
        ours = ours.tb_next
    assert ours is not None
    assert without_own_frames(ours) is None


ENDINGS = {
    "raise": (1, "[rank1]: ValueError: broken on purpose"),
    "raise before init": (1, "[rank1]: ValueError: broken on purpose"),
    "number": (3, ""),
    "words": (1, "some last words"),
    "SIGINT": (130, "[rank1]: KeyboardInterrupt"),
    "SIGTERM": (143, ""),
}


@pytest.mark.essential(keep=1)
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    "how",
    [
        *("raise", "number", "SIGTERM"),
        *(pytest.param(how, marks=pytest.mark.once) for how in ("raise before init", "SIGINT")),
        pytest.param("words", marks=pytest.mark.slow),
    ],
)
def test_rank_that_ends_ends_the_job(tmp_path: Path, how: str) -> None:
    status, said = ENDINGS[how]
    failed = tmp_path / "failed"
    done = launch(SCRIPTS / "ending.py", how, failed)
    ended = time.monotonic()
    assert done.returncode == status
    assert "still here" not in done.stdout
    if said:
        assert done.stderr.count(said) == 1
    traces = said.startswith("[rank1]")
    assert done.stderr.count("Traceback (most recent call last)") == traces
    lines = done.stderr.splitlines()
    if how == "raise before init":
        # Rank 1 waits for nobody: rank 0 may print its line later, or not at all.
        lines = [line for line in lines if line != REPLACED]
    else:
        assert lines.pop(0) == REPLACED
    # First of all comes what the rank says, and its frames are the script's.
    if traces:
        assert lines[0] == "[rank1]: Traceback (most recent call last):"
        assert re.fullmatch(r'\[rank1\]:   File ".*ending.py", line \d+, in <module>', lines[1])
        frames = [line for line in lines if '  File "' in line]
        assert len(frames) == 2
        assert all("ending.py" in frame for frame in frames)
    elif said:
        assert lines[0] == said
    if how != "raise before init":
        assert done.stdout.count("before the end") == 1
        assert ended - float(failed.read_text()) < patience.enough(AT_ONCE)
        # Functions for the exit are called on the way that Python goes, not where all is lost.
        assert done.stdout.count("atexit of rank 1") == (how in ("number", "words"))


def expected_lines(rank: int) -> list[str]:
    numbered = [f"rank {rank} line {number} {'x' * (number % 90)} end" for number in range(2000)]
    return [
        *numbered,
        f"from C of rank {rank}",
        f"shell of rank {rank}",
        f"rank {rank} child",
        f"rank {rank} after all of them",
        f"no newline {rank}",
    ]


@pytest.mark.once
def test_tagged_output() -> None:
    done = launch("--tag-output", SCRIPTS / "output.py")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {line}" for line in expected_lines(rank)]
        assert f"[{rank}] its stderr {rank}\n" in done.stderr
        assert f"[{rank}] progress {rank} 2\n" in done.stderr
    assert len(lines) == 2 * len(expected_lines(0))
    assert f"[0] {REPLACED}\n" in done.stderr
    assert done.stderr.count("] last words\n") == 2


@pytest.mark.thorough
def test_files_for_each_rank_and_an_abort(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "logs"
    done = launch("--log-dir", folder, "--tag-output", SCRIPTS / "output.py", "fail")
    assert done.returncode == 1
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank-0.err", "rank-0.out", "rank-1.err", "rank-1.out",
    ]  # fmt: skip
    for rank in (0, 1):
        written = (folder / f"rank-{rank}.out").read_text().splitlines()
        # Rank 0 is killed with the beginning of its last line in Python's hands.
        assert written[: 2000 + 4] == expected_lines(rank)[:-1]
    assert (folder / "rank-1.out").read_text().endswith("no newline 1")
    # Of the others only what ends the job is printed; it is in the file as well.
    assert "rank 1" not in done.stdout
    assert done.stdout.count("[0] rank 0 line ") == 2000
    assert "[0] rank 0 after all of them\n" in done.stdout
    said = "[rank1]: ValueError: broken on purpose\n"
    assert done.stderr.count(said) == 1
    error = (folder / "rank-1.err").read_text()
    assert error.count(said) == 1
    assert "its stderr 1" in error
    assert (folder / "rank-0.err").read_text().startswith(REPLACED + "\n")


@pytest.mark.slow
def test_sigterm_elsewhere(tmp_path: Path) -> None:
    """A world of one, child processes and a handler of the script are left alone."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, os, signal, sys, time

            rank = os.environ["RANK"]
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
            child.start()
            child.terminate()
            child.join()
            assert child.exitcode == -signal.SIGTERM
            time.sleep(0.5)
            seen = []
            signal.signal(signal.SIGTERM, lambda *args: seen.append(args))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
            assert len(seen) == 1
            print("alive")
            """
        )
    )
    done = launch(script)
    assert done.returncode == 0
    assert done.stdout == "alive\n" * 2
    done = start("-m", "mpiddp", "-c", "import os; os.kill(os.getpid(), 15)")
    assert done.returncode == -15


class Pump:
    """A line pump, the two pipes that it reads, and the one that it prints to."""

    def __init__(self, tag: str) -> None:
        from mpiddp.runner import output_relay

        self.control, theirs = socket.socketpair()
        error_end, self.error = os.pipe()
        program = [sys.executable, "-I", "-S", output_relay.__file__]
        self.process = subprocess.Popen(
            [*program, tag, str(error_end), str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(error_end, theirs.fileno()),
            bufsize=0,
        )
        theirs.close()
        os.close(error_end)

    def write(self, out: bytes, error: bytes = b"") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(out)
        os.write(self.error, error)

    def end(self) -> tuple[bytes, bytes]:
        """Let it pass on what it has, then end it, and return what it printed."""
        with self.control, self.process:
            self.control.send(b".")
            assert self.control.recv(1) == b"."
            os.close(self.error)
            return self.process.communicate(timeout=20)


@pytest.mark.once
def test_line_pump() -> None:
    tagging = Pump("[7] ")
    long = b"y" * 10_000
    tagging.write(b"one\ntwo\r\nhal", b"10 %\r20 %\r")
    tagging.write(b"f\n\n" + long, b"30 %")
    out, error = tagging.end()
    assert out == b"[7] one\n[7] two\r\n[7] half\n[7] \n[7] " + long + b"\n"
    assert error == b"[7] 10 %\r[7] 20 %\r[7] 30 %\n"

    plain = Pump("")
    plain.write(b"as it\r is")
    assert plain.end() == (b"as it\r is", b"")


@pytest.mark.once
def test_launcher_reads_whole_lines() -> None:
    """Whatever it reads at a time ends with a line, so no other rank's output gets into one."""
    tagging = Pump("[7] ")
    lines = b"".join(b"line %d\n" % number for number in range(3000))
    tagging.write(lines)
    assert tagging.process.stdout is not None
    read = b""
    while read.count(b"\n") < 3000:
        time.sleep(0.005)
        chunk = os.read(tagging.process.stdout.fileno(), 4096)
        assert chunk.endswith(b"\n")
        read += chunk
    assert read.replace(b"[7] ", b"") == lines
    assert tagging.end() == (b"", b"")


DIRECT = """
import atexit, os, sys, threading, torch, torch.distributed as dist
atexit.register(print, "never")
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(total.item(), flush=True)
child = os.fork()
if child == 0:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
{end}
os._exit(0)
"""


# Whose thread calls MPI until the end.
HOROVOD = """import mpiddp.horovod as hvd
hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist() == [2.0]"""


@pytest.mark.thorough(keep=1)
@pytest.mark.once
@pytest.mark.parametrize(
    "end",
    ["dist.destroy_process_group()", "pass", HOROVOD],
    ids=["ended", "left", "with Horovod's thread"],
)
def test_direct_exit_is_no_failure(end: str) -> None:
    """`os._exit(0)` as the last line: as under torchrun, without a page of the launcher's."""
    done = launch("-c", DIRECT.format(end=end))
    assert (done.returncode, done.stdout) == (0, "2.0\n2.0\n")
    assert done.stderr == f"{REPLACED}\n"
