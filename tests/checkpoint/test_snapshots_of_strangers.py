"""In node memory all users may write: none reads a snapshot, and no other's folder is used."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from two_users import as_nobody, open_to_all, two_users

from mpiddp.checkpoint import Snapshots

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


def test_left_by_an_earlier_version(snapshots: Snapshots) -> None:
    """One that was open to all is closed."""
    snapshots.root.mkdir(mode=0o755)
    assert snapshots.step(lambda: {"weights": WEIGHTS}, 1)
    assert snapshots.root.stat().st_mode & 0o777 == 0o700


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
