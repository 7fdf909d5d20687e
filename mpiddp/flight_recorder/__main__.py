"""Say in words what the flight recorders' files of a job tell.

    python -m mpiddp.flight_recorder [--prefix PREFIX] [--json] FOLDER

--prefix: what the files' names begin with, before the rank, where the folder holds several jobs'.
--json: print the records of all ranks as JSON instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mpiddp.flight_recorder import analysis


def main(arguments: Sequence[str]) -> int:
    """Print the answer; return the exit status. Not collective."""
    parser = argparse.ArgumentParser(
        prog="python -m mpiddp.flight_recorder",
        description="Say in words what the flight recorders' files of a job tell.",
    )
    parser.add_argument("folder", type=Path, help="where the files of all ranks are")
    parser.add_argument("--prefix", help="what their names begin with, before the rank")
    parser.add_argument("--json", action="store_true", help="print the records as JSON instead")
    options = parser.parse_args(arguments)
    try:
        dumps = analysis.read(options.folder, options.prefix)
    except (OSError, ValueError) as error:
        print(f"mpiddp.flight_recorder: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({dump.rank: dump.content for dump in dumps}, indent=1))
    else:
        print("\n".join(analysis.explain(dumps)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
