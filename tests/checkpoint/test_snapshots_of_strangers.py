"""In node memory all users may write: none reads a snapshot, and no other's folder is used."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from two_users import as_nobody, open_to_all, two_users

from mpiddp.checkpoint import Snapshots, claims, save

WEIGHTS = torch.full((1000,), 42.0)


@pytest.fixture
def shared() -> Iterator[Path]:
    with open_to_all() as folder:
        yield folder


@pytest.fixture
def snapshots(shared: Path) -> Iterator[Snapshots]:
    with Snapshots("a training", folder=shared) as made:
        yield made


def test_only_the_user_can_read(snapshots: Snapshots) -> None:
    assert snapshots.step(lambda: {"weights": WEIGHTS}, 1)
    snapshots.wait()
    assert snapshots.root.stat().st_mode & 0o777 == 0o700
    found = snapshots.load()
    assert found is not None
    assert torch.equal(found.state["weights"], WEIGHTS)


def test_a_name_with_folders(shared: Path) -> None:
    """One folder: an upper one could be somebody else's, who then puts another into its place."""
    with Snapshots("a/training", folder=shared) as made:
        assert made.step(lambda: {"weights": WEIGHTS}, 1)
        made.wait()
        assert made.root.parent == shared
        assert made.load() is not None


def test_left_by_an_earlier_version(snapshots: Snapshots) -> None:
    """One that was open to all is closed."""
    snapshots.root.mkdir(mode=0o755)
    assert snapshots.step(lambda: {"weights": WEIGHTS}, 1)
    assert snapshots.root.stat().st_mode & 0o777 == 0o700


@two_users
def test_what_others_put_into_an_open_folder(snapshots: Snapshots, tmp_path: Path) -> None:
    """It was open to all before it was closed."""
    snapshots.root.mkdir()
    snapshots.root.chmod(0o777)
    save({"weights": torch.zeros(3)}, tmp_path, step=7)
    (theirs,) = tmp_path.glob("*-step-7")
    (tmp_path / "all").mkdir()
    theirs.rename(tmp_path / "all" / theirs.name)
    with open_to_all() as passed_on:
        shutil.copytree(tmp_path / "all", passed_on / "all")
        as_nobody('cp -r "$1"/all/* "$2"', passed_on, snapshots.root)
    assert len(list(snapshots.root.iterdir())) == 1
    assert snapshots.load(weights_only=False) is None


@two_users
def test_another_user_is_there_a_moment_before(
    snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Between our look at the folder and our file in it: the file of their link is left alone."""
    own = tmp_path / "own"
    own.mkdir()
    (own / ".training").write_text("{}, and what is mine")
    before = os.open

    def late(path: str | Path, *args: Any, **kwargs: Any) -> int:
        if Path(path).name in (".training", snapshots.root.name) and not snapshots.root.exists():
            as_nobody('ln -s "$2" "$1"', snapshots.root, own)
        return before(path, *args, **kwargs)

    monkeypatch.setattr(claims.os, "open", late)
    claims.claim(snapshots.root, True)
    assert snapshots.root.is_symlink()
    assert (own / ".training").read_text() == "{}, and what is mine"


@two_users
@pytest.mark.parametrize("when", ["it was removed", "another rank wrote"])
def test_another_user_makes_it_later(
    shared: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Something cleans the place while the training runs; or its first rank was lost."""
    take = 'mkdir "$1" && chmod 777 "$1"'
    with Snapshots("a training", share=1, folder=shared) as snapshots:
        if when == "another rank wrote":
            monkeypatch.setenv("LOCAL_RANK", "1")
            assert not snapshots.step(lambda: {"weights": WEIGHTS}, 1)
            monkeypatch.setenv("LOCAL_RANK", "0")
        else:
            assert snapshots.step(lambda: {"weights": WEIGHTS}, 1)
            snapshots.wait()
            shutil.rmtree(snapshots.root)
        as_nobody(take, snapshots.root)
        while snapshots.due_in() > 0:
            time.sleep(0.01)
        with pytest.warns(UserWarning, match="no snapshots are kept on this node: "):
            assert not snapshots.step(lambda: {"weights": WEIGHTS}, 2)
        assert list(snapshots.root.iterdir()) == []


@two_users
@pytest.mark.parametrize("how", ["folder", "link"])
def test_another_user_was_there_first(snapshots: Snapshots, how: str, tmp_path: Path) -> None:
    """The training goes on, with one warning; nothing of it is there, and nothing is removed."""
    own = tmp_path / "checkpoints"
    for number in range(3):
        (own / f"00000{number + 1}-step-{number}").mkdir(parents=True)
    made = {"folder": 'mkdir "$1" && chmod 777 "$1"', "link": 'ln -s "$2" "$1"'}[how]
    as_nobody(made, snapshots.root, own)
    assert snapshots.load() is None
    with pytest.warns(UserWarning, match="no snapshots are kept on this node: ") as warned:
        assert not snapshots.step(lambda: {"weights": WEIGHTS}, 1)
    assert not snapshots.step(lambda: {"weights": WEIGHTS}, 2)
    assert len(warned) == 1
    snapshots.wait()
    snapshots.clear()
    assert len(list(own.iterdir())) == 3
    assert how == "link" or list(snapshots.root.iterdir()) == []
