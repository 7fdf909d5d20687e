"""Run the benchmarks one after another and keep their results.

    python benchmarks/run.py [--quick] [--sixteen | --collectives | --optimizer] [--output FOLDER]

Each part runs under its own mpirun and prints its table as it ends. At the end come the goals, the
results as FOLDER/results.json, and the plots, if there is matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests" / "support"))

import goals  # noqa: E402
import mpirun  # noqa: E402  # the one of the tests, which leaves no process behind
import plot  # noqa: E402
from names import GLOO, ONE_EACH, OURS, OURS_MPI  # noqa: E402

SHORT = ["8 x Linear(1024)", "200 x Linear(64)", "convolutions"]
FEW = [OURS, GLOO, ONE_EACH]


@dataclass
class Part:
    """One mpirun: a script, its ranks, its arguments, and the seconds it may take."""

    script: str
    ranks: int
    arguments: Sequence[object]
    limit: float


def parts(quick: bool, sixteen: bool, collectives: bool, optimizer: bool) -> list[Part]:
    """Return what to run, in order."""
    if optimizer:
        seconds = 3 if quick else 5
        return [Part("optimizer_step.py", ranks, ["--seconds", seconds], 1500) for ranks in (2, 4)]
    if collectives:
        few = ["--sizes", 8, 32 << 10, 1 << 20, 16 << 20] if quick else []
        seconds, rounds = (28, 5) if quick else (270, 15)
        return [
            *(
                Part("collectives.py", ranks, ["--seconds", seconds, *few], 3 * seconds + 60)
                for ranks in (2, 4)
            ),
            *(Part("overlap.py", ranks, ["--rounds", rounds], 120) for ranks in (2, 4)),
        ]
    if sixteen:
        small = ["--models", *SHORT, "transformer", "convolutions, buffers off"]
        # Sixteen replicas of 200 MB: with more candidates they need more than 24 GB.
        large = ["--models", "3 x Linear(4096)", "--candidates", *FEW]
        return [
            Part("exposed.py", 16, ["--seconds", 60, *small], 3000),
            Part("exposed.py", 16, ["--seconds", 60, *large], 1500),
        ]
    if quick:
        few = ["--candidates", *FEW]
        return [
            Part("exposed.py", 2, ["--seconds", 4], 400),
            Part("exposed.py", 4, ["--seconds", 4, "--models", *SHORT], 300),
            Part(
                "exposed.py", 2, ["--seconds", 3, "--views", "off", *few, "--models", *SHORT], 200
            ),
        ]
    return [
        Part("exposed.py", 2, ["--seconds", 22, "--views", "both"], 900),
        Part("exposed.py", 4, ["--seconds", 30, "--views", "both"], 1500),
        Part("one_bucket.py", 2, [], 300),
        Part("construction.py", 2, [], 300),
        Part("memory.py", 2, [], 200),
        Part("memory.py", 2, ["--candidate", OURS_MPI], 200),
        Part("memory.py", 2, ["--candidate", GLOO], 200),
    ]


def run(part: Part, folder: Path) -> dict[str, Any] | None:
    """Run one part and print its table; return its results, None if it failed."""
    file = folder / "part.json"
    file.unlink(missing_ok=True)
    arguments = [str(HERE / part.script), *map(str, part.arguments), "--json", str(file)]
    began = time.monotonic()
    try:
        done = mpirun.run(part.ranks, arguments, part.limit)
    except TimeoutError as error:
        print(error, file=sys.stderr)
        return None
    print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        print(f"{part.script}: exit status {done.returncode}", done.stderr[-4000:], file=sys.stderr)
        return None
    print(f"[{part.script}: {time.monotonic() - began:.0f} s]", file=sys.stderr, flush=True)
    # A part whose candidate does not exist here says so and writes nothing.
    results: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return results


def main() -> int:
    """Run everything; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="about 4 minutes instead of 10")
    parser.add_argument("--sixteen", action="store_true", help="16 ranks, nothing else")
    parser.add_argument(
        "--collectives", action="store_true", help="torch.distributed's collectives, nothing else"
    )
    parser.add_argument(
        "--optimizer", action="store_true", help="whole steps with the optimizer, nothing else"
    )
    parser.add_argument("--output", type=Path, default=Path("build/bench"), metavar="FOLDER")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    cores = len(os.sched_getaffinity(0))
    if (load := os.getloadavg()[0]) > 0.3 * cores:
        print(
            f"The load of this machine is {load:.1f} on {cores} cores: figures of a machine that "
            f"is busy otherwise mean little.",
            file=sys.stderr,
        )
    results: dict[str, Any] = {}
    failed = 0
    with tempfile.TemporaryDirectory(prefix="mpiddp-bench-") as name:
        for part in parts(args.quick, args.sixteen, args.collectives, args.optimizer):
            measured = run(part, Path(name))
            if measured is None:
                failed += 1
                continue
            for key, value in measured.items():
                if key == "machine":
                    results[key] = value
                else:
                    results.setdefault(key, []).extend(value)
    if not results:
        return 1
    print(goals.report(results), end="\n\n")
    file = args.output / "results.json"
    file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    written = [file]
    try:
        written += plot.draw([results], args.output)
    except ImportError:
        print("no plots: there is no matplotlib (pip install matplotlib)", file=sys.stderr)
    print("written:", *written)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
