"""Merge the ranks' files of a trace, where the ranks have ended without doing so.

python -m mpiddp.tracing FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from mpiddp.tracing import merging


def main(arguments: list[str]) -> int:
    """Merge; return the exit status. Not collective."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m mpiddp.tracing FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    found = (folder / "ranks").glob("rank-*.json.gz")
    ranks = sorted(int(path.name.split("-")[1].split(".")[0]) for path in found)
    if not ranks:
        print(f"mpiddp.tracing: {folder} holds no trace", file=sys.stderr)
        return 1
    try:
        print(merging.merge(folder, ranks))
    except OSError as error:
        print(f"mpiddp.tracing: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
