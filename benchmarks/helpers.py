"""Measure copies and sums at the end of backward with and without helpers.

    .venv/bin/python benchmarks/helpers.py [--rounds 40]

Copies: from a gradient to its bucket, beside torch's `copy_` with one thread and with two, right
after a computation (the other thread of OpenMP still spins) and 10 ms later. Before each, 48 MB of
other memory go through the cache.
Sums: two ranks, of which one sleeps while the other sums all of a bucket, its gradients in place.
The candidates take turns. Each waits up to 0.1 s for a moment in which nothing else runs on the
machine; a machine that is never at rest delays threads. So besides the median there is the tenth
part that was fastest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import table

from mpiddp.system import caches, copying, helpers

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import mpirun  # the one of the tests, which leaves no process behind

MB = 1 << 20
COPIES = (1, 4, 16, 64)
SUMS = (1, 4, 25, 100)
APART = 10e-3


def wait_for_rest() -> None:
    """Wait until only this thread runs on the machine."""
    limit = time.perf_counter() + 0.1
    while time.perf_counter() < limit:
        if Path("/proc/loadavg").read_text().split()[3].startswith("1/"):
            return


def figures(seconds: dict[str, list[float]]) -> list[str]:
    """Return each candidate's fastest tenth and median in ms."""
    return [
        f"{1e3 * sorted(times)[len(times) // 10]:.3f} / {1e3 * statistics.median(times):.3f}"
        for times in seconds.values()
    ]


def measure_copies(megabytes: int, rounds: int, pause: float) -> dict[str, list[float]]:
    """Return the seconds of copying so much, by candidate."""
    gradient, bucket = torch.ones(megabytes * MB // 4), torch.zeros(megabytes * MB // 4)
    matrix, other = torch.randn(512, 512), torch.zeros(12 * MB)

    def torch_copy(threads: int) -> Callable[[], object]:
        def copy() -> None:
            torch.set_num_threads(threads)
            bucket.copy_(gradient)
            torch.set_num_threads(2)

        return copy

    def our_copy(number: int, cached: int) -> Callable[[], object]:
        def copy() -> None:
            helpers.allow(number)
            copying.keep_in_cache(cached)
            copying.copy_tensor(bucket, gradient)

        return copy

    share = [caches.share_of_cache(threads) for threads in (1, 2)]
    candidates = {
        "copy_, 1 thread": torch_copy(1),
        "copy_, 2 threads": torch_copy(2),
        "0 helpers, all in cache": our_copy(0, 1 << 40),
        "0 helpers": our_copy(0, share[0]),
        "1 helper": our_copy(1, share[1]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, copy in candidates.items():
            wait_for_rest()
            other.add_(1)
            torch.mm(matrix, matrix)
            time.sleep(pause)
            began = time.perf_counter()
            copy()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def measure_sums(megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds in which rank 0 sums a bucket while the other sleeps. Collective."""
    import torch.distributed as dist
    from one_bucket import Engine, Within

    engine = Engine(megabytes * MB // 4)
    rank = dist.get_rank()
    seconds: dict[str, list[float]] = {"0 helpers": [], "1 helper": []}

    def sum_once(number: int) -> float:
        helpers.allow(number)
        reducer = engine.reducer
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        if rank == 0:
            time.sleep(5e-3)
            wait_for_rest()
        began = time.perf_counter()
        reducer.run_hook(0)
        if rank == 1:
            time.sleep(0.12 + 5e-4 * megabytes)
        reducer.end_of_backward()
        return time.perf_counter() - began

    def action() -> None:
        for _ in range(rounds):
            for number, times in enumerate(seconds.values()):
                dist.barrier()
                times.append(sum_once(number))

    apply = Within.apply
    apply(torch.zeros(1, requires_grad=True), action).backward()  # type: ignore[no-untyped-call]
    return seconds


def show(title: str, results: dict[int, dict[str, list[float]]]) -> None:
    """Print the figures of all sizes."""
    first = next(iter(results.values()))
    rows = [[title, *first]]
    rows += [[f"{size} MB", *figures(seconds)] for size, seconds in results.items()]
    print(table(rows), end="\n\n", flush=True)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sums", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sums:
        import torch.distributed as dist

        import mpiddp

        torch.set_num_threads(1)
        mpiddp.init_process_group()
        results = {size: measure_sums(size, args.rounds) for size in SUMS}
        if dist.get_rank() == 0:
            show("sums, ms", results)
        mpiddp.destroy_process_group()
        return
    torch.set_num_threads(2)
    for pause, when in ((0.0, "at once"), (APART, "later")):
        copies = {size: measure_copies(size, args.rounds, pause) for size in COPIES}
        show(f"copies {when}, ms", copies)
    done = mpirun.run(2, [__file__, "--sums", "--rounds", str(args.rounds)], timeout=600)
    print(done.stdout, end="")
    if done.returncode != 0:
        sys.exit(f"the sums: exit status {done.returncode}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    main()
