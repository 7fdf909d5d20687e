"""What to change so that steps become faster, each with the figure that says so.

A rule says something where what it is about takes a twentieth of a step or more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from mpiddp.findings import Finding
from mpiddp.report import bucket_advice, parts
from mpiddp.report.slow_ranks import Slow
from mpiddp.report.summary import Summary

__all__ = ["findings"]

# Of a step, what is worth a word.
_MATTERS = 0.05
_MUCH = 0.1


def findings(summary: Summary) -> list[Finding]:
    """Return what to change, what costs most first; of the files last. Not collective."""
    found: list[tuple[float, Finding]] = []
    for rule in _RULES:
        found += rule(summary)
    found.sort(key=lambda each: -each[0])
    said = [finding for _, finding in found]
    if not said:
        mean = summary.mean
        busy = mean[parts.FORWARD] + mean[parts.BACKWARD]
        said.append(
            Finding(
                "ok",
                f"nothing but computing takes much of a step: forward and backward are "
                f"{_share(busy, summary)}",
            )
        )
    return said + list(_files(summary))


def _share(milliseconds: float, summary: Summary) -> str:
    return f"{milliseconds:.1f} ms, {100 * milliseconds / summary.step:.0f} % of a step"


def _middle(by_rank: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values of the rank in the middle; of two, the lower ones."""
    middle: NDArray[np.float64] = np.percentile(by_rank, 50, axis=0, method="lower")
    return middle


def _slow(summary: Summary) -> Iterator[tuple[float, Finding]]:
    for slow in summary.slow:
        cost, (part, longer) = slow.cost / 1e3, slow.longer
        since = f"since step {slow.first}" if slow.to_the_end else (
            f"from step {slow.first} to {slow.last}"
        )  # fmt: skip
        text = (
            f"all wait for {slow.name} {since}: it was the last in {slow.slowest} of {slow.steps} "
            f"steps, and the others waited {cost:.1f} ms, "
            f"{100 * slow.cost / slow.duration:.0f} % of each"
        )
        if longer / 1e3 > cost / 4:
            text += (
                f". Longer than with the others was {parts.NAMES[part]}: by {longer / 1e3:.1f} ms"
            )
        remedy = _CURES[part] if longer / 1e3 > cost / 4 else _CURES[parts.BACKWARD]
        yield cost * slow.slowest / len(summary.steps.numbers), Finding("warning", text, remedy)


_CURES = {
    parts.FORWARD: "see whether its batches are larger than those of others, and by "
    "`mpiddp doctor` "
    "whether its host has slower cores or memory, or something else runs there",
    parts.OPTIMIZER: "see by `mpiddp doctor` whether its host has slower memory, or something else "
    "runs there",
    parts.DATA: "give its DataLoader more workers (num_workers, persistent_workers=True), or "
    "faster storage; see whether it reads more than the others",
    parts.CHECKPOINT: "save in the background: mpiddp.checkpoint.async_save, or Snapshots",
    parts.LOSS: "what lies between its forward and its backward, such as logging or "
    "the loss, is done "
    "by this rank alone: do it less often, or after the step",
    parts.COLLECTIVES: "call them less often, or with async_op=True",
    parts.OTHER: "this rank does something between its steps, such as logging, "
    "validation or writing: "
    "do it less often, or in a thread",
}
_CURES[parts.BACKWARD] = _CURES[parts.FORWARD]


def _waiting(summary: Summary) -> Iterator[tuple[float, Finding]]:
    """Waiting for nobody in particular."""
    waited = summary.mean[parts.WAITING]
    told = sum(_in_mean(slow, summary) for slow in summary.slow)
    if waited - told < _MUCH * summary.step or len(summary.trace.ranks) < 2:
        return
    slowest = np.argmax(summary.steps.reductions.late, axis=0)
    many = int(np.unique(slowest).size)
    text = (
        f"ranks wait {_share(waited - told, summary)}, for a slowest one that is another one in "
        f"turn: {many} ranks in {len(summary.steps.numbers)} steps"
    )
    remedy = (
        "make batches even (by length, where that differs), bind each rank to cores of its own, "
        "and let nothing else run on them"
    )
    yield waited - told, Finding("warning", text, remedy)


def _in_mean(slow: Slow, summary: Summary) -> float:
    return slow.cost / 1e3 * slow.slowest / len(summary.steps.numbers)


def _data(summary: Summary) -> Iterator[tuple[float, Finding]]:
    by_rank = summary.by_rank[:, parts.DATA]
    usual = float(_middle(by_rank))
    if usual < _MATTERS * summary.step:
        return
    yield (
        usual,
        Finding(
            "warning",
            f"loading data takes {_share(usual, summary)}, on the rank in the middle; "
            f"{by_rank.max():.1f} ms on rank {summary.trace.ranks[int(by_rank.argmax())].rank}",
            "let workers load the next batches meanwhile: DataLoader(..., num_workers=2, "
            "persistent_workers=True), or more of them",
        ),
    )


def _optimizer(summary: Summary) -> Iterator[tuple[float, Finding]]:
    took = summary.mean[parts.OPTIMIZER]
    here = max(ranks for _, _, ranks, _ in summary.by_node())
    shared = any(rank.facts.get("shared_parameters") for rank in summary.trace.ranks)
    names = summary.trace.optimizers
    if took < _MUCH * summary.step or here < 2 or shared:
        return
    if any("NodeOptimizer" in name for name in names):
        return
    saved = took * (1 - 1 / here)
    yield (
        saved,
        Finding(
            "warning",
            f"the optimizer ({', '.join(names)}) takes {_share(took, summary)}, and "
            f"each of the {here} "
            f"ranks of a node makes the same step",
            f"let each of them step a part for all, which saves {saved:.1f} ms at most: "
            f"python -m mpiddp --shared-parameters, or mpiddp.optim.NodeOptimizer",
        ),
    )


def _collectives(summary: Summary) -> Iterator[tuple[float, Finding]]:
    took = summary.mean[parts.COLLECTIVES]
    if took < _MATTERS * summary.step:
        return
    counts = summary.trace.collectives
    often = sorted(counts, key=lambda name: -counts[name])[:3]
    yield (
        took,
        Finding(
            "warning",
            f"collectives that the program calls outside of forward and backward take "
            f"{_share(took, summary)}; most often {', '.join(often)}",
            "call them less often (a mean of the loss every 10 steps), or with "
            "async_op=True; a wait for "
            "a slow rank may be in it",
        ),
    )


def _checkpoints(summary: Summary) -> Iterator[tuple[float, Finding]]:
    took = summary.mean[parts.CHECKPOINT]
    if took < _MATTERS * summary.step:
        return
    yield (
        took,
        Finding(
            "warning",
            f"checkpoints take {_share(took, summary)}, in the mean of all steps",
            "save in the background (mpiddp.checkpoint.async_save or Snapshots), or less often",
        ),
    )


def _other(summary: Summary) -> Iterator[tuple[float, Finding]]:
    medians = _middle(summary.by_rank)
    for part, where in (
        (parts.LOSS, "between forward and backward"),
        (parts.OTHER, "between steps, and not in a DataLoader"),
    ):
        took = float(medians[part])
        if took < _MUCH * summary.step:
            continue
        yield (
            took,
            Finding(
                "warning",
                f"{_share(took, summary)} goes by {where}, on the rank in the middle",
                "see with torch.profiler what the program does there: loading data without a "
                "DataLoader, metrics, logging, .item()",
            ),
        )


def _threads(summary: Summary) -> Iterator[tuple[float, Finding]]:
    """More threads than cores, and one rank for several sockets."""
    facts = [rank.facts for rank in summary.trace.ranks]
    if not all("threads" in each and "cores" in each for each in facts):
        return
    nodes = summary.nodes
    for node in np.unique(nodes):
        here = [each for each, of in zip(facts, nodes, strict=True) if of == node]
        threads = sum(each["threads"] for each in here)
        cores = len(set().union(*(each["cores"] for each in here)))
        if threads > cores:
            yield (
                0.0,
                Finding(
                    "warning",
                    f"the {len(here)} ranks on {here[0]['host']} have {threads} threads "
                    f"({here[0]['threads']} a rank) on {cores} cores",
                    f"OMP_NUM_THREADS={max(cores // len(here), 1)}, or fewer ranks; "
                    f"`mpiddp doctor` shows "
                    f"how they are bound",
                ),
            )
            break
    spread = [each for each in facts if each.get("sockets", 1) > 1 and each["threads"] > 1]
    alone = [each for each in spread if len(each["cores"]) >= each["threads"] > 1]
    for each in alone[:1]:
        per_socket = len(each["cores"]) / each["sockets"]
        if each["threads"] <= per_socket:
            continue
        yield (
            0.0,
            Finding(
                "warning",
                f"rank {each['rank']} on {each['host']} has {each['threads']} threads on "
                f"{each['sockets']} sockets: half of its memory is far from each of them",
                f"start a rank on each socket: mpirun --map-by socket --bind-to socket, "
                f"OMP_NUM_THREADS={int(per_socket)}",
            ),
        )


def _files(summary: Summary) -> Iterator[Finding]:
    for fault in summary.trace.faults:
        yield Finding("warning", fault, "copy the files of all hosts into one folder, `ranks`")
    lost = sum(int(rank.facts["lost"]) for rank in summary.trace.ranks)
    if lost:
        yield Finding(
            "warning",
            f"{lost} operations and buckets are missing: the flight recorder was full",
            "leave TORCH_FR_BUFFER_SIZE unset",
        )
    if not all(rank.facts["clock"]["aligned_at_end"] for rank in summary.trace.ranks):
        yield Finding(
            "warning",
            "the clocks were compared at the beginning only: what one rank waits for "
            "another can be "
            "wrong by more than is said",
            "call destroy_process_group at the end of the program",
        )
    if summary.steps.left_out:
        yield Finding("ok", f"{summary.steps.left_out} steps are left out: not all ranks have them")


_RULES: tuple[Callable[[Summary], Iterator[tuple[float, Finding]]], ...] = (
    _slow,
    _waiting,
    _data,
    bucket_advice.exposed,
    _optimizer,
    _collectives,
    _checkpoints,
    _other,
    _threads,
)
