"""Measure the averaging of gradients on a GPU that all ranks share.

    mpirun -n 2 python benchmarks/gpu.py [--seconds 60] [--json FILE]

Three tables:

- rates: of one bucket of 25 and of 100 MB, as a rank sees it while all ranks do the same: copies to
  pinned host memory and back at the same time, the mean over the ranks in host memory, both
  together as "staging" does them, and the ways that give GPU memory to MPI where they work. What
  staging can reach is the slower of the first two.
- exposed time: a step less the same step under no_sync, beside torch's class on Gloo, which copies
  CUDA tensors to the host itself. Candidates take turns in an order drawn anew.
- memory: the most that torch had allocated on the GPU in some steps.

A result is the median over rounds; the time of a round is that of its slowest rank. Everything on
the GPU is over before a clock is read.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import Record, describe_machine, exposed, quartiles, ratio, show_ratio, table
from mpi4py import MPI
from names import GLOO, OURS
from torch import nn
from workloads import MODELS, Workload

import mpiddp
from mpiddp import doctor
from mpiddp.diagnosis import gpus
from mpiddp.engine.engine import Channel, Engine
from mpiddp.engine.memory import BucketMemory, GpuMemory
from mpiddp.engine.single_all_reduce import SingleAllReduce
from mpiddp.gpu.runtime import COPY_TO_GPU, COPY_TO_HOST, Event, Stream, runtime_of
from mpiddp.transports import choice as transport_choice
from mpiddp.transports import gpu_choice
from mpiddp.transports.gpu_staging import StagingTransport

SIZES = (25, 100)  # MB, as in "a bucket of 25 MB": 1e6 bytes
PIECE_BYTES = 2 << 20  # staging's
BLOCK_SECONDS = 0.05
FEWEST_ROUNDS = 5
MOST_ROUNDS = 60
TIMEOUT = 60.0

# As in the issue of these tables: what is to be reached.
STAGING_GOAL = 0.85
EXPOSED_GOAL = 1 / 3

COPIES, HOST, STAGING = "pinned copies", "host reduction", "staging"


class Gpu:
    """What is asked of the device that the ranks share.

    Args:
        device: of CUDA, ROCm, or one that a runtime stands in for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        found = runtime_of(device)
        assert found is not None
        self.runtime = found
        self.index = found.index_of(device)

    @property
    def stream(self) -> int:
        """Handle of the current stream."""
        return self.runtime.current_stream(self.device)

    def synchronize(self) -> None:
        """Wait for all that is on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak(self, action: Callable[[], None]) -> int:
        """Return the most bytes that torch had allocated while something ran."""
        if self.device.type != "cuda":
            action()
            return 0
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        action()
        self.synchronize()
        return int(torch.cuda.max_memory_allocated(self.device))


def slowest(seconds: float) -> float:
    """Return the largest of the ranks' times. Collective."""
    return float(MPI.COMM_WORLD.allreduce(seconds, MPI.MAX))


def timed(gpu: Gpu, action: Callable[[], None]) -> float:
    """Return the seconds that something takes on the slowest rank. Collective."""
    gpu.synchronize()
    MPI.COMM_WORLD.Barrier()
    began = time.perf_counter()
    action()
    gpu.synchronize()
    return slowest(time.perf_counter() - began)


class Rates:
    """Ways to do something with a bucket of some size, each a function to call.

    Collective.

    Args:
        gpu: the device.
        size: of the bucket in bytes.
    """

    def __init__(self, gpu: Gpu, size: int) -> None:
        self.gpu = gpu
        self.size = size
        self.engine = Engine()
        self.notes: dict[str, str] = {}
        self.ways: dict[str, Callable[[], None]] = {
            COPIES: self._copies(),
            HOST: self._reduction_on_host(),
        }
        self.ways[STAGING] = self._reduction_on_device(STAGING)
        for name in (gpu_choice.DEVICE, gpu_choice.RING):
            choice = gpu_choice.Choice(name, "simulated")
            if gpu.device.type == "cuda":
                # Both may be worth knowing where the table says otherwise: a trial decides.
                choice = gpu_choice.choose(MPI.COMM_WORLD, gpu.device, name)
            if choice.name == name:
                self.ways[name] = self._reduction_on_device(name)
            else:
                self.notes[name] = choice.reason

    def _copies(self) -> Callable[[], None]:
        """Both ways at once, piece by piece, between the device and memory that is pinned."""
        gpu = self.gpu
        on_gpu = torch.zeros(2, self.size, dtype=torch.uint8, device=gpu.device)
        on_host = torch.zeros(2, self.size, dtype=torch.uint8)
        gpu.runtime.host_register(on_host.data_ptr(), on_host.nbytes)
        streams = [Stream(gpu.runtime, gpu.index) for _ in range(2)]
        pieces = [
            (start, min(PIECE_BYTES, self.size - start))
            for start in range(0, self.size, PIECE_BYTES)
        ]

        def copy() -> None:
            for start, bytes_ in pieces:
                for row, (to, source, kind) in enumerate(
                    [(on_host, on_gpu, COPY_TO_HOST), (on_gpu, on_host, COPY_TO_GPU)]
                ):
                    gpu.runtime.copy_async(
                        to[row].data_ptr() + start,
                        source[row].data_ptr() + start,
                        bytes_,
                        kind,
                        streams[row].address,
                    )
            for stream in streams:
                stream.synchronize()

        self._pinned = on_host
        return copy

    def _reduction_on_host(self) -> Callable[[], None]:
        """The mean in host memory, in as many pieces as staging makes of it."""
        communicator = MPI.COMM_WORLD.Dup()
        channel = transport_choice.open_channel(self.engine, communicator, "auto")
        sizes = [PIECE_BYTES] * (self.size // PIECE_BYTES)
        if rest := self.size % PIECE_BYTES:
            sizes.append(rest)
        reductions = [self._reduction(channel, memory) for memory in channel.allocate(sizes)]

        def reduce() -> None:
            for reduction in reductions:
                reduction.submit()
            for reduction in reductions:
                _wait(reduction)

        return reduce

    def _reduction_on_device(self, name: str) -> Callable[[], None]:
        """The mean, from the bucket on the device and back, until a stream could go on."""
        communicator = MPI.COMM_WORLD.Dup()
        if name == STAGING:
            inner = transport_choice.open_channel(self.engine, communicator, "auto")
            staging = StagingTransport(inner, self.gpu.runtime, self.gpu.device)
            channel = self.engine.open_channel(staging, communicator)
        else:
            made = gpu_choice.make_transport(name, communicator, self.gpu.device)
            channel = self.engine.open_channel(made, communicator)
        [memory] = channel.allocate([self.size], [0])
        assert isinstance(memory, GpuMemory)
        reduction = self._reduction(channel, memory)
        back = Event(self.gpu.runtime, self.gpu.index)

        def reduce() -> None:
            reduction.submit(self.gpu.stream)
            _wait(reduction)
            memory.wait_on(self.gpu.stream)
            back.record(self.gpu.stream)
            back.synchronize()

        return reduce

    def _reduction(self, channel: Channel, memory: BucketMemory) -> SingleAllReduce:
        memory.buffer.view(torch.float32).fill_(MPI.COMM_WORLD.rank)
        return SingleAllReduce(channel, memory, torch.float32, MPI.COMM_WORLD.size)

    def measure(self, seconds: float) -> Record:
        """Let the ways take turns for some time. Collective."""
        samples: dict[str, list[float]] = {name: [] for name in self.ways}
        for action in self.ways.values():
            action()
        order = list(self.ways)
        shuffle = random.Random(1).shuffle  # the same on all ranks
        began = time.perf_counter()
        for number in range(MOST_ROUNDS):
            if MPI.COMM_WORLD.bcast(
                number >= FEWEST_ROUNDS and time.perf_counter() - began > seconds
            ):
                break
            shuffle(order)
            for name in order:
                samples[name].append(timed(self.gpu, self.ways[name]))
        return {
            "bytes": self.size,
            "ranks": MPI.COMM_WORLD.size,
            "seconds": samples,
            "notes": self.notes,
        }

    def close(self) -> None:
        """Let go of what is pinned. Collective."""
        self.ways.clear()
        self.engine.stop()
        self.gpu.runtime.host_unregister(self._pinned.data_ptr())


def _wait(reduction: SingleAllReduce) -> None:
    if not reduction.wait(TIMEOUT):
        raise TimeoutError(f"an all-reduce is not done after {TIMEOUT:g} s")


def rates_in_words(record: Record) -> str:
    """Return the table of one size."""
    size = record["bytes"]
    medians = {name: statistics.median(taken) for name, taken in record["seconds"].items()}
    reachable = max(medians[COPIES], medians[HOST])
    rows = [["", "GB/s a rank", "ms", "quartiles", "of the slower of the first two"]]
    for name, taken in record["seconds"].items():
        low, middle, high = quartiles([1e3 * one for one in taken])
        share = "" if name in (COPIES, HOST) else f"{reachable / medians[name]:.2f}"
        rows.append(
            [name, f"{size / middle / 1e6:.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}", share]
        )
    lines = [
        f"a bucket of {size / 1e6:.0f} MB, {record['ranks']} ranks, "
        f"{len(record['seconds'][COPIES])} rounds; staging is to reach {STAGING_GOAL}",
        table(rows),
    ]
    lines += [f"without {name}: {why}" for name, why in record["notes"].items()]
    return "\n".join(lines)


def step(model: nn.Module, inputs: torch.Tensor, synchronised: bool) -> None:
    """Take a step: zero_grad, forward, backward. Collective if `synchronised`."""
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    with contextlib.nullcontext() if synchronised else model.no_sync():
        model.zero_grad()
        model(inputs).float().square().mean().backward()


def wrap(name: str, model: nn.Module, gpu: Gpu, gloo: dist.ProcessGroup, views: bool) -> nn.Module:
    """Return a model in our class or in torch's on Gloo. Collective."""
    settings: dict[str, Any] = {"gradient_as_bucket_view": views}
    if gpu.device.type == "cuda":
        settings["device_ids"] = [gpu.index]
    if name == OURS:
        return mpiddp.DistributedDataParallel(model, **settings)
    return nn.parallel.DistributedDataParallel(model, process_group=gloo, **settings)


def measure_exposed(
    name: str, workload: Workload, gpu: Gpu, gloo: dist.ProcessGroup, seconds: float, views: bool
) -> Record:
    """Measure one model with both classes. Collective."""
    model, inputs = workload.make()
    model, inputs = model.to(gpu.device), inputs.to(gpu.device)
    wrapped = {one: wrap(one, copy.deepcopy(model), gpu, gloo, views) for one in (OURS, GLOO)}
    for one in wrapped.values():
        for _ in range(3):  # buckets are rebuilt after the first
            step(one, inputs, True)
    gpu.synchronize()
    for ours, theirs in zip(*(one.parameters() for one in wrapped.values()), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)

    def block(one: nn.Module, synchronised: bool, steps: int) -> float:
        def run() -> None:
            for _ in range(steps):
                step(one, inputs, synchronised)

        step(one, inputs, synchronised)
        return timed(gpu, run) / steps

    steps = max(1, round(BLOCK_SECONDS / block(wrapped[OURS], False, 3)))
    records: dict[str, Record] = {
        one: {"candidate": one, "views": views, "synchronised": [], "alone": []} for one in wrapped
    }
    order = list(wrapped)
    shuffle = random.Random(1).shuffle
    began = time.perf_counter()
    for number in range(MOST_ROUNDS):
        if MPI.COMM_WORLD.bcast(number >= FEWEST_ROUNDS and time.perf_counter() - began > seconds):
            break
        shuffle(order)
        for one in order:
            for synchronised in (True, False) if number % 2 else (False, True):
                key = "synchronised" if synchronised else "alone"
                records[one][key].append(block(wrapped[one], synchronised, steps))
    return {"model": name, "ranks": MPI.COMM_WORLD.size, "records": list(records.values())}


def measure_memory(
    name: str, workload: Workload, gpu: Gpu, gloo: dist.ProcessGroup, views: bool
) -> Record:
    """Return the peak of each class over five steps, one after the other. Collective."""
    peaks = {}
    for candidate in (OURS, GLOO):
        gc.collect()
        model, inputs = workload.make()
        inputs = inputs.to(gpu.device)
        wrapped = wrap(candidate, model.to(gpu.device), gpu, gloo, views)

        def steps(wrapped: nn.Module = wrapped, inputs: torch.Tensor = inputs) -> None:
            for _ in range(5):
                step(wrapped, inputs, True)

        steps()  # buckets are rebuilt after the first
        before = gpu.peak(lambda: None)
        peaks[candidate] = [before, gpu.peak(steps)]
        del wrapped, model, inputs, steps
    parameters = sum(parameter.numel() * 4 for parameter in workload.make()[0].parameters())
    return {"model": name, "views": views, "peaks": peaks, "bytes": parameters}


def exposed_in_words(records: Sequence[Record]) -> str:
    """Return the table of all models."""
    rows = [["exposed time, ms", "step alone", OURS, GLOO, "mpiddp / it (90 %)"]]
    for record in records:
        ours, theirs = record["records"]
        alone = 1e3 * statistics.median(ours["alone"] + theirs["alone"])
        views = "on" if ours["views"] else "off"
        cells = [f"{1e3 * statistics.median(exposed(one)):.2f}" for one in (ours, theirs)]
        shown = show_ratio(ratio(exposed(ours), exposed(theirs)))
        rows.append([f"{record['model']}, views {views}", f"{alone:.2f}", *cells, shown])
    return f"{table(rows)}\nto be reached: {EXPOSED_GOAL:.2f}"


def memory_in_words(records: Sequence[Record]) -> str:
    """Return the table of all models."""
    rows = [["peak memory on the GPU, MB", "parameters", OURS, GLOO, "mpiddp / it"]]
    for record in records:
        ours, theirs = (peak for _, peak in record["peaks"].values())
        views = "on" if record["views"] else "off"
        rows.append(
            [
                f"{record['model']}, views {views}",
                f"{record['bytes'] / 1e6:.1f}",
                f"{ours / 1e6:.1f}",
                f"{theirs / 1e6:.1f}",
                f"{ours / theirs:.3f}" if theirs else "-",
            ]
        )
    return table(rows)


def parse() -> argparse.Namespace:
    """Return the settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="about how long in all (60)")
    parser.add_argument("--sizes", nargs="+", type=float, default=SIZES, help="of buckets, in MB")
    models = ["8 x Linear(1024)", "3 x Linear(4096)", "transformer", "convolutions"]
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=models)
    parser.add_argument("--json", metavar="FILE", help="write samples, machine and versions")
    parser.add_argument(
        "--simulated", action="store_true", help="no GPU: see that this runs; figures mean nothing"
    )
    return parser.parse_args()


def main() -> int:
    """Measure and print tables on rank 0; return the exit status. Collective."""
    args = parse()
    torch.set_num_threads(1)
    mpiddp.init_process_group()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    stack = contextlib.ExitStack()
    device = gpus.find_gpu()
    if args.simulated:
        sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
        from simulated_gpu import on_cpu_tensors

        stack.enter_context(on_cpu_tensors())
        device = torch.device("cpu")
    if device is None:
        if MPI.COMM_WORLD.rank == 0:
            print(f"There is no GPU: torch {torch.__version__} finds none.", file=sys.stderr)
        mpiddp.destroy_process_group()
        return 1  # the same on all ranks: they share one machine
    with stack:
        results = measure(args, Gpu(device))
    if MPI.COMM_WORLD.rank == 0 and args.json:
        Path(args.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    mpiddp.destroy_process_group()
    return 0


def measure(args: argparse.Namespace, gpu: Gpu) -> dict[str, Any]:
    """Measure everything and print it on rank 0. Collective."""

    def say(text: str) -> None:
        if MPI.COMM_WORLD.rank == 0:
            print(text, end="\n\n", flush=True)

    if gpu.device.type == "cuda":
        torch.cuda.set_device(gpu.device)
    report = [f"{finding.grade}: {finding.text}" for finding in doctor.report()]
    say("\n".join(report))
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)
    results: dict[str, Any] = {
        "machine": describe_machine(MPI.Get_library_version()),
        "command": " ".join(sys.argv),
        "report": report,
        "rates": [],
        "exposed": [],
        "memory": [],
    }
    part = args.seconds / 2 / max(len(args.sizes), 1)
    for megabytes in args.sizes:
        rates = Rates(gpu, int(megabytes * 1e6) // 4 * 4)
        results["rates"].append(rates.measure(part))
        rates.close()
        say(rates_in_words(results["rates"][-1]))
    part = args.seconds / 2 / max(2 * len(args.models), 1)
    for views in (True, False):
        for name in args.models:
            measured = measure_exposed(name, MODELS[name], gpu, gloo, part, views)
            results["exposed"].append(measured)
            results["memory"].append(measure_memory(name, MODELS[name], gpu, gloo, views))
    if args.models:
        say(exposed_in_words(results["exposed"]))
        say(memory_in_words(results["memory"]))
    return results


if __name__ == "__main__":
    sys.exit(main())
