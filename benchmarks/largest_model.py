"""Find the largest decoder that trains with float32 AdamW on 4 ranks within some memory.

    python benchmarks/largest_model.py [--limit 6] [--json FILE] [NAME ...]

For each way to train, the memory of all ranks is measured at two depths, in a job of its own. It
grows by the same for each layer, so that says how many layers fit into the limit; a run at that
depth says whether it was right. Then all take steps by turns at the largest depth that all of them
can. Memory is the proportional set size (PSS) of all ranks, at its largest after a backward or a
step, and the interpreters' part of it, some 200 MB a rank, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import describe_machine, table
from torch import nn

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
from large_model import Decoder, memory  # noqa: E402  # of the examples

RANKS = 4
WIDTH, HEADS, LENGTH = 512, 8, 64
DEPTHS = 4, 12
STEPS = 4
ROUNDS = 3
LIMIT = 600  # seconds of one job

Step = Callable[[torch.Tensor], None]


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Return the loss of a text whose next bytes are to be predicted."""
    logits = model(text[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return an ordinary step."""

    def step(text: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, text).backward()
        note_memory()
        optimizer.step()

    return step


def on_gloo(decoder: Decoder) -> Step:
    """Return the step of torch's own class."""
    model = nn.parallel.DistributedDataParallel(decoder)
    return plain(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def zero(decoder: Decoder) -> Step:
    """Return the step of torch's class, with the optimizer's state divided among the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(decoder, gradient_as_bucket_view=True)
    return plain(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4))


def fully_sharded(decoder: Decoder) -> Step:
    """Return the step of FSDP2, each layer sharded by itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    return plain(decoder, torch.optim.AdamW(decoder.parameters(), lr=1e-4))


def deepspeed(decoder: Decoder) -> Step:
    """Return the step of DeepSpeed's ZeRO of stage 3."""
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=decoder,
        optimizer=torch.optim.AdamW(decoder.parameters(), lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 1000,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3},
        },
    )

    def step(text: torch.Tensor) -> None:
        engine.backward(loss_of(engine, text))
        note_memory()
        engine.step()

    return step


def ours(decoder: Decoder) -> Step:
    """Return the step of mpiddp's class."""
    import mpiddp

    model = mpiddp.DistributedDataParallel(decoder, gradient_as_bucket_view=True)
    return plain(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def ours_shared(decoder: Decoder) -> Step:
    """Return the step of mpiddp's class, with one model a node."""
    import mpiddp
    from mpiddp.optim import NodeOptimizer

    model = mpiddp.DistributedDataParallel(decoder, shared_parameters=True)
    return plain(model, NodeOptimizer(model, torch.optim.AdamW, lr=1e-4))


WAYS: dict[str, Callable[[Decoder], Step]] = {
    "torch DDP, Gloo": on_gloo,
    "torch DDP and ZeRO-1, Gloo": zero,
    "FSDP2, Gloo": fully_sharded,
    "DeepSpeed ZeRO-3, Gloo": deepspeed,
    "mpiddp": ours,
    "mpiddp, one model a node": ours_shared,
}

_most = [0]


def note_memory() -> None:
    """Note how much memory this rank has a part in, if it is more than before."""
    _most[0] = max(_most[0], memory())


def train(name: str, depth: int) -> None:
    """Train in this process as a rank, and print what rank 0 knows then. Collective."""
    torch.set_num_threads(1)
    if name.startswith("mpiddp"):
        import mpiddp

        mpiddp.init_process_group()
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        dist.init_process_group("gloo")
    before = memory()
    torch.manual_seed(0)
    decoder = Decoder(depth, WIDTH, HEADS, LENGTH)
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    step = WAYS[name](decoder)
    del decoder
    seconds = []
    for _ in range(STEPS):
        text = torch.randint(256, (1, LENGTH + 1))
        dist.barrier()
        began = time.perf_counter()
        step(text)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        note_memory()
    used = torch.tensor([float(_most[0] - before)])
    dist.all_reduce(used)
    if dist.get_rank() == 0:
        found = {"parameters": parameters, "bytes": used.item()}
        print(json.dumps({**found, "seconds": statistics.median(seconds[1:])}), flush=True)
    dist.destroy_process_group()


def run(name: str, depth: int) -> dict[str, Any]:
    """Train in a job of its own and return what it says."""
    command = [__file__, "--rank-of", name, "--depth", str(depth)]
    if name.startswith("mpiddp"):
        started = [str(Path(sys.executable).parent / "mpirun"), "-n", str(RANKS), sys.executable]
    else:
        started = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        started += ["--nproc-per-node", str(RANKS)]
    done = subprocess.run(
        [*started, *command],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith('{"parameters"'):
            found: dict[str, Any] = json.loads(line)
            return found
    # What ended first is said before what torchrun says of all ranks.
    if "No module named" in done.stderr:
        raise ModuleNotFoundError(f"{name}: not installed")
    raise RuntimeError(f"{name}, {depth} layers: {done.stdout[-1000:]}{done.stderr[-9000:]}")


def find_largest(name: str, limit: float) -> dict[str, Any]:
    """Return how many layers fit into `limit` bytes, and what a run of so many says."""
    low, high = (run(name, depth) for depth in DEPTHS)
    layer = (high["bytes"] - low["bytes"]) / (DEPTHS[1] - DEPTHS[0])
    depth = int((limit - high["bytes"]) / layer) + DEPTHS[1]
    checked = run(name, depth)
    return {
        "name": name,
        "layers": depth,
        "parameters": checked["parameters"],
        "bytes": checked["bytes"],
        "bytes a parameter": (high["bytes"] - low["bytes"])
        / (high["parameters"] - low["parameters"]),
    }


def main() -> None:
    """Measure all and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=6.0, help="memory of all ranks in GiB")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--depth", type=int, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help="of the ways; none: all that are installed")
    options = parser.parse_args()
    if options.rank_of:
        train(options.rank_of, options.depth)
        return
    limit = options.limit * 2**30
    found = []
    for name in options.names or WAYS:
        try:
            found.append(find_largest(name, limit))
        except ModuleNotFoundError as error:
            print(error, flush=True)
            continue
        print(found[-1], flush=True)
    depth = min(each["layers"] for each in found)
    for _ in range(ROUNDS):
        for each in found:
            each.setdefault("seconds", []).append(run(each["name"], depth)["seconds"])
    rows = [
        [
            each["name"],
            f"{each['parameters'] / 1e6:.0f}",
            f"{each['bytes a parameter']:.1f}",
            f"{each['bytes'] / limit:.2f}",
            f"{1e3 * statistics.median(each['seconds']):.0f}",
        ]
        for each in found
    ]
    head = ["", "million parameters", "bytes a parameter", "of the limit", f"ms, {depth} layers"]
    print(table([head, *rows]))
    if options.json:
        from mpiddp.mpi.library import linked_version

        written = {
            "machine": describe_machine(linked_version()),
            "ranks": RANKS,
            "limit": limit,
            "layers of all": depth,
            "ways": found,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
