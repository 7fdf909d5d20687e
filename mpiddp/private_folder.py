"""A folder of this user's alone, in a place where all users may write, such as /tmp."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

__all__ = ["private_folder"]


def private_folder(path: Path) -> Path:
    """Make a folder that only this user can read and write, or take the one that is there.

    Not collective. Another user may have made it first, or put a link in its place: what is written
    there could be read or changed, and what lies there could be the other's.

    Args:
        path: of the folder; the one above must be there.

    Raises:
        PermissionError: it is another user's, or a link.
        OSError: it cannot be made, or it is a file of this user's.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError as error:
        status = os.lstat(path)
        if status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode):
            raise
        raise PermissionError(f"{path} is no folder that this user has made") from error
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to user {status.st_uid}, so it is not used")
        if status.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return path
