"""Compare cost_model.py with steps measured between hosts made of namespaces. Needs root.

    python benchmarks/check_cost_model.py [--layouts 2x1 4x1 2x2] [--rates 0.5 1 2]

For each layout (hosts x ranks of each) latencies and bandwidths are measured on links without a
limit; at each rate then what a link carries, and steps (machine_parameters.py). The prediction
knows the former and the length of a step without synchronisation, and nothing else of the steps it
is compared with. scaling.md says what the errors were.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from between_hosts import HERE, Hosts, hosts_up
from cost_model import LANE_CHUNK, WIRES, Machine, bucket_sizes, step_seconds
from measuring import table
from names import GLOO, OURS, OURS_MPI

from mpiddp import settings
from mpiddp.transports.wire_choice import choose

TARGET = 0.15


def algorithm_of(candidate: str, nodes: int) -> str:
    """Return what the model calls the way of a candidate."""
    if candidate == OURS:
        return WIRES[choose(nodes, LANE_CHUNK, 4, settings.WIRE.read()).name]
    return {OURS_MPI: "flat", GLOO: "ring"}[candidate]


def machine_of(measured: dict[str, float], payload: float, algorithm: str, ranks: int) -> Machine:
    """Return the model's machine from what was measured; `payload` in bytes a second."""
    gloo = algorithm == "ring"
    latency = measured["gloo_latency"] if gloo else measured["latency_between"]
    inside = latency if gloo else measured.get("latency_inside", 0.0)
    return Machine(
        # What was sent already had its headers.
        link=payload,
        headers=1.0,
        latency_between=latency,
        latency_inside=inside,
        rendezvous=0.0 if gloo else measured["rendezvous"],
        rank_copy=measured["rank_copy"],
        rank_sum=measured["rank_sum"],
        stack=measured["stack"],
        # The rates are those of all ranks at once, on the cores that there are.
        cores=ranks,
    )


def compare(result: dict[str, Any], measured: dict[str, float]) -> list[dict[str, Any]]:
    """Return measured and predicted step of each candidate of one layout at one rate."""
    nodes = result["nodes"]
    ranks = result["ranks"] // nodes
    layers = result["parameters"]
    buckets = bucket_sizes([result["bytes"] / layers] * layers)
    cases = []
    for record in result["records"]:
        algorithm = algorithm_of(record["candidate"], nodes)
        backward = statistics.median(record["alone"])
        predicted = step_seconds(
            machine_of(measured, result["payload"], algorithm, ranks),
            algorithm,
            buckets,
            nodes,
            ranks,
            0.0,
            backward,
            trees="Open MPI" in result["mpi"],
        )
        step = statistics.median(record["synchronised"])
        cases.append(
            {
                "hosts": nodes,
                "ranks": ranks,
                "gigabits": result["gigabits"],
                "algorithm": algorithm,
                "candidate": record["candidate"],
                "mpi": result["mpi"],
                "backward": backward,
                "measured": step,
                "predicted": predicted,
                "error": predicted / step - 1,
                "exposed_error": (predicted - backward) / (step - backward) - 1,
                "rounds": len(record["synchronised"]),
                "load": result["load"],
            }
        )
    return cases


def report(cases: list[dict[str, Any]]) -> str:
    """Return the cases as a table."""
    heading = ["", "Gbit/s", "algorithm", "without ms", "step ms", "predicted ms", "error"]
    rows = [[*heading, "of the exposed part", "load"]]
    for case in cases:
        rows.append(
            [
                f"{case['hosts']} hosts x {case['ranks']}",
                f"{case['gigabits']:g}",
                case["algorithm"],
                f"{1e3 * case['backward']:.0f}",
                f"{1e3 * case['measured']:.0f}",
                f"{1e3 * case['predicted']:.0f}",
                f"{case['error']:+.1%}" + (" !" if abs(case["error"]) > TARGET else ""),
                f"{case['exposed_error']:+.0%}",
                f"{case['load']:.1f}",
            ]
        )
    return table(rows)


def on_ranks(hosts: Hosts, count: int, ranks: int, *arguments: str, limit: float) -> dict[str, Any]:
    """Run machine_parameters.py on all hosts; return what it wrote."""
    file = hosts.lab.parent / "measured.json"
    program = [str(HERE / "machine_parameters.py"), *arguments, "--json", str(file)]
    load = os.getloadavg()[0]
    hosts.launch(count, ranks, program, limit=limit)
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    # What the machine did before: the hosts' own programs count as well once they run.
    return {**result, "load": load}


def read(files: list[Path]) -> dict[str, Any]:
    """Return what earlier runs measured, with the predictions of today."""
    results: dict[str, Any] = {"parameters": [], "steps": [], "cases": []}
    for file in files:
        stored = json.loads(file.read_text(encoding="utf-8"))
        results["parameters"] += stored["parameters"]
        results["steps"] += stored["steps"]
        known = {(one["hosts"], one["ranks"]): one for one in stored["parameters"]}
        for result in stored["steps"]:
            layout = (result["nodes"], result["ranks"] // result["nodes"])
            results["cases"] += compare(result, known[layout])
    return results


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all layouts at all rates, and print as it goes."""
    results: dict[str, Any] = {"parameters": [], "steps": [], "cases": []}
    for layout in args.layouts:
        count, ranks = (int(number) for number in layout.split("x"))
        with hosts_up(count) as hosts:
            measured = on_ranks(hosts, count, ranks, "parameters", limit=60)
            results["parameters"].append({"hosts": count, "ranks": ranks, **measured})
            print(json.dumps(results["parameters"][-1]), file=sys.stderr, flush=True)
            wanted = [OURS, GLOO] if ranks == 1 else [OURS, OURS_MPI, GLOO]
            options = ["--backward", str(args.backward), "--seconds", str(args.seconds)]
            options += ["--candidates", *wanted]
            for gigabits in args.rates:
                hosts.cluster("rate", f"{gigabits:g}gbit")
                result = on_ranks(
                    hosts, count, ranks, "steps", *options, limit=90 + 8 * args.seconds
                )
                result["gigabits"] = gigabits
                results["steps"].append(result)
                cases = compare(result, measured)
                results["cases"] += cases
                print(report(cases), file=sys.stderr, flush=True)
    return results


def main() -> int:
    """Measure, predict, compare; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", default=["2x1", "4x1", "2x2"], metavar="HxR")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 1, 2], metavar="GBIT")
    parser.add_argument("--backward", type=float, default=0.3, help="seconds (0.3)")
    parser.add_argument("--seconds", type=float, default=10, help="for steps at each rate (10)")
    parser.add_argument("--output", type=Path, default=Path("build/cost-model"), metavar="FOLDER")
    parser.add_argument(
        "--read", nargs="+", type=Path, metavar="FILE", help="predict again, measure nothing"
    )
    args = parser.parse_args()
    if args.read is None and (os.geteuid() != 0 or not shutil.which("unshare")):
        print("Making hosts needs root and unshare; nothing is measured.", file=sys.stderr)
        return 1
    args.output.mkdir(parents=True, exist_ok=True)
    results = measure(args) if args.read is None else read(args.read)
    print(report(results["cases"]))
    off = [case for case in results["cases"] if abs(case["error"]) > TARGET]
    print(f"{len(results['cases'])} cases, {len(off)} off by more than {TARGET:.0%}")
    file = args.output / "cost-model.json"
    file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print("written:", file)
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
