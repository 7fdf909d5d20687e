"""Measure steps between hosts at several link rates, on hosts made of namespaces. Needs root.

    python benchmarks/between_hosts.py [--layouts 2x1 2x2 4x1] [--rates 1 2 10] [--output FOLDER]
        [--models MODEL ...] [--set NAME=VALUE ...]

The hosts come from tests/lab and share this machine's cores: compare within one layout and rate.
The bound of a step is the larger of its compute (the same step under no_sync) and its wire time:
what a host must send and receive, 2 (H - 1) / H times the gradients for H hosts, over the link's
rate. A wire that is full all the time takes about 1.05 of that, the rest is protocol headers.
"hidden" is the share of the wire time that overlaps with compute: of both together, less the step.
Nothing can be sent before backward, so forward + wire is a second bound. For a model whose
backward takes as long as the wire, nearly all of it could be hidden, if sending cost no core.
So one model has a backward that sleeps, as a thread does whose device computes; it is measured at
the lowest rate alone. With a hook that sends 16 bits the wire time is half.

"sent MB" is what the busiest host's link sent in a step, as the kernel counts it (acknowledgements
count, too; headers once for each 64 KB that are handed over), and then over the bytes that the
gradients have in float32. "core ms" is the processor time that synchronisation adds to a step on a
host, all threads of its ranks: that of synchronised steps less that under no_sync. What the kernel
does for the network counts where it runs in the rank's name. "core s / wire s" is that over the
wire time.

While this runs, the kernel does not group processes by session (sched_autogroup_enabled): with it,
Linux 6.18 lets one of two ranks on a core wait for 0.1 s once they sleep and wake. Ranks of a batch
system share one control group, where that does not happen.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import plot_hosts
from measuring import Record, ratio, show_ratio, table
from names import FLATTENED, GLOO, GLOO_FP16, HOOKED, NAMES, OURS, OURS_FP16, OURS_MPI
from workloads import ELSEWHERE, EVEN, MODELS_BETWEEN_HOSTS

HERE = Path(__file__).resolve().parent
CLUSTER = HERE.parent / "tests" / "lab" / "cluster"
MODELS = ("8 x Linear(1024)", "transformer", EVEN, ELSEWHERE)
# Their backward takes as long as the wire.
MATCHED = (EVEN, ELSEWHERE)
# What a Makefile or an mpirun around this may have set for one machine.
LEFT_OUT = ("OMPI_", "PRTE_", "PMIX_", "PMI_", "MPIR_", "MPICH_")
# For each rank. Open MPI's wheel prints an error for each window while it tries ucx.
FOR_RANKS = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


class Hosts:
    """Hosts that exist until this object's process ends."""

    def __init__(self, folder: Path) -> None:
        self.lab = folder / "lab"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(LEFT_OUT)}
        self.environment = {**environment, "LAB_DIR": str(self.lab)}

    def cluster(self, *arguments: str, limit: float = 60) -> str:
        """Run the lab's command; return what it printed."""
        done = subprocess.run(
            # The command goes on in namespaces: only timeout(1) can end it whole.
            ["timeout", "-k", "5", str(limit), str(CLUSTER), *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"cluster {' '.join(arguments[:4])}: exit status {done.returncode}\n"
                f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )
        return done.stdout

    def launch(self, hosts: int, ranks: int, arguments: Sequence[str], limit: float) -> str:
        """Run a Python program with `ranks` ranks on each host; return what it printed."""
        mpirun = str(Path(sys.executable).parent / "mpirun")
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=True)
        agent = str(self.lab / "agent")
        program = [sys.executable, *arguments]
        if "Open MPI" in version.stdout:
            options = ["--prtemca", "plm_ssh_agent", agent]
            options += ["--hostfile", str(self.lab / "hosts.openmpi")]
            options += ["--map-by", f"ppr:{ranks}:node:oversubscribe"]
            for name, value in FOR_RANKS.items():
                options += ["-x", f"{name}={value}"]
        else:
            options = ["-launcher", "ssh", "-launcher-exec", agent]
            options += ["-f", str(self.lab / "hosts.mpich"), "-ppn", str(ranks)]
            for name, value in FOR_RANKS.items():
                options += ["-genv", name, value]
        command = [mpirun, *options, "-n", str(hosts * ranks), *program]
        try:
            return self.cluster("run", "head", *command, limit=limit)
        finally:
            self.cluster("clear")


@contextlib.contextmanager
def hosts_up(count: int) -> Iterator[Hosts]:
    """Make hosts, and end them also when this process is killed."""
    # In /tmp whatever TMPDIR is: the hosts have it in common.
    with tempfile.TemporaryDirectory(prefix="mpiddp-hosts-", dir="/tmp") as name:
        hosts = Hosts(Path(name))
        guard = subprocess.Popen(
            ["bash", "-c", 'cat; "$0" clear; "$0" down', str(CLUSTER)],
            env=hosts.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            hosts.cluster("up", str(count), limit=200)
            yield hosts
        finally:
            guard.communicate(timeout=60)


@contextlib.contextmanager
def ungrouped_sessions() -> Iterator[None]:
    """Let the kernel share cores among processes, whatever their session."""
    setting = Path("/proc/sys/kernel/sched_autogroup_enabled")
    before = setting.read_text() if setting.exists() else None
    try:
        if before is not None:
            setting.write_text("0")
        yield
    finally:
        if before is not None:
            setting.write_text(before)


def wire_seconds(size: int, hosts: int, gigabits: float) -> float:
    """Return how long a host's link is busy with an all-reduce of `size` bytes."""
    return 2 * (hosts - 1) / hosts * 8 * size / (gigabits * 1e9)


def own_wire_seconds(result: Record, candidate: str | None) -> float:
    """Return the wire time of a candidate, or of gradients in their own type."""
    size = 2 * result["elements"] if candidate in HOOKED else result["bytes"]
    return wire_seconds(size, result["nodes"], result["gigabits"])


def model_bytes(name: str) -> int:
    """Return the size of a model's gradients."""
    model, _ = MODELS_BETWEEN_HOSTS[name].make()
    return sum(4 * parameter.numel() for parameter in model.parameters())


def variable(text: str) -> tuple[str, str]:
    """Return the name and the value in NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def launches(
    models: Sequence[str], hosts: int, gigabits: float, lowest: bool
) -> Iterator[list[str]]:
    """Yield what exposed.py gets after --models, for each time that it runs."""
    plain = [name for name in models if name not in MATCHED]
    if plain:
        yield plain
    for name in MATCHED:
        if name in models and (lowest or name != ELSEWHERE):
            yield [name, "--backward", str(wire_seconds(model_bytes(name), hosts, gigabits))]


def report(result: Record) -> str:
    """Return the table of one model at one rate."""
    wire = own_wire_seconds(result, None)
    alone = statistics.median(statistics.median(r["alone"]) for r in result["records"])
    title = (
        f"{result['model']}, {result['nodes']} hosts x {result['ranks'] // result['nodes']}, "
        f"{result['gigabits']:g} Gbit/s: compute {1e3 * alone:.0f} ms (forward "
        f"{1e3 * result['forward']:.0f}), wire {1e3 * wire:.0f} ms"
    )
    rows = [
        ["", "step ms", "step / bound", "(90 %)", "step / (forward + wire)", "hidden"]
        + ["sent MB", "/ float32", "core ms", "core s / wire s"]
    ]
    for record in sorted(result["records"], key=lambda record: NAMES.index(record["candidate"])):
        wire = own_wire_seconds(result, record["candidate"])
        bounds = [max(compute, wire) for compute in record["alone"]]
        value, _, spread = show_ratio(ratio(record["synchronised"], bounds)).partition(" ")
        pairs = zip(record["synchronised"], record["alone"], strict=True)
        hidden = statistics.median(1 - (step - compute) / wire for step, compute in pairs)
        step = statistics.median(record["synchronised"])
        late = f"{step / (result['forward'] + wire):.2f}"
        step_shown = f"{1e3 * step:.0f}"
        sent = statistics.median(record["sent"])
        cores = zip(record["core"], record["core_alone"], strict=True)
        core = statistics.median(busy - alone for busy, alone in cores)
        rows.append(
            [record["candidate"], step_shown, value, spread, late, f"{hidden:.0%}"]
            + [f"{sent / 1e6:.1f}", f"{sent / (4 * result['elements']):.2f}"]
            + [f"{1e3 * core:.0f}", f"{core / wire:.2f}"]
        )
    lines = [title, table(rows)]
    lines += [f"without {name}: {why}" for name, why in result["notes"].items()]
    return "\n".join(lines)


def main() -> int:
    """Measure all layouts and rates; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", default=["2x1", "2x2", "4x1"], metavar="HxR")
    parser.add_argument("--rates", nargs="+", type=float, default=[1, 2, 10], metavar="GBIT")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        type=variable,
        metavar="NAME=VALUE",
        help="variables for all ranks",
    )
    parser.add_argument(
        "--candidates",
        nargs="+",
        choices=NAMES,
        default=[OURS, OURS_MPI, GLOO, FLATTENED, OURS_FP16, GLOO_FP16],
    )
    parser.add_argument("--seconds", type=float, default=20, help="for each model and rate (20)")
    parser.add_argument("--output", type=Path, default=Path("build/bench-hosts"), metavar="FOLDER")
    args = parser.parse_args()
    if os.geteuid() != 0 or not shutil.which("unshare"):
        print("Making hosts needs root and unshare; nothing is measured.", file=sys.stderr)
        return 1
    args.output.mkdir(parents=True, exist_ok=True)
    variables = dict(args.set)
    FOR_RANKS.update(variables)

    results: dict[str, Any] = {"variables": variables, "between_hosts": []}
    for layout in args.layouts:
        count, ranks = (int(number) for number in layout.split("x"))
        with hosts_up(count) as hosts, ungrouped_sessions():
            for gigabits in args.rates:
                hosts.cluster("rate", f"{gigabits:g}gbit")
                file = hosts.lab.parent / "exposed.json"
                program = [str(HERE / "exposed.py"), "--json", str(file)]
                program += ["--seconds", str(args.seconds)]
                program += ["--candidates", *args.candidates, "--models"]
                for models in launches(args.models, count, gigabits, gigabits == min(args.rates)):
                    hosts.launch(count, ranks, [*program, *models], limit=120 + 20 * args.seconds)
                    measured = json.loads(file.read_text(encoding="utf-8"))
                    file.unlink()
                    results["machine"] = measured["machine"]
                    for result in measured["exposed"]:
                        result["gigabits"] = gigabits
                        results["between_hosts"].append(result)
                        print(report(result), end="\n\n", flush=True)
    file = args.output / "results.json"
    file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    written = [file]
    try:
        plot_hosts.draw(results, args.output / "hosts.svg")
        written.append(args.output / "hosts.svg")
    except ImportError:
        print("no plot: there is no matplotlib (pip install matplotlib)", file=sys.stderr)
    print("written:", *written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
