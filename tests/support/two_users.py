"""A place where all users may write, and another user who was there first."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["NOBODY", "as_nobody", "open_to_all", "two_users"]

NOBODY = 65534

two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@contextmanager
def open_to_all() -> Iterator[Path]:
    """Return a folder with the modes of /tmp and /dev/shm."""
    # pytest's own folders are private.
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o1777)
        yield folder


def as_nobody(shell: str, *arguments: Path) -> None:
    """Run a line of the shell as another user; $1 is the first argument."""
    command = ["/bin/sh", "-c", shell, "sh", *map(str, arguments)]
    subprocess.run(command, check=True, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/")
