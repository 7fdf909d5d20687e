"""Programs drawn at random, of groups whose ranks lie on several hosts.

    programs_on_hosts.py FIRST COUNT [SECONDS]

Runs the programs of COUNT seeds from FIRST on, or as many as SECONDS last, and prints as JSON how
many there were, which were refused, and those in which something was wrong: after each action the
ranks of a group have the same bits, which are to rounding those of torch's class on Gloo, or all
of them have raised. Now and then one rank does something else than the others, which is to be
noticed.
"""

import copy
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

import mpiddp
from mpiddp import DistributedDataParallel as DDP

sys.path.insert(0, str(Path(sys.argv[0]).resolve().parents[1] / "support"))

import patience
from random_programs import OPTIMIZERS, Program, chain, draw_some, error_of
from replicas import all_bits, assert_close, gradients_of
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
ACTIONS = 15
# What one rank may do otherwise, and a NodeOptimizer has to notice.
MISTAKES = ("rate", "remove", "scale state", "own clip")
WIDE, NARROW = (torch.float64,) * 3, (torch.float32, torch.float64, torch.bfloat16)
_groups_on_gloo: "dict[tuple[int, ...], Any]" = {}


@dataclass
class Plan:
    """What the ranks of one group do: drawn, the same on all ranks."""

    ranks: "tuple[int, ...]"
    seed: int
    ended: bool = False
    done: "list[Any]" = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = draw = random.Random(self.seed)
        self.node = draw.random() < 0.7
        self.name = draw.choice(sorted(OPTIMIZERS) if self.node else ["SGD", "AdamW"])
        self.actions = draw_some(draw)
        self.groups = draw.random() < 0.5
        self.reads = draw.random() < 0.5
        self.dtypes = WIDE if draw.random() < 0.7 else NARROW
        if self.node and self.name == "Adafactor" and self.dtypes == NARROW:
            self.groups = True  # several dtypes in one group are refused
        # Narrow layers belong to one rank, wide ones to all.
        self.widths = (3, draw.choice([4, 70]), draw.choice([4, 70]), 2)
        self.options = {"find_unused_parameters": True, "bucket_cap_mb": draw.choice([25, 1e-4])}
        self.hook = not self.node and draw.random() < 0.2
        if not self.node:
            self.options["gradient_as_bucket_view"] = draw.random() < 0.5
        self.transport = "auto" if self.node else draw.choice(["auto", "mpi", "exchange"])
        self.mistaken = draw.choice(self.ranks) if self.node and draw.random() < 0.2 else -1

    def next(self) -> "tuple[str, int, int]":
        """Draw an action, its number, and the number of the rank that makes a mistake."""
        action = self.draw.choice(self.actions), self.draw.randrange(1000)
        wrong = action[1]
        if action[0] in MISTAKES and self.mistaken >= 0:
            wrong = self.draw.randrange(1000)
        self.done.append((*action, wrong))
        return (*action, wrong)

    def __str__(self) -> str:
        shown = {key: value for key, value in vars(self).items() if key not in ("draw", "ended")}
        return str(shown)


def draw_groups(draw: random.Random) -> "list[tuple[int, ...]]":
    """Return groups of ranks: all, some, two beside each other, or two of which one is within."""
    mixed = draw.sample(range(SIZE), SIZE)
    some = tuple(mixed[: draw.randrange(2, SIZE + 1)])
    kind = draw.randrange(4)
    if kind == 0:
        return [tuple(range(SIZE))]
    if kind == 1:
        return [some]
    if kind == 2 and SIZE >= 4:
        return [tuple(mixed[: SIZE // 2]), tuple(mixed[SIZE // 2 :])]
    return [tuple(range(SIZE)), some]


def on_gloo(ranks: "tuple[int, ...]") -> Any:
    """Return torch's own group of these ranks. Collective over the world."""
    if ranks not in _groups_on_gloo:
        _groups_on_gloo[ranks] = dist.new_group(list(ranks), backend="gloo", timeout=LIMIT)
    return _groups_on_gloo[ranks]


def start(plan: Plan, group: Any, gloo: Any) -> "list[Program]":
    """Return our program and, where it can be compared, torch's. Collective over the group."""
    torch.manual_seed(plan.seed)
    module = chain(plan.widths, plan.dtypes)
    options = {**plan.options, "process_group": group}
    if plan.node:
        options["shared_parameters"] = True
    model = DDP(copy.deepcopy(module), transport=plan.transport, **options)
    if plan.hook:
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    programs = [Program(model, plan.name, plan.node, plan.groups)]
    if plan.dtypes == WIDE and not plan.hook and plan.mistaken < 0:
        torchs = TorchDDP(copy.deepcopy(module), **{**plan.options, "process_group": gloo})
        programs.append(Program(torchs, plan.name, groups=plan.groups))
    return programs


def differs_from_torch(plan: Plan, programs: "list[Program]") -> str:
    own, theirs = (each.model for each in programs)
    try:
        for key, parameter in own.module.named_parameters():
            assert_close(parameter, theirs.module.get_parameter(key), key, 1e3)
        if plan.reads:
            gradients = gradients_of(theirs)
            for key, gradient in gradients_of(own).items():
                truth = gradients[key]
                assert (gradient is None) == (truth is None), f"gradient of {key}: {gradient}"
                if gradient is not None and truth is not None:
                    assert_close(gradient, truth, f"gradient of {key}", 1e3)
    except AssertionError as error:
        return str(error)
    return ""


def act(plan: Plan, programs: "list[Program]", what: "tuple[str, int, int]") -> "dict[str, Any]":
    """Do one thing on this rank; return what the others need to know of it."""
    action, number, wrong = what
    began = time.monotonic()
    error = error_of(programs[0], action, wrong if plan.mistaken == RANK else number)
    told: dict[str, Any] = {"raised": error, "took": time.monotonic() - began}
    if not error:
        told["bits"] = all_bits(programs[0].model.module.named_parameters())
        if len(programs) > 1:
            theirs = error_of(programs[1], action, number)
            told["unlike"] = f"only torch's raised {theirs}" if theirs else ""
            told["unlike"] = told["unlike"] or differs_from_torch(plan, programs)
    return told


def verdict(plan: Plan, told: "list[dict[str, Any]]") -> str:
    """Return what is wrong after an action, the same on all ranks."""
    raised = [each["raised"] for each in told]
    if all(raised):
        plan.ended = True
    elif any(raised):
        return f"some ranks raised: {raised}"
    elif any(each["bits"] != told[0]["bits"] for each in told):
        names = [k for k in told[0]["bits"] if len({each["bits"][k] for each in told}) > 1]
        return f"other bits of {names}"
    elif unlike := [each["unlike"] for each in told if each.get("unlike")]:
        return f"not as torch: {unlike}"
    return ""


def run(seed: int) -> "tuple[str, str]":
    """Run the programs of one seed; return what is wrong, and what was refused, or "". Collective.

    Over all ranks.
    """
    draw = random.Random(seed)
    plans = [Plan(ranks, draw.randrange(10**9)) for ranks in draw_groups(draw)]
    made, wrong, refused = [], "", ""
    for plan in plans:
        made.append(dist.new_group(list(plan.ranks), timeout=LIMIT))
        on_gloo(plan.ranks)
    mine = [number for number, plan in enumerate(plans) if RANK in plan.ranks]
    programs = {n: start(plans[n], made[n], on_gloo(plans[n].ranks)) for n in mine}
    for _ in range(ACTIONS):
        of_groups = [None if plan.ended else plan.next() for plan in plans]
        own = {n: act(plans[n], programs[n], what) for n in mine if (what := of_groups[n])}
        everyone = COMM.allgather(own)
        for number, plan in enumerate(plans):
            if plan.ended:
                continue
            told = [everyone[rank][number] for rank in plan.ranks]
            if found := verdict(plan, told):
                wrong = f"group {plan.ranks}: {found}; it took {told[0]['took']:.1f} s; {plan}"
            elif plan.ended:
                refused += f"{plan.done[-1][0]}: {told[0]['raised'][:200]} "
        if wrong:
            break
    programs.clear()
    for number in mine:
        dist.destroy_process_group(made[number])
    return wrong, refused


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    until = time.monotonic() + (float(sys.argv[3]) if len(sys.argv) > 3 else float("inf"))
    ran, refused, failed = 0, {}, []
    for seed in range(first, first + count):
        if COMM.bcast(time.monotonic() > until):
            break
        wrong, words = run(seed)
        ran += 1
        if words:
            refused[seed] = words
        if wrong:
            failed.append([seed, wrong])
            if RANK == 0:
                print(f"seed {seed}: {wrong}", file=sys.stderr, flush=True)
    if RANK == 0:
        print(json.dumps({"ran": ran, "refused": refused, "failed": failed}), flush=True)


LIMIT = timedelta(seconds=patience.enough(20))
os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
mpiddp.init_process_group(timeout=LIMIT)
torch.set_num_threads(1)
main()
mpiddp.destroy_process_group()
