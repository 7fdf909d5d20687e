"""What the doctor says before MPI starts: of mpirun, and of how MPI starts."""

from pathlib import Path

import mpirun
import pytest

from mpiddp.diagnosis import launching
from mpiddp.mpi.library import linked_version
from mpiddp.mpi.running_library import Library, identify, mapped_mpi

RUNNING = identify(linked_version())
(PATH,) = mapped_mpi()


def test_mpirun_says_whose_it_is() -> None:
    assert launching._ask_mpirun(mpirun.find()) == RUNNING
    assert launching._ask_mpirun("/bin/echo") is None
    assert launching._ask_mpirun("/no/such/mpirun") is None


def test_mpirun_of_this_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(mpirun.find()).parent))
    (finding,) = launching._mpirun(RUNNING)
    assert (finding.grade, finding.text) == ("ok", f"mpirun: {mpirun.find()} ({RUNNING})")


def test_no_mpirun_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = launching._mpirun(RUNNING)
    assert finding.grade == "ok"
    assert finding.text.startswith("mpirun: none on PATH")


@pytest.mark.once
def test_two_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("mpirun", "ompi_info"):
        (tmp_path / name).touch(0o755)
    assert launching._two_in_a_folder() == []
    (tmp_path / "hydra_pmi_proxy").touch()
    (finding,) = launching._two_in_a_folder()
    assert finding.grade == "warning"
    assert finding.text.startswith(
        f"two MPIs have their programs in {tmp_path}: Open MPI and MPICH; mpirun and mpicc there"
    )
    # As in Debian's /usr/bin.
    (tmp_path / "mpirun").unlink()
    for name in ("mpirun.openmpi", "mpirun.mpich"):
        (tmp_path / name).touch(0o755)
    (tmp_path / "mpirun").symlink_to("mpirun.openmpi")
    assert launching._two_in_a_folder() == []


class TestSlowStart:
    def said(self, tmp_path: Path, library: Library = RUNNING, **environment: str) -> bool:
        found = launching.describe_slow_start(library, PATH, {"HOME": str(tmp_path), **environment})
        assert all(
            finding.grade == "warning" and finding.remedy == "export OMPI_MCA_btl=^ofi"
            for finding in found
        )
        return bool(found)

    def test_this_mpi(self, tmp_path: Path) -> None:
        slow = RUNNING.vendor == "Open MPI" and RUNNING.version[:2] == (5, 0)
        assert self.said(tmp_path) is slow

    @pytest.mark.parametrize(
        ("value", "there"),
        [("^ofi", False), ("^sm,ofi", False), ("^sm", True), ("self,tcp", False), ("ofi", True)],
    )
    def test_components_that_are_chosen(self, tmp_path: Path, value: str, there: bool) -> None:
        slow = self.said(tmp_path)
        assert self.said(tmp_path, OMPI_MCA_btl=value) is (slow and there)
        (tmp_path / ".openmpi").mkdir()
        (tmp_path / ".openmpi" / "mca-params.conf").write_text(f"# a file\n btl = {value}\n")
        assert self.said(tmp_path) is (slow and there)
        assert self.said(tmp_path, OMPI_MCA_btl="^sm") is slow

    def test_other_versions(self, tmp_path: Path) -> None:
        for version in ((4, 1, 4), (5, 1, 0), (6, 0, 0)):
            assert not self.said(tmp_path, Library("Open MPI", version))
        assert not self.said(tmp_path, Library("MPICH", (5, 0, 2)))


@pytest.mark.once
def test_error_and_what_to_do() -> None:
    finding = launching.describe_failed_start(RuntimeError("it is 1.5 of 2. Do this. Or that."))
    assert (finding.grade, finding.text) == ("error", "it is 1.5 of 2")
    assert finding.remedy == "Do this. Or that."
    assert launching.describe_failed_start(ValueError("it is wrong")).remedy
