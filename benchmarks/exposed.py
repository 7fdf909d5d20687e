"""Measure what gradient synchronisation adds to a training step, beside the alternatives.

    mpirun -n 2 python benchmarks/exposed.py [--seconds 30] [--json FILE]

Exposed time is a step less the same step of the same candidate under no_sync. In each round every
candidate has its turn, in an order drawn anew, so that a busy machine slows all of them: compare
within one run, by ratios. A turn is a block of steps with synchronisation and one without, each
at least 50 ms long, after a barrier. The time of a block is that of its slowest rank, because
the slowest rank is what a data-parallel job waits for; the figure is the median over rounds.
Before anything is measured, the means of all candidates are compared.

Between hosts, a block also counts the bytes that the busiest host's link carried, and the core
time of all ranks of a host on average.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from candidates import Candidate, LimitAlone, Maker
from measuring import Record, describe_machine, exposed, quartiles, ratio, show_ratio, table
from mpi4py import MPI
from names import GLOO, GLOO_FP16, HOOKED, NAMES, OURS
from workloads import MODELS, MODELS_BETWEEN_HOSTS, Workload, seconds_of_parts, with_backward_of

import mpiddp

BLOCK_SECONDS = 0.05
# Buckets are rebuilt after the first synchronised step; the others warm memory and caches.
WARM_UP = 3
FEWEST_ROUNDS = 3
MOST_ROUNDS = 60
TOLERANCE = 1e-4
# In 16 bits: bfloat16 has 8 bits of precision, and float16 none below 1e-7.
TOLERANCE_IN_16_BITS, ABSOLUTE_IN_16_BITS = 3e-2, 2e-7
# The hosts of tests/lab have this one link.
LINK = Path("/sys/class/net/eth0/statistics")

Anyone = Candidate | LimitAlone


@dataclass(frozen=True)
class Block:
    """What a step took in a block of some.

    Attributes:
        seconds: on the slowest rank.
        core: seconds of processor time of a host's ranks, all their threads, on average over hosts.
        sent: bytes that left the host that sent most, as its link counts them; 0 on one host.
        received: the same of the host that received most.
    """

    seconds: float
    core: float
    sent: float
    received: float


def compare_means(candidates: Sequence[Candidate]) -> None:
    """Raise RuntimeError unless all candidates compute the same means. Collective."""
    reference: list[torch.Tensor] = []
    for candidate in candidates:
        candidate.begin()
        for _ in range(WARM_UP):
            candidate.step(True)
        means = candidate.means()
        if not reference:
            reference = [mean.clone() for mean in means]
        for ours, theirs in zip(reference, means, strict=True):
            difference = (ours - theirs).abs().max()
            relative, absolute = TOLERANCE, 1e-9
            if candidate.name in HOOKED or ours.element_size() == 2:
                relative, absolute = TOLERANCE_IN_16_BITS, ABSOLUTE_IN_16_BITS
            if difference > relative * ours.abs().max() + absolute:
                raise RuntimeError(
                    f"{candidate.name} (views {candidate.views}) and {candidates[0].name} differ "
                    f"by {difference:g} in a gradient of shape {tuple(ours.shape)}"
                )
        candidate.step(False)
        candidate.end()
        candidate.rest()


def link_bytes() -> tuple[int, int]:
    """Return what this host's link has sent and received; zeros where it is not to be counted."""
    topology = mpiddp.get_topology()
    if topology.node_count == 1 or topology.local_rank > 0 or not LINK.exists():
        return 0, 0
    sent, received = (int((LINK / name).read_text()) for name in ("tx_bytes", "rx_bytes"))
    return sent, received


def block(candidate: Candidate, synchronised: bool, steps: int) -> Block:
    """Return what a step takes in a block of some. Collective."""
    world = MPI.COMM_WORLD
    # The first step is another one: caches are cold, buffers are synchronised as the step before
    # it wanted, and it frees the gradients of the block before, which with views only no_sync
    # leaves (200 MB take 15 ms).
    candidate.step(synchronised)
    world.Barrier()
    before = link_bytes()
    core, began = time.process_time(), time.perf_counter()
    for _ in range(steps):
        candidate.step(synchronised)
    seconds, core = time.perf_counter() - began, time.process_time() - core
    world.Barrier()  # what this rank has, others may still pass on
    sent, received = (after - earlier for after, earlier in zip(link_bytes(), before, strict=True))
    return Block(
        world.allreduce(seconds, MPI.MAX) / steps,
        world.allreduce(core) / mpiddp.get_topology().node_count / steps,
        world.allreduce(sent, MPI.MAX) / steps,
        world.allreduce(received, MPI.MAX) / steps,
    )


def steps_of_a_block(candidate: Candidate, synchronised: bool) -> int:
    """Return how many steps take `BLOCK_SECONDS`. Collective."""
    return max(1, math.ceil(BLOCK_SECONDS / block(candidate, synchronised, 1).seconds))


def measure(candidates: Sequence[Anyone], seconds: float) -> list[Record]:
    """Measure in rounds for about `seconds`; return a record for each candidate. Collective."""
    stepping = [one for one in candidates if isinstance(one, Candidate)]
    compare_means(stepping)
    alone = steps_of_a_block(stepping[0], False)
    records: dict[int, Record] = {
        id(one): {
            "candidate": one.name,
            "views": one.views,
            "synchronised": [],
            "alone": [],
            "core": [],
            "core_alone": [],
            "sent": [],
            "received": [],
        }
        for one in candidates
    }
    together = {}
    for candidate in stepping:
        candidate.begin()
        together[id(candidate)] = min(alone, steps_of_a_block(candidate, True))
        candidate.end()
        candidate.rest()
    order = list(candidates)
    shuffle = random.Random(1).shuffle  # the same on all ranks
    began = time.perf_counter()
    for number in range(MOST_ROUNDS):
        elapsed = time.perf_counter() - began
        last = number >= FEWEST_ROUNDS and elapsed * (number + 1) / number > seconds
        if MPI.COMM_WORLD.bcast(last):
            break
        shuffle(order)
        for one in order:
            record = records[id(one)]
            if isinstance(one, LimitAlone):
                one.limit.seconds(not one.views, 1)
                taken = one.limit.seconds(not one.views, 2 * alone)
                record["synchronised"].append(MPI.COMM_WORLD.allreduce(taken, MPI.MAX))
                record["alone"].append(0.0)
                continue
            one.begin()
            for synchronised in (True, False) if number % 2 else (False, True):
                taken = block(one, synchronised, together[id(one)] if synchronised else alone)
                record["synchronised" if synchronised else "alone"].append(taken.seconds)
                record["core" if synchronised else "core_alone"].append(taken.core)
                if synchronised:
                    record["sent"].append(taken.sent)
                    record["received"].append(taken.received)
            one.end()
            one.rest()
    return list(records.values())


def ours_for(records: Sequence[Record], views: bool | None) -> Record | None:
    """Return the record of mpiddp to compare with: with the same views, else with views on."""
    for record in records:
        if record["candidate"] == OURS and record["views"] == (views is not False):
            return record
    return None


def report(result: Record) -> str:
    """Return the table of one model."""
    records = result["records"]
    alone = statistics.median(
        seconds for record in records if any(record["alone"]) for seconds in record["alone"]
    )
    lines = [
        f"{result['model']}, {result['ranks']} ranks, {len(records[0]['alone'])} rounds: a step "
        f"alone takes {1e3 * alone:.1f} ms"
    ]
    heading = ["exposed time", "views", "ms", "quartiles", "mpiddp / it", "(90 %)"]
    rows = [heading]
    for record in sorted(records, key=lambda r: (r["views"] is False, NAMES.index(r["candidate"]))):
        low, middle, high = quartiles([1e3 * seconds for seconds in exposed(record)])
        ours = ours_for(records, record["views"])
        shown = "-"
        if ours is not None and ours is not record:
            shown = show_ratio(ratio(exposed(ours), exposed(record)))
        value, _, spread = shown.partition(" ")
        views = {True: "on", False: "off", None: ""}[record["views"]]
        rows.append(
            [
                record["candidate"],
                views,
                f"{middle:.2f}",
                f"{low:.2f} to {high:.2f}",
                value,
                spread,
            ]
        )
    lines.append(table(rows))
    lines += [f"without {name}: {why}" for name, why in result["notes"].items()]
    return "\n".join(lines)


def run(
    name: str,
    workload: Workload,
    gloo: dist.ProcessGroup | None,
    wanted: Sequence[str],
    views: Sequence[bool],
    seconds: float,
) -> Record:
    """Measure one model. Collective."""
    maker = Maker(workload, gloo, wanted, views)
    forward, backward = seconds_of_parts(maker.first, maker.inputs)
    records = measure(maker.make(), seconds)
    return {
        "model": name,
        "forward": forward,
        "backward": backward,
        "ranks": dist.get_world_size(),
        "nodes": mpiddp.get_topology().node_count,
        "parameters": len(list(maker.first.parameters())),
        "elements": sum(parameter.numel() for parameter in maker.first.parameters()),
        "bytes": sum(p.numel() * p.element_size() for p in maker.first.parameters()),
        "records": records,
        "notes": maker.notes,
    }


def main() -> None:
    """Measure and print a table on rank 0. Collective."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30, help="for each model (30)")
    parser.add_argument("--views", choices=("on", "off", "both"), default="on")
    models = {**MODELS, **MODELS_BETWEEN_HOSTS}
    parser.add_argument("--models", nargs="+", choices=list(models), default=list(MODELS))
    parser.add_argument("--backward", type=float, help="choose the batch: seconds of backward")
    parser.add_argument(
        "--candidates",
        nargs="+",
        choices=NAMES,
        default=[name for name in NAMES if name not in HOOKED],
    )
    parser.add_argument("--json", metavar="FILE", help="write samples, machine and versions")
    args = parser.parse_args()

    torch.set_num_threads(1)
    mpiddp.init_process_group()
    if mpiddp.get_topology().node_count == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gloo = dist.new_group(backend="gloo") if {GLOO, GLOO_FP16} & {*args.candidates} else None
    views = {"on": [True], "off": [False], "both": [True, False]}[args.views]
    results = []
    for name in args.models:
        workload = models[name]
        if args.backward:
            workload = with_backward_of(workload, args.backward)
        result = run(name, workload, gloo, args.candidates, views, args.seconds)
        results.append(result)
        if dist.get_rank() == 0:
            print(report(result), end="\n\n", flush=True)
    if dist.get_rank() == 0 and args.json:
        machine = describe_machine(MPI.Get_library_version())
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "exposed": results}, file, indent=1)
    mpiddp.destroy_process_group()


if __name__ == "__main__":
    main()
