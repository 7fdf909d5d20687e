"""The doctor: what it says without a GPU, with a simulated one, and where MPI does not start."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import mpirun
import other_mpi
import pytest
import simulated_gpu
import torch
from replicas import SIZE, together
from script_runs import clean_environment

import mpiddp
from mpiddp import doctor
from mpiddp.diagnosis import gpus
from mpiddp.mpi.library import compiled_against, interface, linked_version
from mpiddp.mpi.running_library import identify
from mpiddp.transports import gpu_choice

CPU = torch.device("cpu")
VENDOR = identify(linked_version()).vendor
# One second less for each run.
QUICK = {"OMPI_MCA_btl": "^ofi"}


def alone(
    *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "mpiddp.doctor", *arguments],
        env={**clean_environment(), **mpirun.ENVIRONMENT, **QUICK, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    print(done.stdout, done.stderr)  # pytest shows it when a test fails
    return done


@pytest.mark.smoke
@pytest.mark.timeout(100)
def test_under_mpirun() -> None:
    # That mpirun comes first.
    path = f"{Path(mpirun.find()).parent}{os.pathsep}{os.environ['PATH']}"
    done = mpirun.run(2, ["-m", "mpiddp.doctor"], timeout=90, env={**QUICK, "PATH": path})
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("ok      ") for line in done.stdout.splitlines()]
    # Tests of diagnosis have these.
    parts = ("known fault of ", "setting: ", "memory: ", "/dev/shm: ", "        -> ")
    lines = [line for line in lines if not line.removeprefix("warning ").startswith(parts)]
    assert lines[0] == (
        f"mpiddp {mpiddp_version()}, torch {torch.__version__}, Python "
        f"{'.'.join(map(str, sys.version_info[:3]))}"
    )
    assert lines[1].startswith("MPI: ")
    assert identify(lines[1]).vendor == VENDOR
    headers = f"(headers of {' '.join(compiled_against())})"
    assert lines[1].endswith(f"called by the interface {interface()} {headers}")
    assert re.match(r"MPI library: /\S+/libmpi\S*\.so\S*$", lines[2])
    assert lines[3].startswith("mpirun: ")
    assert lines[4] == "thread level: MPI_THREAD_MULTIPLE, as mpiddp needs it"
    assert re.match(r"ranks: 2 on 1 node \(.+\); 2 on this one, with \d+ cores?$", lines[5])
    assert re.match(r"cores: no rank has any of its own, all 2 share \d+ cores?$", lines[6])
    assert re.search(r"threads: 1 a rank \(OMP_NUM_THREADS=1\)", lines[7])
    assert "memory that the ranks of a node share: possible" in lines
    assert "gradients on the CPU: shared memory (transport 'auto')" in lines
    # Others are read out of each other's memory where the ranks find that faster.
    way = r"collectives on the CPU, all( others)?: in memory that all ranks share "
    assert any(re.match(way + r"\(MPIDDP_COLLECTIVES=memory\)$", line) for line in lines)
    if not torch.cuda.is_available():
        gpu = lines.index("gradients on a GPU: none here; asked for: 'auto'")
        assert lines[gpu - 1].startswith("GPU: torch ")
    measured = [line for line in lines if line.startswith(("speed: ", "messages ", "progress: "))]
    number = r"[\d.]+(e[+-]\d+)?"
    expected = [
        rf"speed: 2 ranks of a node together: memory {number} GB/s, read and written; arithmetic "
        rf"{number} GFLOP/s",
        rf"messages inside \S+: {number} [um]s, {number} GB/s each way",
        rf"progress: .*\d% of an MPI_Iallreduce of {number} MB \({number} ms\) moves while nobody "
        r"calls MPI.*",
    ]
    for line, pattern in zip(measured, expected, strict=True):
        assert re.fullmatch(pattern, line)


@pytest.mark.thorough
def test_quick_measures_nothing() -> None:
    """Alone as well, where there is memory to measure only."""
    slow, quick = (alone("--json", *words).stdout for words in ([], ["--quick"]))
    texts_of = {
        name: [each["text"] for each in json.loads(text)["findings"]]
        for name, text in (("slow", slow), ("quick", quick))
    }
    measured = ("speed: ", "slow ", "messages ", "progress: ")
    assert [text for text in texts_of["quick"] if text.startswith(measured)] == []
    (speed,) = (text for text in texts_of["slow"] if text.startswith(measured))
    assert speed.startswith("speed: the rank of a node: memory ")


def mpiddp_version() -> str:
    from importlib import metadata

    return metadata.version("mpiddp")


@pytest.mark.thorough
@pytest.mark.timeout(100)
def test_too_many_threads_as_json() -> None:
    """The most common fault of all: each rank with a thread for each core, and on one core here."""
    command = ["taskset", "-c", "0", mpirun.find(), "-n", "4", sys.executable]
    done = mpirun.run_command(
        [*command, "-m", "mpiddp.doctor", "--json", "--quick"],
        90,
        {**QUICK, "OMP_NUM_THREADS": "8"},
    )
    assert done.returncode == 0, done.stderr  # it works, slowly
    told = json.loads(done.stdout)
    assert told["grade"] == "warning"
    assert all(
        set(finding) == {"grade", "text", "remedy"}
        and bool(finding["remedy"]) == (finding["grade"] != "ok")
        for finding in told["findings"]
    )
    (threads,) = (one for one in told["findings"] if one["text"].startswith("threads: "))
    assert threads["grade"] == "warning"
    assert re.match(
        r"threads: (\d+) a rank \(OMP_NUM_THREADS=8\): 4 ranks x \1 threads? on 1 core of ",
        threads["text"],
    )
    assert "start 1 rank a node at most" in threads["remedy"]


@pytest.mark.once
class TestCommandLine:
    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exited:
            doctor.main(["--help"])
        assert exited.value.code == 0
        assert "mpirun -n 4 python -m mpiddp.doctor" in capsys.readouterr().out

    def test_wrong_option(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exited:
            doctor.main(["--js"])
        assert exited.value.code == 2
        assert "unrecognized arguments: --js" in capsys.readouterr().err


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs of the other MPI."""
    return other_mpi.unpack(tmp_path_factory.mktemp("mpi")) / "bin"


@pytest.mark.timeout(100)
class TestMpiThatDoesNotStart:
    """One sentence with the cure, and no traceback."""

    def test_wrong_setting(self) -> None:
        done = alone(env={"MPIDDP_TRANSPORT": "pigeon"})
        assert done.returncode == 1
        last, remedy = done.stdout.splitlines()[-2:]
        assert re.match(r"error   .*MPIDDP_TRANSPORT must be auto, .* not 'pigeon'$", last)
        assert remedy.startswith("        -> ")
        assert "Traceback" not in done.stderr

    @pytest.mark.thorough
    def test_mpirun_of_another_mpi(self, other: Path) -> None:
        command = [str(other / "mpirun"), "-n", "2", sys.executable, "-m", "mpiddp.doctor"]
        done = mpirun.run_command([*command, "--quick"], 90, QUICK)
        print(done.stdout, done.stderr)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        errors = re.findall("^error   (.*)\n        -> (.*)$", done.stdout, re.MULTILINE)
        ((text, remedy),) = errors  # of both ranks, one speaks
        if VENDOR == "Open MPI":
            assert text.startswith("this process is rank 0 of 1, although PMI_SIZE=2")
        else:
            assert text.startswith("this process was started by the mpirun of Open MPI, and mpi4py")
        assert f"the one beside {sys.executable}" in remedy

    @pytest.mark.thorough
    def test_another_one_comes_first_on_the_path(self, other: Path) -> None:
        done = alone("--quick", env={"PATH": f"{other}:/usr/bin:/bin"})
        assert done.returncode == 0
        warnings = re.findall("^warning (mpirun: .*)\n        -> (.*)$", done.stdout, re.MULTILINE)
        ((text, remedy),) = warnings
        assert text.startswith(f"mpirun: {other / 'mpirun'} is of {other_mpi.VENDOR} ")
        assert f"mpiddp runs on {VENDOR} " in text
        assert "PATH" in remedy


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpus, "find_gpu", lambda: CPU)
    monkeypatch.setattr(gpu_choice, "_tried", {})
    with simulated_gpu.on_cpu_tensors():
        yield


def texts() -> list[str]:
    return [finding.text for finding in doctor.report(quick=True)]


@pytest.mark.mpi
def test_gpu_and_an_mpi_without_support(gpu: None) -> None:
    lines = texts()
    with together():
        assert f"functions of {simulated_gpu.library()}" in lines[-3]
        assert re.search(r"GPU memory in MPI: (Open MPI|MPICH) \d.*: no", lines[-2])
        if SIZE == 1:
            assert "nothing travels; in a larger world staging" in lines[-1]
        else:
            assert re.match(r"gradients on the GPU: staging: .* without CUDA", lines[-1])


@pytest.mark.mpi(min_size=2)
def test_gpu_and_transport_asked_for(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDDP_DEVICE_TRANSPORT", "ring")
    monkeypatch.setenv("MPIDDP_TRANSPORT", "mpi")
    monkeypatch.setattr("mpiddp.transports.gpu_trial.trial", lambda *_, **__: (2, ""))
    lines = texts()
    with together():
        assert lines[-1] == (
            "gradients on the GPU: ring: asked for; a trial on 2 ranks of each node worked"
        )
        assert "gradients on the CPU: MPI_Iallreduce (transport 'mpi')" in lines


@pytest.mark.essential
@pytest.mark.mpi
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_gpu", lambda: None)
    lines = texts()
    with together():
        assert lines[-1] == "gradients on a GPU: none here; asked for: 'auto'"
        assert mpiddp.get_topology().world_size == SIZE
