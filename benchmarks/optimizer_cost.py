"""Predict an optimizer's step on a node, which its memory bounds. No MPI, no torch.

    python benchmarks/optimizer_cost.py

A step takes as long as the node's memory needs for the bytes that all ranks read and write. R ranks
with replicas do that R times, a `NodeOptimizer` does it once. scaling.md says how far that is from
measured steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from measuring import table
from scaling import GRADIENTS, NODE, RANKS_OF_A_NODE


@dataclass(frozen=True)
class Passes:
    """What an optimizer reads and writes, in units of the parameters' bytes.

    Attributes:
        each: if each of its operations passes over whole tensors.
        once: if what it passes over stays in a cache, or one operation does all.
    """

    each: float
    once: float


# Counted in torch's sources, for tensors that no cache holds: AdamW's mul_, lerp_, mul_ and
# addcmul_, sqrt, div, add_ and addcdiv_; SGD's mul_, add_ and add_.
PASSES = {"AdamW": Passes(20, 7), "SGD, momentum": Passes(8, 5)}


def optimizer_seconds(touched: float, parameters: float, replicas: int, memory: float) -> float:
    """Return the time of a step.

    Args:
        touched: bytes read and written for each byte of parameters.
        parameters: their size in bytes.
        replicas: how many copies of them the node's ranks step, 1 with a `NodeOptimizer`.
        memory: bytes that the node reads and writes in a second.
    """
    return touched * parameters * replicas / memory


def report() -> str:
    """Return a table for the node and the model of scaling.py."""
    rows = [["ms, on a node", "plain", "fused", "NodeOptimizer"]]
    for name, passes in PASSES.items():
        cases = (
            (passes.each, RANKS_OF_A_NODE),
            (passes.once, RANKS_OF_A_NODE),
            (passes.once, 1),
        )
        rows.append([name])
        for touched, replicas in cases:
            seconds = optimizer_seconds(touched, sum(GRADIENTS), replicas, NODE.node_memory)
            rows[-1].append(f"{1e3 * seconds:.1f}")
    return table(rows)


if __name__ == "__main__":
    print(report())
