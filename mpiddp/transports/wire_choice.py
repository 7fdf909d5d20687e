"""stub"""
from __future__ import annotations
import os
from dataclasses import dataclass

@dataclass(frozen=True)
class Wire:
    name: str
    group: int
    reason: str

def groups_of(nodes: int) -> int | None:
    best = None
    for k in range(2, int(nodes**0.5) + 1):
        if nodes % k == 0:
            best = k
    return best

def thresholds(nodes: int, element_bytes: int, largest: int, override: str | None) -> list[tuple[int, Wire]]:
    override = override or os.environ.get("MPIDDP_WIRE", "auto")
    name = "direct" if override == "auto" else override
    group = nodes
    if name == "two-level":
        g = groups_of(nodes)
        if g is None:
            name = "direct"
        else:
            group = g
    return [(largest, Wire(name, group, ""))]
