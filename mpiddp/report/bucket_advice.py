"""What to change where communication is not hidden behind backward, and the figures behind it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpiddp.findings import Finding
from mpiddp.report import parts
from mpiddp.report.bucket_times import ENGINE_LATE, FILLED_LATE, WIRE_FULL, BucketTimes
from mpiddp.report.summary import Summary

__all__ = ["exposed", "megabytes", "parameters_of"]

# Of a step, and of what is exposed, what is worth a word.
_MATTERS = 0.05
_LITTLE = 0.03
_CAUSE = 0.25
# Bytes of a bucket that is worth splitting, and of one that is mostly latency.
_LARGE = 1 << 20
_SMALL = 256 << 10
_MANY = 8
_NARROW = {"float16", "bfloat16"}


def megabytes(size: float) -> str:
    """Return a number of bytes in words. Not collective."""
    if size < 1 << 20:
        return f"{size / 1024:.0f} KiB"
    return f"{size / (1 << 20):.1f} MiB"


def parameters_of(names: tuple[str, ...]) -> str:
    """Return which parameters a bucket holds, in a few words. Not collective."""
    if len(names) < 3:
        return " and ".join(names)
    return f"{names[0]} to {names[-1]}, {len(names)} parameters"


def exposed(summary: Summary) -> Iterator[tuple[float, Finding]]:
    """Yield what each finding is about in milliseconds a step, and the finding. Not collective."""
    whole = summary.mean[parts.EXPOSED]
    if whole < _MATTERS * summary.step or not summary.buckets:
        return
    text = (
        f"{whole:.1f} ms of communication, {100 * whole / summary.step:.0f} % of a step, is exposed"
    )
    sums = sum((times.exposed for times in summary.buckets.values()), np.zeros(3))
    shares = sums / sums.sum() if sums.sum() else sums
    alone = _alone(summary)
    if alone is not None:
        yield (
            whole,
            Finding(
                "warning",
                f"{text}, since all gradients are in one bucket ({megabytes(alone)}), "
                f"which is launched "
                f"when backward is over: next to nothing can be hidden",
                "leave bucket_cap_mb unset, or make it smaller: a quarter of the "
                "gradients, say, is "
                f"bucket_cap_mb={max(alone / (1 << 22), 0.25):.2g}",
            ),
        )
    else:
        for cause, words in _WORDS.items():
            cost = whole * shares[cause]
            if shares[cause] > _CAUSE and cost > _LITTLE * summary.step:
                yield cost, words(summary, text, shares[cause])
        yield from _many_small(summary, whole)
    if summary.steps.reductions.sends_chunks and len(np.unique(summary.nodes)) == 1:
        yield (
            whole,
            Finding(
                "warning",
                f"{text}, and gradients travel as messages, though all ranks are on one node",
                "leave transport= and MPIDDP_TRANSPORT unset, so that they go through "
                "shared memory; "
                "`mpiddp doctor` says whether /dev/shm has room for it",
            ),
        )


def _alone(summary: Summary) -> int | None:
    """Return the size of the only bucket of the module that exposes most, if it has only one."""
    cost: dict[int, float] = {}
    for (module, _), times in summary.buckets.items():
        cost[module] = cost.get(module, 0.0) + float(times.exposed.sum())
    most = max(cost, key=cost.__getitem__)
    sizes = [
        bucket.bytes for (module, _), bucket in summary.trace.contents.items() if module == most
    ]
    return sizes[0] if len(sizes) == 1 and sizes[0] >= _LARGE else None


def _most(summary: Summary, cause: int) -> tuple[tuple[int, int], BucketTimes]:
    return max(summary.buckets.items(), key=lambda item: float(item[1].exposed[cause]))


def _filled_late(summary: Summary, text: str, share: float) -> Finding:
    key, times = _most(summary, FILLED_LATE)
    took = summary.per_step(times, float(times.exposed[FILLED_LATE]))
    bucket = summary.trace.contents.get(key)
    size = 0 if bucket is None else bucket.bytes
    said = (
        f"{text}, {100 * share:.0f} % of it since buckets were filled too late; most "
        f"of it is bucket "
        f"{key[1]} ({megabytes(size)}), {took:.1f} ms"
    )
    if bucket is not None and len(bucket.parameters) == 1:
        return Finding(
            "warning",
            f"{said}, which is one parameter, {bucket.parameters[0]}",
            f"no bucket size helps, since its gradient comes last: {_fewer_bytes(summary)}",
        )
    if size < _LARGE:
        return Finding(
            "warning",
            f"{said}: so few bytes cost mostly the way itself",
            "a faster network or transport helps (`mpiddp doctor` measures both), or fewer "
            "reductions: accumulate gradients in no_sync()",
        )
    return Finding(
        "warning",
        said,
        f"make the last bucket smaller: bucket_cap_mb={max(size / (1 << 21), 0.25):.2g}, or "
        f"bucket_cap_mb_list with a small last one; else {_fewer_bytes(summary)}",
    )


def _wire_full(summary: Summary, text: str, share: float) -> Finding:
    travelled = sum(t.travelled for t in summary.buckets.values()) / 1e3
    travelled /= summary.steps.durations.size
    backward = summary.mean[parts.BACKWARD]
    size = sum(bucket.bytes for bucket in summary.trace.contents.values())
    rate = size / max(travelled / 1e3, 1e-9) / 1e6
    return Finding(
        "warning",
        f"{text}, {100 * share:.0f} % of it since buckets queue: {megabytes(size)} take "
        f"{travelled:.1f} ms ({rate:.0f} MB/s), and backward {backward:.1f} ms",
        f"{_fewer_bytes(summary)}; larger batches or no_sync() reduce less often; `mpiddp doctor` "
        "says what the network can do, and which transport and interface is used",
    )


def _fewer_bytes(summary: Summary) -> str:
    """Return how to send fewer bytes than the program does."""
    sent_as = {bucket.dtype for bucket in summary.trace.contents.values()}
    if sent_as and sent_as <= _NARROW:
        return (
            f"gradients are sent as {' and '.join(sorted(sent_as))} already; the PowerSGD hook of "
            "torch sends still less, and changes what is learned"
        )
    return "send half of the bytes, model.register_comm_hook(None, mpiddp.compression.bf16)"


def _engine_late(summary: Summary, text: str, share: float) -> Finding:
    sums = np.zeros(4)
    for times in summary.buckets.values():
        sums += (times.behind_bytes, times.behind, times.after_bytes, times.after)
    said = (
        f"{text}, {100 * share:.0f} % of it since buckets that were ready travelled late or slowly"
    )
    if sums[1] and sums[3]:
        said += (
            f": {sums[0] / sums[1]:.0f} MB/s while backward runs, and {sums[2] / sums[3]:.0f} "
            f"when it is over"
        )
    facts = [rank.facts for rank in summary.trace.ranks]
    threads = f", now {facts[0]['threads']}" if "threads" in facts[0] else ""
    return Finding(
        "warning",
        said,
        f"leave cores to what moves gradients while backward runs: fewer threads a rank "
        f"(OMP_NUM_THREADS{threads}), ranks bound to cores of their own, and no "
        f"MPIDDP_PROGRESS_THREAD=0",
    )


def _many_small(summary: Summary, whole: float) -> Iterator[tuple[float, Finding]]:
    sizes = [bucket.bytes for bucket in summary.trace.contents.values()]
    mean = sum(sizes) / max(len(sizes), 1)
    if len(sizes) < _MANY or mean >= _SMALL:
        return
    yield (
        whole / 2,
        Finding(
            "warning",
            f"there are {len(sizes)} buckets of {megabytes(mean)} in the mean: each "
            f"costs a round of "
            f"messages",
            f"make them larger: bucket_cap_mb={max(2 * sum(sizes) / _MANY / (1 << 20), 1):.2g}, or "
            f"leave it unset",
        ),
    )


_WORDS = {FILLED_LATE: _filled_late, WIRE_FULL: _wire_full, ENGINE_LATE: _engine_late}
