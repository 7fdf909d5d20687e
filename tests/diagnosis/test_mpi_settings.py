"""Variables of MPI that hurt, and known faults of its version."""

import re
from pathlib import Path

import pytest

from mpiddp.diagnosis import known_faults, mpi_settings
from mpiddp.mpi.running_library import Library

pytestmark = pytest.mark.once

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "mpis.md"


@pytest.mark.parametrize(
    ("name", "value", "hurts"),
    [
        ("MPIR_CVAR_ASYNC_PROGRESS", "1", True),
        ("MPIR_CVAR_ASYNC_PROGRESS", "0", False),
        ("OMPI_MCA_btl", "tcp,self", True),
        ("OMPI_MCA_btl", "sm,tcp,self", False),
        ("OMPI_MCA_btl", "^ofi", False),
        ("OMPI_MCA_btl", "^sm", True),
        ("FI_PROVIDER", "sockets", True),
        ("FI_PROVIDER", "^sockets", False),
        ("FI_PROVIDER", "tcp;ofi_rxm", False),
        ("UCX_TLS", "tcp,self", True),
        ("UCX_TLS", "tcp,self,shm", False),
        ("UCX_TLS", "^ib", False),
        ("UCX_TLS", "all", False),
        ("I_MPI_FABRICS", "ofi", True),
        ("I_MPI_FABRICS", "shm:ofi", False),
        ("UCX_LOG_LEVEL", "warn", False),
        ("UCX_LOG_LEVEL", "debug", True),
    ],
)
def test_values_that_hurt(name: str, value: str, hurts: bool) -> None:
    found = mpi_settings.describe({name: value})
    assert [each.text.startswith(f"setting: {name}={value}: ") for each in found] == [True] * hurts


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_MCA_btl_tcp_if_include", "FI_TCP_IFACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo,nowhere0,mlx5_0:1,10.0.0.0/8")
    (found,) = (each for each in mpi_settings.report_here() if "names" in each.text)
    assert re.fullmatch(
        r"setting: UCX_NET_DEVICES names nowhere0, and \S+ has no such interface", found.text
    )


def test_ranks_that_differ() -> None:
    same = {"UCX_TLS": "all"}
    assert mpi_settings.compare([("n0", same), ("n1", dict(same))]) == []
    (found,) = mpi_settings.compare([("n0", same), ("n0", same), ("n1", {"FI_PROVIDER": "tcp"})])
    assert found.text == (
        "setting: ranks differ in variables of MPI: FI_PROVIDER (unset on n0, tcp on n1), UCX_TLS "
        "(all on n0, unset on n1)"
    )


def test_what_launchers_set_is_no_setting() -> None:
    environment = {
        "OMPI_MCA_initial_wdir": "/here",
        "OMPI_MCA_num_procs": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_MCA_btl": "^ofi",
        "PATH": "/bin",
    }
    assert mpi_settings.chosen(environment) == {"OMPI_MCA_btl": "^ofi"}


def plain(cell: str) -> str:
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").strip()


def test_the_page_has_the_same_faults() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition("## Known faults")[2].partition("\n## ")[0]
    rows = [plain(line.split("|")[2]) for line in table.splitlines() if line.startswith("| ")][2:]
    said = {
        fault.text.removeprefix("over UCX ").removeprefix("over OFI it ")
        for fault in known_faults.FAULTS
    }
    slow_start = "each MPI_Init sleeps for one second in its component btl ofi"
    assert said == {*rows} - {slow_start}


def test_faults_of_a_version() -> None:
    def known(vendor: str, *version: int) -> str:
        found = known_faults.describe(Library(vendor, version))
        assert all(each.grade == "ok" for each in found)
        return " ".join(each.text for each in found)

    assert "known fault of Open MPI 5.0.11: has no PMI-2" in known("Open MPI", 5, 0, 11)
    assert "PMI-2" not in known("Open MPI", 4, 1, 4)
    assert "MPI_ANY_SOURCE" in known("MPICH", 5, 0, 2)
    assert "MPI_ANY_SOURCE" not in known("MPICH", 4, 0, 2)
    assert "aborts" in known("MPICH", 3, 4, 3)
    assert "NaN" in known("Intel MPI", 2021, 19)
    assert known("unknown") == ""


@pytest.mark.mpi
def test_level_of_threads() -> None:
    from mpi4py import MPI

    level, *_ = known_faults.report(MPI.COMM_WORLD)
    assert level.text == "thread level: MPI_THREAD_MULTIPLE, as mpiddp needs it"
    assert known_faults._threads(MPI.THREAD_SERIALIZED).grade == "warning"
