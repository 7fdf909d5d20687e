"""The doctor: what it says on a machine without a GPU, and with a simulated one."""

import re
from collections.abc import Iterator

import mpirun
import pytest
import simulated_gpu
import torch
from replicas import SIZE, together

import mpiddp
from mpiddp import doctor
from mpiddp.mpi.library import compiled_against
from mpiddp.transports import gpu_choice

CPU = torch.device("cpu")


@pytest.mark.smoke
@pytest.mark.timeout(100)
def test_under_mpirun() -> None:
    done = mpirun.run(2, ["-m", "mpiddp.doctor"], timeout=90)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    vendor, version = compiled_against()
    assert lines[0].startswith(f"mpiddp {mpiddp_version()}, torch {torch.__version__}, Python 3.")
    assert lines[1].startswith(f"MPI: compiled against {vendor} {version}, runs on {vendor}")
    assert re.match(r"ranks: 2 on 1 node \(.+\); 2 on this one, with \d+ cores?$", lines[2])
    assert lines[3] == "memory that the ranks of a node share: possible"
    assert lines[4] == "gradients on the CPU: shared memory (transport 'auto')"
    if not torch.cuda.is_available():
        assert lines[5].startswith("GPU: torch ")
        assert lines[6] == "gradients on a GPU: none here; asked for: 'auto'"
    assert len(lines) == 7


def mpiddp_version() -> str:
    from importlib import metadata

    return metadata.version("mpiddp")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(doctor, "find_gpu", lambda: CPU)
    monkeypatch.setattr(gpu_choice, "_tried", {})
    with simulated_gpu.on_cpu_tensors():
        yield


@pytest.mark.mpi
def test_gpu_and_an_mpi_without_support(gpu: None) -> None:
    lines = doctor.report()
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
    lines = doctor.report()
    with together():
        assert lines[-1] == (
            "gradients on the GPU: ring: asked for; a trial on 2 ranks of each node worked"
        )
        assert "gradients on the CPU: MPI_Iallreduce (transport 'mpi')" in lines


@pytest.mark.essential
@pytest.mark.mpi
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_gpu", lambda: None)
    lines = doctor.report()
    with together():
        assert lines[-1] == "gradients on a GPU: none here; asked for: 'auto'"
        assert mpiddp.get_topology().world_size == SIZE


@pytest.mark.once
def test_wire_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDDP_WIRE", raising=False)
    assert doctor.describe_wire(1) == []
    for line, text in zip(doctor.describe_wire(64), ("float32", "16 bits"), strict=True):
        assert line.startswith(f"between the nodes, 4 MB of {text} in chunks: two-level: costs "), (
            line
        )
    monkeypatch.setenv("MPIDDP_WIRE", "two-level")
    assert doctor.describe_wire(4)[0].endswith(" in chunks: two-level: asked for")
    assert "not possible: MPIDDP_WIRE is two-level, but 3 nodes" in doctor.describe_wire(3)[1]


@pytest.mark.mpi
def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--help"]) == 2
    assert "mpirun -n 2 python -m mpiddp.doctor" in capsys.readouterr().err
