"""Say in words what the flight recorders' files of a job tell, or ask its ranks to write them.

    python -m mpiddp.flight_recorder [--prefix PREFIX] [--json] FOLDER
    python -m mpiddp.flight_recorder --ask [PATTERN]

--prefix: what the files' names begin with, before the rank, where the folder holds several jobs'.
--json: print the records of all ranks as JSON instead.
--ask: send the signal to all ranks of this user on this host, or to those whose command lines have
PATTERN in them, a regular expression.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from mpiddp.flight_recorder import analysis, ranks_here


def main(arguments: Sequence[str], name: str = "python -m mpiddp.flight_recorder") -> int:
    """Print the answer; return the exit status. Not collective.

    Args:
        arguments: the command line, after the name.
        name: what the user has typed for this command.
    """
    parser = argparse.ArgumentParser(
        prog=name,
        description="Say in words what the flight recorders' files of a job tell.",
    )
    parser.add_argument("folder", type=Path, nargs="?", help="where the files of all ranks are")
    parser.add_argument("--prefix", help="what their names begin with, before the rank")
    parser.add_argument("--json", action="store_true", help="print the records as JSON instead")
    parser.add_argument(
        "--ask",
        nargs="?",
        const="",
        metavar="PATTERN",
        help="let the ranks on this host write theirs: those whose command lines have the regular "
        "expression PATTERN in them, or all of this user",
    )
    options = parser.parse_args(arguments)
    if options.ask is not None:
        if options.folder is not None:
            parser.error("--ask takes no folder")
        return ask(options.ask)
    if options.folder is None:
        parser.error("name a folder, or --ask")
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


def ask(pattern: str) -> int:
    """Let the ranks on this host write their files; return the exit status. Not collective."""
    try:
        found = ranks_here.find(pattern)
    except re.error as error:
        print(f"mpiddp.flight_recorder: {pattern!r} is no regular expression: {error}",
              file=sys.stderr)  # fmt: skip
        return 2
    asked = 0
    for rank in found:
        who = f"rank {rank.rank} (process {rank.process_id}: {rank.command})"
        problem = ranks_here.ask(rank)
        if problem:
            print(f"{who} cannot be asked: {problem}", file=sys.stderr)
        else:
            asked += 1
            print(f"{who} writes {rank.path or 'where it says on stderr'}")
    if not found:
        which = f" with {pattern!r} in its command line" if pattern else ""
        print(f"mpiddp.flight_recorder: no rank of mpiddp{which} runs here as this user",
              file=sys.stderr)  # fmt: skip
    return 0 if asked else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
