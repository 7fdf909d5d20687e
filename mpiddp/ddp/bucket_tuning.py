"""Measure in the first steps of training which bucket size is best: bucket_cap_mb="auto".

Note [When buckets are laid out again]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
In the first forward after a reduction, where torch's class does it once, too. Nothing is under way
then, and gradients that lie in buckets move with them. That forward is one of training (`train()`),
since a single rank may call the model for an evaluation; or one within join(), which ends the
search: there ranks without inputs would have no times. What a backward within no_sync adds to
comes after that, so no accumulation is split. The ranks tell each other the times of each turn,
and a step takes as long as on the rank where it takes longest. So they decide the same.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import AllgatherOptions

from mpiddp.ddp.bucket_search import STEPS_OF_A_TURN, Found, most_steps, search
from mpiddp.transports.choice import default_bucket_bytes

if TYPE_CHECKING:
    from mpiddp.engine.engine import Channel
    from mpiddp.reducer.reducer import Reducer

__all__ = ["CANDIDATES_MB", "BucketTuning", "size_limits", "tuning_of"]

# Beside the default. Smaller ones cost more calls than they hide time, and gradients of more
# than 100 MiB in one bucket leave the network idle for most of a backward.
CANDIDATES_MB = (1, 4, 12, 25, 100)
# Reductions before the first turn: caches fill, compilers compile, gradients show their order.
_WARM_UP = 5
_MB = 2**20


def size_limits(wrapper: Any, channel: Channel, *, with_python: bool = False) -> Sequence[int]:
    """Return the sizes of the first, second ... bucket in bytes; the last holds for the rest.

    Not collective. Given sizes hold, as in torch's class. `with_python` as in
    `default_bucket_bytes`.
    """
    if wrapper._default_bucket_sizes and not wrapper.bucket_bytes_cap_list:
        return default_bucket_bytes(channel, with_python=with_python)
    return list(wrapper.bucket_bytes_cap_list) or [wrapper.bucket_bytes_cap]


def tuning_of(wrapper: Any) -> BucketTuning | None:
    """Return what measures bucket sizes for a wrapper, None if it was not asked to.

    Not collective.
    """
    return BucketTuning(wrapper) if wrapper._tunes_buckets else None


class BucketTuning:
    """Finds the bucket size of one module. All ranks have one, or none has.

    Args:
        wrapper: the `DistributedDataParallel`, whose reducer is there.

    Attributes:
        goes_on: whether sizes are being measured, or will be.
        cap: size of the present buckets, in bytes.
        gain: by which part steps are shorter than with the default.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._reducer: weakref.ref[Reducer] = weakref.ref(wrapper.reducer)
        self._module = type(wrapper.module).__name__
        self._limits = list(wrapper.reducer.assign_buckets.size_limits)
        self.default = self.cap = self._limits[-1]
        self.gain = 0.0
        self.goes_on = True
        self.words = ""
        self._seen = 0
        self._times: list[float] = []
        self._steps = 0
        self._search: Generator[int, float, Found] | None = None
        # Sizes in bytes that make different buckets, and these.
        self._caps: list[int] = []
        self._layouts: list[list[list[int]]] = []
        self._installed = 0
        self._found: Found | None = None
        refused = self._refusal(wrapper)
        if refused:
            self._end(f"bucket sizes are not measured: {refused}")

    def facts(self) -> dict[str, Any]:
        """Return what was measured and chosen, as JSON has it. Not collective."""
        seconds = {} if self._found is None else self._found.seconds
        return {
            "module": self._module,
            "measuring": self.goes_on,
            "bucket_cap_mb": self.cap / _MB,
            "default_mb": self.default / _MB,
            "gain": self.gain,
            "steps": self._steps,
            "step_ms": {f"{self._caps[each] / _MB:g}": s * 1e3 for each, s in seconds.items()},
            "words": self.words,
        }

    def _refusal(self, wrapper: Any) -> str:
        """Return why nothing can be measured, "" if it can; the same on all ranks."""
        reducer = wrapper.reducer
        if reducer.process_group.size() == 1:
            return "there is one rank"
        if any(parameter.device.type != "cpu" for parameter in reducer.parameters):
            return "gradients are on a GPU"
        if reducer.domain is not None:
            return "parameters that ranks share lie in the order of the buckets"
        if wrapper.skip_all_reduce_unused_params:
            return "skip_all_reduce_unused_params leaves out the buckets of the first step"
        return ""

    def advance(self) -> bool:
        """Take note of a step; lay the buckets out for the next one.

        Collective in the first forward of training after a reduction.

        Returns:
            Whether there are other buckets.
        """
        wrapper, reducer = self._wrapper(), self._reducer()
        if wrapper is None or reducer is None:
            return False
        if wrapper._join_config.enable:
            return self.stop("inputs are uneven (join)")
        if not wrapper.training or reducer.reductions in (0, self._seen):
            return False
        self._seen = reducer.reductions
        if self._search is None:
            return self._seen >= _WARM_UP and self._begin(reducer)
        self._steps += 1
        self._times.append(reducer.times.last()[0])
        if len(self._times) < STEPS_OF_A_TURN:
            return False
        seconds, self._times = self._slowest(reducer, self._times[1:]), []
        try:
            following = self._search.send(seconds)
        except StopIteration as end:
            return self._choose(reducer, end.value)
        return self._lay_out(reducer, following)

    def stop(self, why: str) -> bool:
        """End it, and return to the default. Collective, but not within a backward.

        Args:
            why: in words.

        Returns:
            Whether there are other buckets now.
        """
        reducer = self._reducer()
        if not self.goes_on or reducer is None:
            return False
        changed = self._search is not None and self._lay_out(reducer, self._default_number())
        if self.goes_on:
            self._end(f"bucket sizes are not measured: {why}")
        return changed

    def take_hook(self, in_python: bool) -> None:
        """End it where a communication hook is about to be registered that changes its numbers.

        Collective. Recognised hooks that are there from the start are measured.
        """
        if in_python:
            self.stop("a communication hook in Python may keep state for each bucket")
        elif self._search is not None:
            self.stop("a communication hook was registered meanwhile")

    def _default_number(self) -> int:
        return self._caps.index(self.default)

    def _begin(self, reducer: Reducer) -> bool:
        """Find the sizes to try, and lay the buckets out for the first one."""
        assign = reducer.assign_buckets
        layouts = {self.default: [list(bucket.parameter_indices) for bucket in reducer.buckets]}
        for megabytes in CANDIDATES_MB:
            assign.size_limits = self._limits_for(megabytes * _MB)
            layout = [list(indices) for indices in assign.in_order(assign.order)]
            if layout not in layouts.values():
                layouts[megabytes * _MB] = layout
        assign.size_limits = self._limits
        self._caps = sorted(layouts)
        self._layouts = [layouts[cap] for cap in self._caps]
        self._installed = default = self._default_number()
        if len(self._caps) == 1:
            count = len(reducer.buckets)
            buckets = "bucket" if count == 1 else f"{count} buckets"
            self._end(f"all sizes lead to the same {buckets}, so nothing was measured")
            return False
        self._search = search(len(self._caps), default)
        return self._lay_out(reducer, next(self._search))

    def _limits_for(self, cap: int) -> list[int]:
        return [min(limit, cap) for limit in self._limits[:-1]] + [cap]

    def _lay_out(self, reducer: Reducer, number: int) -> bool:
        """Have the buckets of a size. Collective. Where there is no memory, the search ends."""
        if number == self._installed:
            return False
        try:
            reducer._build_buckets(self._layouts[number])
        except OSError as error:  # the same on all ranks, which have the buckets of before
            default = self._default_number()
            if default not in (number, self._installed):
                with contextlib.suppress(OSError):
                    reducer._build_buckets(self._layouts[default])
                    self._note_installed(reducer, default)
            self._end(f"bucket sizes are not measured: {error}")
            return True
        self._note_installed(reducer, number)
        return True

    def _note_installed(self, reducer: Reducer, number: int) -> None:
        self._installed, self.cap = number, self._caps[number]
        reducer.assign_buckets.size_limits = self._limits_for(self.cap)

    def _slowest(self, reducer: Reducer, times: Sequence[float]) -> float:
        """Return how long a step took, in the median, on the rank where it took longest."""
        group = reducer.process_group
        # The user may have set another device for new tensors.
        own = torch.tensor(times, dtype=torch.float64, device="cpu")
        everyone = torch.empty(group.size() * len(times), dtype=torch.float64, device="cpu")
        at_once = AllgatherOptions()
        at_once.asyncOp = False
        group.all_gather_single(everyone, own, at_once)
        return float(everyone.view(group.size(), -1).amax(dim=0).median())

    def _choose(self, reducer: Reducer, found: Found) -> bool:
        self._found = found
        changed = self._lay_out(reducer, found.best)
        if not self.goes_on:  # no memory
            return changed
        default = self._default_number()
        milliseconds = [found.seconds[each] * 1e3 for each in (found.best, default)]
        if found.best == default:
            self._end(f"no bucket size was clearly faster than the default in {self._steps} steps")
        else:
            self.gain = found.gain
            self._end(
                f"{self.cap / _MB:g} MiB a bucket: a step took {milliseconds[0]:.3g} ms, and "
                f"{milliseconds[1]:.3g} ms with the default of {self.default / _MB:g} MiB "
                f"(measured in {self._steps} steps)"
            )
        return changed

    def _end(self, words: str) -> None:
        """Measure no more, and say on rank 0 what holds from now on."""
        self.goes_on = False
        if self.cap == self.default:
            words += f". The default stays, {self.default / _MB:g} MiB"
        self.words = words
        self._search = None
        self._layouts = []
        reducer, wrapper = self._reducer(), self._wrapper()
        if reducer is None or wrapper is None:
            return
        wrapper.logger.set_tuned_buckets(self.cap, words)
        if reducer.process_group.rank() == 0:
            with contextlib.suppress(Exception):  # a stream that takes nothing
                print(f"mpiddp: {self._module}: {words}", file=sys.stderr, flush=True)


# How many steps it takes at most, for the pages.
MOST_STEPS = _WARM_UP + most_steps(len(CANDIDATES_MB))
