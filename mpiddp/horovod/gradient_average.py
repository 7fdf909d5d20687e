"""Average the gradients of some parameters while backward runs, until a step asks for them.

Note [Buckets after the first step]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The first step of an optimizer reduces all gradients at its end: only then it is known in which
order they come and which are sparse (first_step.py). Then the reducer is made, whose buckets stay
as they are. It fills in zeros for what a rank has no gradient for. Where no rank has one,
``.grad`` stays as it was: the optimizer steps as it does in one process. (Horovod makes it zeros,
with which weight decay and momentum go on.)

Note [Averages that are gone]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank that joins stands in for the steps of all averages, so ranks must have the same ones. An
optimizer that the program has dropped may be in a circle of references (with a scheduler, say),
and be there still on some ranks only. The garbage collector settles that, but takes 0.1 s and more
with torch's objects. So it runs where another average is made while there are some; and in a join
if there is an average that was not used since it was made, or since the last join.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from mpiddp.ddp.python_hook import PythonHook
from mpiddp.horovod import environment
from mpiddp.horovod.compression import Compression
from mpiddp.horovod.execution import torch_operation
from mpiddp.horovod.first_step import FirstStep
from mpiddp.horovod.optimizer_reducer import OptimizerReducer
from mpiddp.horovod.reduce_ops import Average, ReduceOp, Sum
from mpiddp.horovod.sparse_as_dense import SparseAsDense
from mpiddp.process_group.group import ProcessGroup
from mpiddp.reducer import joined, model_check
from mpiddp.reducer.assignment import BucketAssignment
from mpiddp.torch_internals.compiler import skip_compilation
from mpiddp.transports.choice import default_bucket_bytes, requested_transport

# As Horovod names it: bytes of gradients that are reduced together.
FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"

# All averages of this process, in the order in which they were made: the same on all ranks.
_alive: list[weakref.ref[GradientAverage]] = []


def averages_over(group: ProcessGroup | None) -> list[GradientAverage]:
    """Return the averages over the ranks of a process group. Not collective."""
    found = [reference() for reference in _alive]
    return [average for average in found if average is not None and average.is_over(group)]


def averages_in_use(group: ProcessGroup | None) -> list[GradientAverage]:
    """Return the averages over the ranks of a process group, the same on all ranks.

    Not collective. See Note [Averages that are gone].
    """
    if not all(average.was_used for average in averages_over(group)):
        gc.collect()
    return averages_over(group)


@dataclass
class AverageSettings:
    """How gradients are averaged, the same on all ranks.

    Attributes:
        group: the ranks.
        op: how the gradients of the ranks become one; not Adasum.
        compression: of `mpiddp.horovod.compression`, or a class with the same two functions.
        groups: how many buckets to make, or the parameters of each; None leaves it to sizes.
        sparse_as_dense: whether sparse gradients travel as dense ones.
        owner: the optimizer's class, for errors.
    """

    group: ProcessGroup
    op: ReduceOp
    compression: Any
    groups: int | Sequence[Sequence[torch.Tensor]] | None
    sparse_as_dense: bool
    owner: str


@skip_compilation
class GradientAverage:
    """The mean, or the sum, over ranks of the gradients of some parameters.

    Collective: all ranks of the group make it for the same parameters, in the same order.

    Args:
        named: names and parameters; all require a gradient now.
        settings: see `AverageSettings`.
        passes: how many backward passes each gradient has before it is reduced.

    Raises:
        RuntimeError: parameters or settings differ between ranks; the error says where.
        TypeError: gradients of some dtype cannot be averaged.
        ValueError: HOROVOD_FUSION_THRESHOLD is not a number of bytes.
    """

    def __init__(
        self, named: Sequence[tuple[str, torch.Tensor]], settings: AverageSettings, passes: int
    ) -> None:
        self._settings = settings
        self._passes = passes
        self.parameters = [parameter for _, parameter in named]
        self._names = model_check.ParameterNames(
            self.parameters, {index: name for index, (name, _) in enumerate(named)}
        )
        self._threshold = _fusion_threshold()
        numbers = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._groups: int | list[list[int]] | None
        if settings.groups is None or isinstance(settings.groups, int):
            self._groups = settings.groups
        else:
            self._groups = [
                [numbers[id(p)] for p in some if id(p) in numbers] for some in settings.groups
            ]
        model_check.verify_equal_models(
            settings.group,
            {
                **model_check.describe_tensors({f"parameter {name}": p for name, p in named}),
                **model_check.describe_settings(
                    {
                        "op": settings.op.name,
                        "compression": getattr(settings.compression, "__qualname__", "other"),
                        "groups": self._groups,
                        "sparse_as_dense": settings.sparse_as_dense,
                    }
                ),
                FUSION_THRESHOLD: str(self._threshold),
            },
            "make different optimizers",
        )
        self._first: FirstStep | None = FirstStep(self.parameters, passes)
        if averages_over(settings.group):
            gc.collect()
        self._steps_before = 0
        _alive.append(weakref.ref(self, _alive.remove))
        self._dense: SparseAsDense | None = None
        self.reducer: OptimizerReducer | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a backward pass has run since the last `finish`. Not collective."""
        watched = self.reducer or self._first
        return watched is not None and watched.in_flight

    def set_passes(self, passes: int) -> None:
        """Reduce each gradient in the backward pass of this number from now on. Not collective."""
        self._passes = passes
        if self._first is not None:
            self._first.passes = passes
        if self.reducer is not None:
            self.reducer.set_passes(passes)

    def finish(self) -> None:
        """Wait until ``.grad`` of each parameter is the mean of all ranks. Collective.

        Raises:
            RuntimeError: see `OptimizerReducer.finish`.
            OSError: some rank has too little memory for buckets.
        """
        if self._first is not None:
            self._first.begin_end(self._settings.group)
            self._make_reducer()
        self._made_reducer().finish()
        if self._dense is not None:
            self._dense.restore()

    def is_over(self, group: ProcessGroup | None) -> bool:
        """Return whether these are means over the ranks of `group`. Not collective."""
        return self._settings.group is group

    @property
    def steps(self) -> int:
        """In how many steps this rank has taken part. Not collective."""
        return 0 if self.reducer is None else self.reducer.reductions

    @property
    def was_used(self) -> bool:
        """Whether this rank has taken part in a step since `note_join`. Not collective."""
        return self.steps > self._steps_before

    def note_join(self) -> None:
        """Say that a join is over. Not collective."""
        self._steps_before = self.steps

    def begin_shadow(self) -> None:
        """Begin to stand in for a step of the other ranks, with zeros. Collective with that step.

        Raises:
            RuntimeError: a backward pass has run since the last step.
        """
        if self.in_flight:
            raise RuntimeError(
                f"rank {self._settings.group.me}: hvd.join() was called between backward and "
                f"step() of a DistributedOptimizer: step first"
            )
        if self._first is not None:
            self._first.begin_end(self._settings.group)
        else:
            self._submit_zeros()

    def _submit_zeros(self) -> None:
        reducer = self._made_reducer()
        joined.begin(reducer, reducer.divisor)

    def shadow(self) -> bool | None:
        """Move that step along. Not collective by itself.

        Returns:
            None while it is not over; then whether all ranks stood in for others, so that it was
            no step at all.
        """
        if self._first is not None:
            if not self._first.is_agreed():
                return None
            self._make_reducer()
            self._submit_zeros()
        reducer = self._made_reducer()
        if not joined.is_done(reducer):
            return None
        joined.finish(reducer)
        nobody = joined.all_joined(reducer)
        reducer.resume()
        return nobody

    def _made_reducer(self) -> OptimizerReducer:
        if self.reducer is None:
            raise RuntimeError(
                f"rank {self._settings.group.me}: this DistributedOptimizer has no buckets, "
                f"because they could not be made in an earlier step: make it again"
            )
        return self.reducer

    def _make_reducer(self) -> None:
        assert self._first is not None
        settings, group = self._settings, self._settings.group
        order, sparse, dense = self._first.end()
        self._first = None
        expect_sparse = [
            sparse[index] and not dense[index] and not settings.sparse_as_dense
            for index in range(len(self.parameters))
        ]
        # Hooks can be added to parameters that require a gradient only.
        frozen = [parameter for parameter in self.parameters if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        watched = {
            parameter: sparse[index]
            for index, parameter in enumerate(self.parameters)
            if not expect_sparse[index] and (sparse[index] or not dense[index])
        }
        self._dense = SparseAsDense(watched) if watched else None
        channels = group.acquire_channels(requested_transport(None), self.parameters)
        limits = default_bucket_bytes(
            next(iter(channels.values())),
            with_python=_needs_python(settings),
        )
        if self._threshold is not None:
            limits = [self._threshold]
        by_size = BucketAssignment(self.parameters, expect_sparse, limits, group)

        groups, parameters = self._groups, self.parameters  # not self: no circle of references

        def assign(_: list[int] | None) -> list[list[int]]:
            if groups is None:
                return by_size.in_order(order)
            return _by_groups(groups, order, parameters, expect_sparse)

        divisor = group.size() if settings.op == Average else 1
        compression, python_hook = None, None
        if _needs_python(settings):
            how = (settings.compression, group, settings.op, divisor)
            python_hook = PythonHook(_reduce_compressed, how)
        elif settings.compression is Compression.fp16:
            compression = torch.float16
        try:
            self.reducer = OptimizerReducer(
                self.parameters,
                group,
                channels,
                assign,
                self._names.describe,
                lambda missing, static: None,  # any rank may lack any gradient
                expect_sparse=expect_sparse,
                passes=self._passes,
                compression=compression,
                python_hook=python_hook,
                divisor=divisor,
            )
        except BaseException:
            group.release_channels(channels)
            raise
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        weakref.finalize(self.reducer, group.release_channels, channels).atexit = False
        group.modules.add(self.reducer, settings.owner)


def _fusion_threshold() -> int | None:
    """Return HOROVOD_FUSION_THRESHOLD in bytes; None if it is not set. Not collective.

    Raises:
        ValueError: it is not a number.
    """
    if not os.environ.get(FUSION_THRESHOLD, "").strip():
        return None
    return environment.read().fusion_bytes


def _by_groups(
    groups: int | Sequence[Sequence[int]],
    order: Sequence[int],
    parameters: Sequence[torch.Tensor],
    expect_sparse: Sequence[bool],
) -> list[list[int]]:
    """Return the parameter indices of each bucket, in the order in which they fill.

    Args:
        groups: how many groups of neighbours to make; or the members of each, where any other
            parameter is a group by itself.
        order: the indices in the order in which gradients come.
        parameters: by index. A bucket has one dtype and one device; others make more buckets.
        expect_sparse: for each parameter; a sparse one has its own bucket.
    """
    if isinstance(groups, int):
        size, more = divmod(len(parameters), groups)
        ends = [number * size + min(number, more) for number in range(groups + 1)]
        groups = [range(a, b) for a, b in pairwise(ends)]
    number_of = {index: number for number, members in enumerate(groups) for index in members}
    buckets: dict[object, list[int]] = {}
    for index in order:
        parameter = parameters[index]
        number = number_of.get(index)
        alone = number is None or expect_sparse[index]
        key = index if alone else (number, parameter.dtype, parameter.device)
        buckets.setdefault(key, []).append(index)
    place = {index: position for position, index in enumerate(order)}
    return sorted(buckets.values(), key=lambda bucket: max(place[index] for index in bucket))


def _needs_python(settings: AverageSettings) -> bool:
    """Whether gradients are reduced by Python: in C there are sums, and float16."""
    plain = settings.compression in (Compression.none, Compression.fp16)
    return not plain or settings.op not in (Average, Sum)


def _reduce_compressed(
    state: tuple[Any, ProcessGroup, ReduceOp, float], bucket: Any
) -> torch.futures.Future[torch.Tensor]:
    """Reduce each gradient of a bucket as the user's compression says. A communication hook."""
    compression, group, op, divisor = state
    # Means are sums, divided once they are as wide as the gradients.
    how = torch_operation(Sum if op == Average else op, torch.float32)
    buffer = bucket.buffer()
    gradients: Iterable[torch.Tensor] = bucket.gradients()
    if buffer.layout is not torch.strided:
        if op not in (Average, Sum):
            raise NotImplementedError(  # only sums exist of sparse gradients
                f"rank {group.me}: sparse gradients cannot be reduced with op=hvd.{op.name}; "
                f"give sparse_as_dense=True to the DistributedOptimizer"
            )
        buffer = buffer.coalesce()
        dist.all_reduce(buffer, group=group)
        buffer = buffer / divisor
        gradients = []
    for gradient in gradients:
        compressed, context = compression.compress(gradient)
        dist.all_reduce(compressed, how, group=group)
        gradient.copy_(compression.decompress(compressed, context).div_(divisor))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future
