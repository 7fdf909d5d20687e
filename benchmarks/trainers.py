"""Run public trainers under torchrun with Gloo and under mpirun, and compare their losses.

    python benchmarks/trainers.py [--folder FOLDER] [--rounds 3] [--json FILE] [NAME ...]

The programs lie in tests/support/scripts/, and none knows of MPI. What they need is installed once
into FOLDER/trainers-HASH, outside of the clone, for the environments of both MPIs: torch itself is
each environment's own. Each program runs by turns under torchrun and under `python -m mpiddp`. It
fails unless the losses of all ranks, and what else these say, are the same but for rounding; the
others then run all the same. Steps a second are the median over the rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, distributions
from itertools import pairwise
from pathlib import Path
from typing import Any

from measuring import describe_machine

from mpiddp.mpi.library import linked_version

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "tests" / "support" / "scripts"
BIN = Path(sys.executable).parent
RANKS = 2
# Losses may differ in the order of sums.
TOLERANCE = 1e-4
UNLIKE = {"times", "wrapper"}  # of what a rank says; all else is compared
LIMIT = 600  # seconds of one run, on a machine that is busy with other things as well


@dataclass(frozen=True)
class Program:
    """One script, and what it needs beside torch.

    Attributes:
        name: by which it is chosen.
        packages: of the registry; the table names the versions of these.
        script: below tests/support/scripts/.
        arguments: what follows the folder that a script may write to.
        change: what must change for it to run on CPUs at all; "" for nothing.
        more: packages that it needs as well.
        apart: packages without what they ask for, which does not fit this torch; for it alone.
        file: of the first package, the one file that is tried; it follows `arguments`.
    """

    name: str
    packages: tuple[str, ...]
    script: str
    arguments: tuple[str, ...] = ()
    change: str = ""
    more: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    file: str = ""


PROGRAMS = (
    Program("pyg", ("torch_geometric",), "trainers/graph_batches.py"),
    Program("webdataset", ("webdataset",), "trainers/web_shards.py"),
    Program(
        "lightning", ("lightning",), "trainers/lightning_averages.py", change='accelerator="cpu"'
    ),
    Program(
        "adapters",
        ("peft", "trl", "datasets"),
        "trainers/language_adapters.py",
        change="use_cpu=True",
    ),
    Program(
        "sentences",
        ("sentence-transformers", "datasets"),
        "trainers/sentence_pairs.py",
        change="use_cpu=True",
    ),
    Program("ignite", ("pytorch-ignite",), "libraries/asking_libraries.py", ("ignite",)),
    Program("monai", ("monai",), "libraries/asking_libraries.py", ("monai",)),
    Program(
        "composer",
        ("mosaicml",),
        "trainers/composer_classifier.py",
        change='device="cpu"',
        more=(
            *("coolname", "importlib-metadata", "mosaicml-cli", "pillow", "psutil", "py-cpuinfo"),
            *("requests", "tabulate", "torch-optimizer", "torchmetrics", "tqdm"),
        ),
        apart=("mosaicml", "torchvision<0.29"),
    ),
    Program(
        "yolox",
        ("yolox",),
        "trainers/object_gathering.py",
        ("YOLOX",),
        "its yolox/utils/dist.py alone",
        more=("loguru",),
        file="yolox/utils/dist.py",
    ),
    Program(
        "fast-reid",
        ("fastreid",),
        "trainers/object_gathering.py",
        ("fast-reid",),
        "its fastreid/utils/comm.py alone",
        file="fastreid/utils/comm.py",
    ),
    Program("nequip", ("nequip",), "trainers/nequip_potential.py", ("simple",), "accelerator: cpu"),
    Program(
        "nequip-ddp", ("nequip",), "trainers/nequip_potential.py", ("ddp",), "accelerator: cpu"
    ),
    Program(
        "anemoi",
        ("anemoi-training", "anemoi-models"),
        "trainers/anemoi_shards.py",
        change='accelerator="cpu", scaled_dot_product_attention',
        # Left to itself, pip tries older ones of each for minutes.
        more=(
            *("anemoi-datasets==0.5.47", "anemoi-graphs==0.9.0", "anemoi-models==0.13.0"),
            *("anemoi-training==0.10.0", "anemoi-transform==0.5.1", "anemoi-utils==0.5.14"),
            *("earthkit-data==0.20.0", "earthkit-geo==0.5.2", "earthkit-meteo==0.6.2"),
            *("earthkit-regrid==0.5.1", "earthkit-utils==0.3.0", "zarr==2.18.7"),
            *("numcodecs==0.15.2", "pandas==2.3.3"),
        ),
    ),
)


class Failed(Exception):
    """A program ended as it should not, or its losses differ."""


def install(folder: Path) -> Path:
    """Return where the packages are, installed there unless they are already."""
    whole = [program for program in PROGRAMS if not program.file]
    wanted = {package for program in PROGRAMS for package in program.more}
    wanted.update(name for each in whole if not each.apart for name in each.packages)
    constraints = ROOT / "constraints.txt"
    place = folder / f"trainers-{_key(wanted, constraints.read_text(encoding='utf-8'))}"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = place / "lib" / version / "site-packages"
    if not (place / "whole").exists():
        print(f"Installing {', '.join(sorted(wanted))} into {place} (minutes, once)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        quietly = ("--disable-pip-version-check", "--quiet")
        pip: list[str | Path] = [place / "bin" / "python", "-m", "pip", *quietly]
        with tempfile.TemporaryDirectory() as beside:
            # What it sees there, pip does not install again.
            link("torch", Path(beside))
            environment = {**os.environ, "PYTHONPATH": beside}
            for command in (
                [*pip, "install", "-c", constraints, *sorted(wanted)],
                # Some ask for it, none of these needs it, and the registry's does not fit a torch
                # for CPUs: torchmetrics and transformers import it where it is there, and fail.
                [*pip, "uninstall", "--yes", "torchvision"],
            ):
                subprocess.run(command, env=environment, check=True)
            for program in PROGRAMS:
                apart = place / "apart" / program.name
                if program.apart:
                    alone = [*pip, "install", "--no-deps", "--target", apart]
                    subprocess.run([*alone, *program.apart], env=environment, check=True)
                elif program.file:
                    download = [*pip, "download", "--no-deps", "--no-build-isolation"]
                    fetch(download, environment, program, apart)
        # It comes before each environment's own packages, so it would hide them.
        for own in ("torch", "mpi4py", "mpiddp"):
            if (packages / own).exists():
                sys.exit(f"{own} was installed into {packages}: it is each environment's own")
        (place / "whole").touch()
    return packages


def _key(wanted: set[str], constraints: str) -> str:
    """Return what a folder is named for: all that decides what is in it, and no environment."""
    alone = [(each.name, each.packages, each.apart, each.file) for each in PROGRAMS]
    kind = [sorted(wanted), alone, sys.version, distribution("torch").version, constraints]
    return hashlib.sha256(json.dumps(kind).encode()).hexdigest()[:12]


def link(name: str, folder: Path) -> None:
    """Link a package of this environment into a folder, and what it needs."""
    try:
        found = distribution(name)
    except PackageNotFoundError:  # for another system
        return
    tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "/")}
    if any(top.endswith(".dist-info") and (folder / top).exists() for top in tops):
        return
    for top in tops:
        if not (folder / top).exists():
            (folder / top).symlink_to(Path(str(found.locate_file(top))))
    for needed in found.requires or ():
        if "extra ==" not in needed:
            link(re.split(r"[^\w.-]", needed)[0], folder)


def fetch(
    download: Sequence[str | Path], environment: dict[str, str], program: Program, apart: Path
) -> None:
    """Unpack a package, which need not run here, into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*download, "-d", folder, *program.packages]
        subprocess.run(command, env=environment, check=True)
        [archive] = Path(folder).iterdir()
        apart.mkdir(parents=True)
        version = archive.name.split("-")[1].removesuffix(".tar.gz")
        (apart / "version").write_text(version, encoding="utf-8")
        shutil.unpack_archive(archive, apart, "zip" if archive.suffix == ".whl" else None)


def paths(packages: Path, program: Program) -> list[Path]:
    """Return where a program's packages are, those for it alone first."""
    return [packages.parents[2] / "apart" / program.name, packages]


def run(program: Program, packages: Path, launched: bool) -> dict[tuple[str, int], dict[str, Any]]:
    """Return what each rank says of each case: by mpirun where `launched`, else by torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(SCRIPTS / program.script), folder, *program.arguments]
        if program.file:
            apart = paths(packages, program)[0]
            command.append(str(next(apart.glob(f"**/{program.file}"))))
        if launched:
            before = [str(BIN / "mpirun"), "-n", str(RANKS), sys.executable, "-m", "mpiddp"]
        else:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            before = [sys.executable, "-m", "torch.distributed.run"]
            before += ["--nproc-per-node", str(RANKS), "--master-port", str(port)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths(packages, program))),
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        # Asked to end, both launchers end their ranks; killed, neither could. In the foreground the
        # terminal's Ctrl-C reaches them as well.
        began = time.monotonic()
        done = subprocess.run(
            ["timeout", "--foreground", "-k", "30", str(LIMIT), *before, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    late = time.monotonic() - began >= LIMIT
    said: dict[tuple[str, int], dict[str, Any]] = {}
    for whole in done.stdout.splitlines():
        line = whole
        while line.startswith('{"'):  # the lines of two ranks may be one
            one, end = json.JSONDecoder().raw_decode(line)
            line = line[end:]
            if "case" in one:
                said[one["case"], one["rank"]] = one
    by = "python -m mpiddp" if launched else "torchrun"
    if done.returncode != 0:
        print(f"{program.name}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}", flush=True)
    # Worlds of Gloo fail at their end at times, after all was said.
    if not said or (launched and done.returncode != 0):
        how = f"took {LIMIT} seconds" if late else f"code {done.returncode}"
        raise Failed(f"{how} under {by}")
    return said


def compare(program: Program, packages: Path, rounds: int) -> list[dict[str, Any]]:
    """Return a record of each case, or raise if the losses differ."""
    speeds: dict[tuple[str, bool], list[float]] = {}
    said: dict[bool, dict[tuple[str, int], dict[str, Any]]] = {}
    for number in range(rounds):
        for launched in (True, False) if number % 2 else (False, True):
            said[launched] = run(program, packages, launched)
            for (case, rank), one in said[launched].items():
                steps = [after - before for before, after in pairwise(one.get("times", ()))]
                if rank == 0 and steps:
                    speeds.setdefault((case, launched), []).append(1 / statistics.median(steps))
        if sorted(said[True]) != sorted(said[False]):
            raise Failed(f"said {sorted(said[True])} here, {sorted(said[False])} on Gloo")
        for place, one in said[True].items():
            theirs = said[False][place]
            for key in sorted({*one, *theirs} - UNLIKE):
                if not _same(one.get(key), theirs.get(key)):
                    here, there = one.get(key), theirs.get(key)
                    raise Failed(f"{place} has {key} {here} here, {there} on Gloo")
    return [
        {
            "case": case,
            "program": program.name,
            "packages": {name: _version(packages, program, name) for name in program.packages},
            "change": program.change,
            "wrapper": one["wrapper"],
            "losses": [one["losses"][0], one["losses"][-1]],
            "losses on Gloo": [said[False][case, 0]["losses"][index] for index in (0, -1)],
            "steps": len(one["losses"]),
            "steps a second": speeds.get((case, True), []),
            "steps a second on Gloo": speeds.get((case, False), []),
        }
        for (case, rank), one in said[True].items()
        if rank == 0
    ]


def _same(ours: Any, theirs: Any) -> bool:
    """Return whether two values of JSON are the same but for rounding."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs) <= TOLERANCE * max(1.0, abs(theirs))
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return bool(ours == theirs)


def _version(packages: Path, program: Program, name: str) -> str:
    """Return the version of a package as it is installed, or unpacked."""
    if program.file:
        return (paths(packages, program)[0] / "version").read_text("utf-8")

    wanted = name.lower().replace("_", "-")
    for found in distributions(path=[str(path) for path in paths(packages, program)]):
        if found.name.lower().replace("_", "-") == wanted:
            return found.version
    return "unknown"


def main() -> None:
    """Install, run, compare, and write what came of it; with 1 at the end if one failed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpiddp"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=cache, help="for what is installed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("names", nargs="*", help="of the programs; none: all")
    arguments = parser.parse_args()
    packages = install(arguments.folder)
    records, failures = [], []
    for program in PROGRAMS:
        if arguments.names and program.name not in arguments.names:
            continue
        try:
            compared = compare(program, packages, arguments.rounds)
        except Failed as failure:
            failures.append(f"{program.name} failed: {failure}")
            continue
        for record in compared:
            records.append(record)
            print(f"{record['case']}: losses {record['losses']}, as on Gloo", flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        written = {
            "machine": describe_machine(linked_version()),
            "ranks": RANKS,
            "trainers": records,
        }
        arguments.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
