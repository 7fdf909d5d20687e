"""Measure the large collectives between hosts at several link rates. Needs root.

    python benchmarks/collectives_on_hosts.py [--layouts 2x2] [--rates 2gbit 10gbit]
        [--sizes BYTES...] [--seconds S] [--json FILE]

The hosts come from tests/lab and share this machine's cores: compare within one layout and rate.
collectives.py runs there, and its candidates are those of this one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from between_hosts import HERE, hosts_up, ungrouped_sessions
from measuring import Record

NAMES = ("all_reduce", "broadcast", "all_gather, tensor", "reduce_scatter, tensor")
SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20)


def layout(text: str) -> tuple[int, int]:
    """Return hosts and ranks of each in HxR."""
    hosts, ranks = text.split("x")
    return int(hosts), int(ranks)


def main() -> None:
    """Measure, print tables and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layouts", type=layout, nargs="+", default=[(2, 2)], metavar="HxR")
    parser.add_argument("--rates", nargs="+", default=["2gbit", "10gbit"], metavar="RATE")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--seconds", type=float, default=50, help="for each, about (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write samples, machine and versions")
    args = parser.parse_args()
    result: dict[str, Any] = {"between_hosts": []}
    for hosts, ranks in args.layouts:
        with (
            ungrouped_sessions(),
            hosts_up(hosts) as up,
            tempfile.NamedTemporaryFile("r", dir="/tmp", suffix=".json") as file,
        ):
            for rate in args.rates:
                up.cluster("rate", rate)
                options = ["--collectives", *NAMES, "--sizes", *map(str, args.sizes)]
                options += ["--seconds", str(args.seconds), "--json", file.name]
                script = str(HERE / "collectives.py")
                print(f"{hosts} hosts x {ranks}, {rate}")
                print(up.launch(hosts, ranks, [script, *options], 3 * args.seconds + 60))
                written = json.loads(Path(file.name).read_text())
                result["machine"] = written["machine"]
                record: Record = {"hosts": hosts, "ranks_each": ranks, "rate": rate}
                result["between_hosts"].append({**record, "collectives": written["collectives"]})
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
