"""Gradients of shared parameters that are means only where this rank steps, and who may read them.

Note [Partial means]
~~~~~~~~~~~~~~~~~~~~
With a NodeOptimizer, each rank needs the mean of a gradient only where it steps. So means go to
their owners only, see Note [Means for owners only] in shared.pyx, and what else is in ``.grad`` is
the rank's own gradient. Whoever needs all of it copies the other parts from their owners first
(`complete`, which all ranks call). That is done for the user where a backward adds to such
gradients.

Note [Who reads gradients]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Programs read ``.grad`` in many ways: most clip, some log. What they do they mostly do in each
iteration. So the first WHOLE_STEPS steps have whole means, and `watched_gradients` tells who reads
one. The ranks learn it when they meet for the step; if one has read, means stay whole for good.

Otherwise they are partial from then on. A rank that reads one then, all the same, gets a tensor of
its own, with the other parts copied from their owners; the ranks need not read together. That is
right as long as no owner has changed its part. So each rank has a number in shared memory. It is
even from when the rank has its means, or all ranks have scaled theirs, until it drops or zeroes
gradients. Who reads waits for the owners' numbers, and looks at them again when it has copied.
Where an owner has gone on, and after a step, reading is an error. And from the next step on means
are whole.

What scales gradients in place (a GradScaler, `NodeOptimizer.clip_grad_norm_`) lets the ranks meet
before, so that nobody reads any more. A second backward that is not reduced, as of a penalty on the
parameters, adds to them unseen; only versions show it. They are compared if somebody has read: that
step is then refused on all ranks.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.ddp import watched_gradients
from mpiddp.ddp.watched_gradients import gradient_of, set_gradient
from mpiddp.engine import forks
from mpiddp.reducer.bucket import view_like
from mpiddp.transports.shared import SharedBuckets

if TYPE_CHECKING:
    from mpiddp.ddp.node_parts import BucketLayout
    from mpiddp.ddp.torch_reducer import TorchReducer
    from mpiddp.process_group.group import ProcessGroup
    from mpiddp.transports.shared_memory import Mapping

__all__ = ["ASKED", "FETCHED", "PartialMeans"]

# Steps before means are partial: what reads gradients does it by then, mostly.
WHOLE_STEPS = 3

# What a rank tells the others when they meet for a step: that it has read gradients, and that it
# has copied parts of other ranks.
ASKED, FETCHED = 1, 2


class PartialMeans:
    """Shared parameters, whose gradients may be partial. Collective."""

    reducer: TorchReducer
    parameters: list[torch.Tensor]
    layouts: list[BucketLayout]
    group: ProcessGroup
    is_uneven: Callable[[], bool]
    _names: dict[int, str]
    _timeout: float

    # Whether some NodeOptimizer wants partial means, and none wants whole ones.
    _may_be_partial: bool | None = None
    _whole_steps = 0
    # Whether they are written that way, and were in the last reduction.
    sends_to_owners = False
    _were_partial = False
    _stepped = False
    # What this rank tells the others.
    asks = 0
    _warned = False
    _whole_at: list[int]
    _versions_then: list[int]
    _hooks: list[Any]
    _bound: list[Any] | None = None
    _numbers: memoryview | None = None
    _event = 0

    if TYPE_CHECKING:  # of SharedParameters

        @property
        def rank(self) -> int:
            """This rank's number in the node."""

        @property
        def ranks(self) -> int:
            """How many ranks the node has."""

        @property
        def across_nodes(self) -> bool:
            """Whether there are other nodes."""

        allocate: Callable[[int, Iterable[tuple[int, int]]], Mapping]
        exchange: Callable[[float], list[float]]
        check: Callable[[], None]
        _meet: Callable[[str], None]
        _world_rank: Callable[[int], str]

    def send_means_to_owners(self, wanted: bool) -> None:
        """Write means only where they are stepped, if the transport can and nobody reads the rest.

        Collective.

        Args:
            wanted: False: whole means from now on, also if that was called before, or is later.
        """
        self.complete()
        if self._may_be_partial is None:
            self._places = {
                index: (bucket, start)
                for bucket, layout in enumerate(self.layouts)
                for index, start in layout.starts.items()
            }
            self._numbers = memoryview(self.allocate(8 * self.ranks, ())).cast("B").cast("q")
            noting = weakref.WeakMethod(self._note_reduction)
            self.reducer.after_reduction = lambda: _call(noting)
        self._may_be_partial = wanted and self._may_be_partial is not False
        self._whole_steps = WHOLE_STEPS
        self._bound = None
        self.bind()
        watched = self._may_be_partial and self.ranks > 1 and not self.across_nodes
        if watched and watched_gradients.can_watch(self.parameters):
            watched_gradients.watch(self, self.parameters)
        else:
            self._make_whole()
        self.note_whole(range(len(self.parameters)))
        self._meet("construction of a NodeOptimizer")

    def _make_whole(self) -> None:
        """Have whole means from the next reduction on."""
        self._may_be_partial = False
        self._bound = None
        self.bind()
        if not self._were_partial:
            watched_gradients.unwatch(self.parameters)

    def bind(self) -> bool:
        """Prepare buckets that are new; return whether they are. Not collective."""
        buckets = self.reducer.buckets
        if buckets is self._bound:
            return False
        self._bound = buckets
        owners = _owner_of_memory(buckets)
        self.sends_to_owners = (
            bool(self._may_be_partial)
            and self._whole_steps == 0
            and owners is not None
            and all(bucket.gradient_buffer is None for bucket in buckets)
        )
        if owners is not None:
            owned = [layout.elements * layout.dtype.itemsize for layout in self.layouts]
            owners.send_to_owners(owned if self.sends_to_owners else [0] * len(owned))
        return True

    # When gradients change.

    def _note_reduction(self) -> None:
        """Note that all ranks have their means."""
        self._stepped = False
        self.asks &= ~FETCHED
        if self._were_partial and not self._may_be_partial:
            watched_gradients.unwatch(self.parameters)
        self._were_partial = self.sends_to_owners and self._bound is self.reducer.buckets
        self.settle()

    def settle(self) -> None:
        """Let other ranks read what is in this rank's part from now on.

        Not collective, but all ranks do it.
        """
        if self._numbers is not None and self._were_partial and not self.is_uneven():
            self._event += 1
            self._versions_then = self._gradient_versions()
            self._numbers[self.rank] = 2 * self._event

    def let_read(self) -> None:
        """Wait until all ranks have read what they want of gradients. Collective."""
        if self.sends_to_owners and not self.is_uneven():
            self._meet("a change of gradients")

    def agree_on_means(self, told: Sequence[int]) -> str:
        """Take what all ranks have told when they met for a step.

        Collective, if some have copied gradients.

        Returns:
            what is wrong, if something is.
        """
        if any(each & FETCHED for each in told):
            changed = any(map(self._was_added_to, range(len(self.parameters))))
            ranks = [rank for rank, each in enumerate(self.exchange(changed)) if each]
            if ranks:
                self.asks = 0
                self._make_whole()
                return (
                    f"rank {self.group.me}: a rank of this node has read .grad while rank "
                    f"{self._world_rank(ranks[0])} added to gradients in a backward that is not "
                    f"reduced. Use NodeOptimizer(..., whole_gradients=True)"
                )
        if any(each & ASKED for each in told):
            self.asks = 0
            self._make_whole()
        elif self._may_be_partial and self._whole_steps:
            self._whole_steps -= 1
            if not self._whole_steps:
                self._bound = None
                self.bind()
        return ""

    def _gradient_versions(self) -> list[int]:
        gradients = map(gradient_of, self.parameters)
        return [-1 if each is None else each._version for each in gradients]

    def _lies_in_bucket(self, index: int, gradient: torch.Tensor) -> bool:
        bucket, start = self._places[index]
        return gradient.data_ptr() == self.reducer.buckets[bucket].gradients[start:].data_ptr()

    def _was_added_to(self, index: int) -> bool:
        """Whether this rank's gradient has changed since the other ranks may read it."""
        gradient = gradient_of(self.parameters[index])
        return (
            gradient is not None
            and gradient._version != self._versions_then[index]
            and self._lies_in_bucket(index, gradient)
        )

    # Who needs means as a whole.

    def note_whole(self, indices: Iterable[int]) -> None:
        """Note that the gradients of these parameters are not partial means. Not collective."""
        reductions = self.reducer.reductions
        for index in indices:
            self._whole_at[index] = reductions
        if self._numbers is not None and self._were_partial:
            # The next backward may write there at once; otherwise it would let the ranks meet.
            self._numbers[self.rank] = 2 * self._event + 1

    def has_partial_means(self) -> bool:
        """Whether some gradient is the mean only where this rank steps. Not collective."""
        return self._were_partial and any(
            at < self.reducer.reductions and gradient_of(parameter) is not None
            for at, parameter in zip(self._whole_at, self.parameters, strict=True)
        )

    def read(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return what a reader of the gradient of this parameter gets. Not collective.

        Raises:
            RuntimeError: it is gone, or another rank did not come to it within the group's timeout.
        """
        if self._whole_at[index] >= self.reducer.reductions or forks.forked():
            return gradient
        if not self.asks & ASKED:
            self.asks |= ASKED
            if self.rank == 0 and not self._warned:
                self._warned = True
                warnings.warn(
                    "the program reads or changes .grad of parameters that a NodeOptimizer steps, "
                    "so the ranks write all means, not only those that each of them steps. If "
                    "that is meant, say NodeOptimizer(..., whole_gradients=True); "
                    "optimizer.clip_grad_norm_ and optimizer.gradient_norm do not need it",
                    stacklevel=3,
                )
        if not self._were_partial or not self._lies_in_bucket(index, gradient):
            return gradient
        found = self._fetch(index, *self._places[index])
        whole = view_like(found, 0, self.parameters[index])
        set_gradient(self.parameters[index], whole)
        self.asks |= FETCHED
        return whole

    def _fetch(self, index: int, bucket: int, start: int) -> torch.Tensor:
        """Return a copy of the mean of a parameter's gradient, flat."""
        layout = self.layouts[bucket]
        if self._numbers is None or self._stepped or self.is_uneven() or self._was_added_to(index):
            raise self._gone(index)
        stop = layout.stop(index)
        reduced = self.reducer.buckets[bucket]
        memory: Any = None if reduced.memory is None else reduced.memory.owner
        size = layout.elements * layout.dtype.itemsize
        found = reduced.gradients[start:stop].clone()
        owners = set()
        for low, high, owner in layout.parts(start, stop):
            if owner != self.rank:
                owners.add(owner)
                self._wait_for_means(owner)
                theirs = memory.buffer(bucket, owner, size).view(layout.dtype)
                found[low - start : high - start].copy_(theirs[low:high])
        if any(self._numbers[owner] != 2 * self._event for owner in owners):
            raise self._gone(index)
        return found

    def _wait_for_means(self, owner: int) -> None:
        assert self._numbers is not None
        until = time.monotonic() + self._timeout
        while self._numbers[owner] < 2 * self._event:
            self.check()
            if time.monotonic() > until:
                raise RuntimeError(
                    f"rank {self.group.me} has waited {self._timeout:g} s to read a gradient "
                    f"of which rank {self._world_rank(owner)} has a part, and which it has not "
                    f"averaged"
                )
            time.sleep(1e-5)

    def _gone(self, index: int) -> RuntimeError:
        name = self._names[id(self.parameters[index])]
        return RuntimeError(
            f"rank {self.group.me}: .grad of parameter {name} was read where it is the mean "
            f"only in this rank's part, and the other parts are gone: read gradients after each "
            f"backward, before optimizer.step(), zero_grad() and any backward that is not "
            f"reduced, and not within join(). Or use NodeOptimizer(..., whole_gradients=True)"
        )

    def complete(self, always: bool = False) -> None:
        """Bring the means of other ranks' parts into ``.grad``. Collective.

        Args:
            always: also where this rank needs none, because others do.
        """
        if not always and not self.has_partial_means():
            return
        self._meet("gradients()")
        for number, (bucket, layout) in enumerate(
            zip(self.reducer.buckets, self.layouts, strict=True)
        ):
            memory: Any = bucket.memory.owner if bucket.memory is not None else None
            size = layout.elements * layout.dtype.itemsize
            for start, stop, owner in layout.parts():
                if owner != self.rank:
                    theirs = memory.buffer(number, owner, size).view(layout.dtype)
                    bucket.gradients[start:stop].copy_(theirs[start:stop])
        self._meet("gradients()")
        self.note_whole(range(len(self.parameters)))

    def watch_backward(self) -> None:
        """Complete gradients when the next backward begins to add to them.

        Not collective; the backward is.
        """
        if self._hooks or not self.has_partial_means():
            return

        def complete(gradient: torch.Tensor) -> None:
            # Whatever the backward began at: the user's outputs may be of any class.
            hooks, self._hooks = self._hooks, []
            for hook in hooks:
                hook.remove()
            if not hooks or not self.has_partial_means():
                return
            if self.is_uneven():
                raise RuntimeError(
                    f"rank {self.group.me}: this backward adds to gradients that are means "
                    f"only where this rank steps, and within join() other ranks may be without "
                    f"inputs: call zero_grad before it, or use "
                    f"NodeOptimizer(..., whole_gradients=True)"
                )
            self.complete()

        self._hooks = [
            parameter.register_hook(complete)  # type: ignore[no-untyped-call]
            for parameter in self.parameters
            if parameter.requires_grad
        ]


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    found = method()
    if found is not None:
        found()


def _owner_of_memory(buckets: Sequence[Any]) -> SharedBuckets | None:
    """Return what can write means to their owners only, None if nothing can."""
    memory = buckets[0].memory.owner
    if isinstance(memory, SharedBuckets) and memory.has_owners:
        return memory
    return None
