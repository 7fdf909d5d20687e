"""Print what pip is to install: a wheel in dist/ that fits here, else ".", the sources.

    python packaging/fitting_wheel.py [--any]

A wheel fits that is for this Python and machine, and newer than all sources. With --any it may be
older, and there must be one.
"""

import platform
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("setup.py", "pyproject.toml", "mpiddp_*.py", "cython/*/*", "mpiddp/*", "mpiddp/*/*")


def fitting(any_age: bool) -> Path | None:
    """Return the newest wheel for this Python and machine, None if there is none that fits."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    found = ROOT.glob(f"dist/mpiddp-*-{python}-*{platform.machine()}.whl")
    wheels = sorted(found, key=lambda path: path.stat().st_mtime)
    if not wheels or any_age:
        return wheels[-1] if wheels else None
    sources = [path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file()]
    newest = max(path.stat().st_mtime for path in sources)
    return wheels[-1] if wheels[-1].stat().st_mtime > newest else None


def main() -> None:
    """Print it, or say that there is none."""
    any_age = "--any" in sys.argv[1:]
    wheel = fitting(any_age)
    if wheel is None and any_age:
        sys.exit("There is no wheel for this Python in dist/. To make one: make wheel")
    print(wheel.relative_to(ROOT) if wheel else ".")


main()
