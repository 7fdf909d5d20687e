"""Predict steps to 16,384 ranks with cost_model.py: a table, and a plot if there is matplotlib.

python benchmarks/scaling.py [PLOT.svg]

scaling.md shows the plot and says what it assumes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from cost_model import ALGORITHMS, LANE_CHUNK, WIRES, Machine, bucket_sizes, step_seconds
from measuring import table

from mpiddp.transports.wire_choice import choose

GIGABIT = 1e9 / 8
RANKS_OF_A_NODE = 8
RANKS = [2**k for k in range(15)]
# 25 million parameters in 160 gradients of one size, which is a ResNet-50 without its details.
GRADIENTS = [100e6 / 160] * 160
FORWARD, BACKWARD = 0.1, 0.2

# Nobody measured these two: figures of the kind that vendors and their users give.
NODE = Machine(
    link=10 * GIGABIT,
    latency_inside=1e-6,
    rank_copy=8e9,
    rank_sum=8e9,
    node_memory=200e9,
    cores=RANKS_OF_A_NODE,
)
MACHINES = {
    "10 Gbit/s Ethernet, TCP": Machine(
        **{
            **vars(NODE),
            "latency_between": 25e-6,
            "rendezvous": 50e-6,
            "overhead": 3e-6,
            "stack": 6e9,
        }
    ),
    "200 Gbit/s InfiniBand": Machine(
        **{
            **vars(NODE),
            "link": 200 * GIGABIT,
            "headers": 1.02,
            "latency_between": 2e-6,
            "rendezvous": 4e-6,
            "overhead": 0.3e-6,
        }
    ),
}
COLOURS = {
    "flat": "#e0a458",
    "hierarchical": "#0b6e4f",
    "direct": "#3a6ea5",
    "two-level": "#7b4fa3",
    "ring": "#b23a48",
}


def layout(ranks: int) -> tuple[int, int]:
    """Return nodes and ranks of each for so many ranks."""
    inside = min(ranks, RANKS_OF_A_NODE)
    return ranks // inside, inside


def predict(
    machine: Machine, algorithm: str, ranks: Iterable[int] = RANKS, element_bytes: int = 4
) -> list[float]:
    """Return the time of a step for each number of ranks."""
    buckets = [size * element_bytes / 4 for size in bucket_sizes(GRADIENTS)]
    return [
        step_seconds(
            machine,
            algorithm,
            buckets,
            *layout(number),
            FORWARD,
            BACKWARD,
            element_bytes=element_bytes,
        )
        for number in ranks
    ]


def chosen(ranks: int, element_bytes: int) -> str:
    """Return which wire mpiddp takes for a chunk between the nodes of so many ranks."""
    nodes, _ = layout(ranks)
    return "-" if nodes == 1 else choose(nodes, LANE_CHUNK, element_bytes, None).name


def report() -> str:
    """Return the tables."""
    parts = []
    for name, machine in MACHINES.items():
        rows = [["ranks", "nodes"]]
        rows += [[f"{ranks}", f"{layout(ranks)[0]}"] for ranks in RANKS]
        for element_bytes in (4, 2):
            # What the ring of Gloo and NCCL does with 16 bits, users choose.
            for algorithm in ALGORITHMS if element_bytes == 4 else WIRES.values():
                times = predict(machine, algorithm, RANKS, element_bytes)
                heading = f"{algorithm} ms" if element_bytes == 4 else f"{algorithm}, 16 bits"
                rows[0].append(heading)
                for row, seconds in zip(rows[1:], times, strict=True):
                    row.append(f"{1e3 * seconds:.1f}")
            rows[0].append("taken")
            for row, ranks in zip(rows[1:], RANKS, strict=True):
                row.append(chosen(ranks, element_bytes))
        parts.append(f"{name}\n{table(rows)}")
    return "\n\n".join(parts)


def draw(path: Path) -> None:
    """Write the plot as SVG.

    Raises:
        ImportError: there is no matplotlib.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "mpiddp"  # the same file from the same model
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text: a third of the size
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axes, (name, machine) in zip(both, MACHINES.items(), strict=True):
        for algorithm in ALGORITHMS:
            times = [1e3 * seconds for seconds in predict(machine, algorithm)]
            axes.plot(RANKS, times, color=COLOURS[algorithm], marker="o", ms=3, label=algorithm)
        alone = 1e3 * (FORWARD + BACKWARD)
        axes.axhline(alone, color="#777777", lw=0.8, ls="--", label="without synchronisation")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(RANKS[::2], [f"{ranks:,}" for ranks in RANKS[::2]], rotation=45)
        axes.set_yticks([300, 400, 500, 700, 1000, 1500, 2000, 3000, 5000])
        axes.get_yaxis().set_major_formatter("{x:g}")
        axes.get_yaxis().set_minor_formatter("")
        axes.set_title(f"{name}, {RANKS_OF_A_NODE} ranks a node", fontsize=9)
        axes.set_xlabel("ranks")
    both[0].set_ylabel("predicted step, ms")
    both[0].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    print(report())
    if len(sys.argv) > 1:
        draw(Path(sys.argv[1]))
