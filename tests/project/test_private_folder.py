"""In a place where all users may write, nobody else's folder is used, and nobody's code is run."""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_users import NOBODY, as_nobody, open_to_all, two_users

from mpiddp.flight_recorder import analysis, files
from mpiddp.private_folder import private_folder


@pytest.fixture
def shared() -> Iterator[Path]:
    with open_to_all() as folder:
        yield folder


def test_made_and_taken(shared: Path) -> None:
    for _ in range(2):
        folder = private_folder(shared / "mine")
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o777)


def test_a_link(shared: Path) -> None:
    (shared / "elsewhere").mkdir()
    (shared / "mine").symlink_to(shared / "elsewhere")
    with pytest.raises(PermissionError, match="no folder that this user has made"):
        private_folder(shared / "mine")
    (shared / "file").touch()
    with pytest.raises(NotADirectoryError):
        private_folder(shared / "file")


@two_users
def test_another_user_was_there_first(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flight recorder writes nothing there."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/proc/there/rank_")
    monkeypatch.setattr(files.tempfile, "tempdir", str(shared))
    assert f"is in {shared}/" in files.dump_for("a reason")
    (made,) = shared.iterdir()
    made.rename(shared / "mine")
    as_nobody('mkdir "$1" && chmod 777 "$1"', made)
    with pytest.raises(PermissionError, match=f"belongs to user {NOBODY}, so it is not used"):
        private_folder(made)
    assert files.dump_for("a reason") == ""
    assert list(made.iterdir()) == []


class Evil:
    """Runs code when it is read."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self.evidence),)


@pytest.mark.parametrize("where", ["all", "in a record"])
def test_a_file_of_the_flight_recorder_runs_no_code(tmp_path: Path, where: str) -> None:
    evidence, folder = tmp_path / "evidence", tmp_path / "job"
    folder.mkdir()
    content = {"version": "2.5", "pg_config": {}, "entries": []}
    (folder / "rank_0").write_bytes(pickle.dumps(content))
    assert [each.rank for each in analysis.read(folder)] == [0]
    evil = Evil(evidence)
    what = evil if where == "all" else {**content, "entries": [evil]}
    (folder / "rank_0").write_bytes(pickle.dumps(what))
    with pytest.raises(ValueError, match="no file of a flight recorder"):
        analysis.read(folder)
    assert not evidence.exists()
