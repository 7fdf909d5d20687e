"""Show what the ranks of this user's jobs on this node do, as top does of processes.

    python -m mpiddp.top [--json | --once] [--interval SECONDS] [PATTERN]
    srun --overlap --jobid JOB -N NODES --ntasks-per-node=1 python -m mpiddp.top

In a terminal it redraws until q or Ctrl-C, else it prints once.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import socket
import sys
from collections.abc import Sequence

from mpiddp.top.jobs import Watcher
from mpiddp.top.report import as_json
from mpiddp.top.text import as_text

NEEDS_RICH = "to redraw in a terminal it needs rich: python -m pip install 'mpiddp[top]'"


def main(arguments: Sequence[str], name: str = "python -m mpiddp.top") -> int:
    """Show it; return the exit status. Not collective.

    Args:
        arguments: the command line, after the name.
        name: what the user has typed for this command.
    """
    parser = argparse.ArgumentParser(
        prog=name,
        description="Show what the ranks of this user's jobs on this node do.",
        epilog="On all nodes of a job of SLURM: srun --overlap --jobid JOB -N NODES "
        "--ntasks-per-node=1 python -m mpiddp.top",
    )
    parser.add_argument(
        "pattern",
        nargs="?",
        default="",
        help="only ranks whose command lines have this regular expression in them",
    )
    parser.add_argument("--json", action="store_true", help="print it once, as a line of JSON")
    parser.add_argument("--once", action="store_true", help="print it once, in a terminal too")
    parser.add_argument(
        "--interval",
        type=_interval,
        default=1.0,
        metavar="SECONDS",
        help="between two looks in a terminal (1)",
    )
    options = parser.parse_args(arguments)
    try:
        watcher = Watcher(options.pattern)
    except re.error as error:
        print(f"mpiddp.top: {options.pattern!r} is no regular expression: {error}", file=sys.stderr)
        return 2
    try:
        return _show(watcher, options)
    finally:
        watcher.close()


def _interval(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError("from 0.1 to 3600")
    return seconds


def _show(watcher: Watcher, options: argparse.Namespace) -> int:
    host = socket.gethostname()
    if options.json:
        return _say(as_json(host, watcher.look()))
    terminal = sys.stdout.isatty()
    if terminal and not options.once and os.environ.get("TERM", "dumb") != "dumb":
        try:
            from mpiddp.top import terminal as in_terminal
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "rich":
                raise
            print(f"mpiddp.top: {NEEDS_RICH}", file=sys.stderr)
        else:
            return in_terminal.watch(host, watcher.look, options.interval)
    width = shutil.get_terminal_size().columns if terminal else None
    mixed = os.environ.get("SLURM_STEP_NUM_NODES", "1") != "1"
    return _say(as_text(host, watcher.look(), width, mixed))


def _say(text: str) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # a command line may have any letters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
