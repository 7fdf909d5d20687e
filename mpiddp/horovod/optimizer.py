"""DistributedOptimizer: any optimizer of torch, whose step waits for averaged gradients.

Note [What Horovod's optimizer does]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Facts, from Horovod 0.28: gradients are averaged over ranks and *summed* over the backward passes of
a step. A gradient that has had fewer passes than `backward_passes_per_step`, or was set by hand, is
averaged in the step. `step` after `synchronize` averages once more, with a warning, unless it is
called in `skip_synchronize`. `zero_grad` is refused while gradients are under way.
Where Horovod would go wrong in silence, this one differs: a closure given to `step` is followed by
`synchronize`, each time that the optimizer calls it; a gradient that is changed while it is under
way is an error; parameters that are added later, or require a gradient only later, are averaged
too; and state that the given optimizer has is kept.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from mpiddp.horovod.adasum_optimizer import AdasumMethods
from mpiddp.horovod.compression import Compression
from mpiddp.horovod.gradient_average import AverageSettings, GradientAverage
from mpiddp.horovod.process_sets import ProcessSet, global_process_set, registered
from mpiddp.horovod.reduce_ops import Adasum, Average, ReduceOp
from mpiddp.process_group.group import ProcessGroup
from mpiddp.torch_internals.compiler import skip_compilation

__all__ = [
    "DistributedMethods",
    "DistributedOptimizer",
    "_DistributedAdasumOptimizer",
    "_DistributedOptimizer",
]

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)
Named = Iterable[tuple[str, torch.Tensor]]


def DistributedOptimizer(
    optimizer: AnyOptimizer,
    named_parameters: Named | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> AnyOptimizer:
    """Return an optimizer that steps with gradients averaged over all ranks, as Horovod's.

    Collective over the ranks of the process set. What is returned is an instance of a subclass of
    the given optimizer's class, and has its parameter groups and its state; use it instead. While
    backward runs, gradients are averaged in buckets (from the second step on, see Note [Buckets
    after the first step]); its `step` waits for them. Beyond torch's methods it has `synchronize`,
    `skip_synchronize` and `set_backward_passes_per_step`.

    Parameters that get no gradient on this rank get the mean of the others', with zeros for this
    one; where no rank has one, ``.grad`` stays as it is. The ranks' models start from equal
    parameters only after `broadcast_parameters`.

    Args:
        optimizer: of torch, or derived from it.
        named_parameters: pairs of unique names and parameters, at least of all those in
            `optimizer`, for errors; usually ``model.named_parameters()``.
        compression: `Compression.none` or `fp16`, which runs without Python; or a class with
            functions `compress` and `decompress` like theirs, called for each gradient.
        backward_passes_per_step: how many backward passes each gradient has before it is averaged.
            Gradients of several passes are added up, as in Horovod: divide the loss if you want
            their mean.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`; or `Adasum`: then each rank steps with its
            own gradients, and the steps are added adaptively, after backward.
        gradient_predivide_factor: accepted, and has no effect but rounding: sums of 16-bit
            gradients are made in float32 here, so they need no division before.
        num_groups: the old name of `groups`.
        groups: how many buckets to make of neighbouring parameters; or a list of lists of
            parameters that are reduced together, where any other is alone. None leaves it to
            sizes: HOROVOD_FUSION_THRESHOLD in bytes if that is set, else as in
            `mpiddp.DistributedDataParallel`.
        sparse_as_dense: whether sparse gradients travel as dense ones.
        process_set: the ranks that average. On others the optimizer works alone.

    Raises:
        TypeError: `optimizer` is not an optimizer of torch, or gradients of some dtype cannot be
            averaged.
        ValueError: an argument is not what is said above.
        RuntimeError: the ranks make different optimizers (the error says what differs).
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer)}")
    if isinstance(optimizer, DistributedMethods | AdasumMethods):
        raise ValueError("optimizer is a DistributedOptimizer already: wrap torch's optimizer")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    if num_groups != 0:
        warnings.warn(
            "num_groups of DistributedOptimizer is deprecated: use groups",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    _check_passes(backward_passes_per_step)
    _check_groups(groups)
    if not callable(getattr(compression, "compress", None)):
        raise ValueError("compression must be Compression.none, Compression.fp16, or alike")
    names = _named(optimizer, named_parameters)
    op = ReduceOp(op)
    if op == Adasum and _group_of(process_set) is not None:
        adaptive: Any = _derived(optimizer, AdasumMethods)
        adaptive._process_set, adaptive._compression = process_set, compression
        adaptive._parameter_names, adaptive.op = names, op
        adaptive.renew()
        adaptive.backward_passes_per_step = backward_passes_per_step
        return adaptive  # type: ignore[no-any-return]

    def settings(group: ProcessGroup) -> AverageSettings:
        return AverageSettings(
            group,
            op,
            compression,
            groups,
            sparse_as_dense,
            type(optimizer).__name__,
        )

    distributed: Any = _derived(optimizer, DistributedMethods)
    # As Horovod calls them: programs read them.
    distributed.op, distributed.process_set = op, process_set
    distributed.gradient_predivide_factor = gradient_predivide_factor
    distributed.sparse_as_dense = sparse_as_dense
    distributed._begin(names, process_set, settings, backward_passes_per_step)
    return distributed  # type: ignore[no-any-return]


def _group_of(process_set: ProcessSet) -> ProcessGroup | None:
    """Return the group that averages; None where this rank is alone in it, or not in it."""
    group = registered(process_set).group
    return None if group is None or group.size() == 1 else group


def _derived(optimizer: torch.optim.Optimizer, methods: type) -> Any:
    """Return an optimizer with other methods, and the parameters and state of a given one."""
    kind = type(optimizer)
    made = type(kind.__name__, (methods, kind), {"__doc__": kind.__doc__})
    derived: Any = object.__new__(made)
    # All but a `step` that a scheduler has put around the method of the one object.
    derived.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    return derived


@skip_compilation
class DistributedMethods(torch.optim.Optimizer):
    """What a DistributedOptimizer does in place of the optimizer that it was made of."""

    # Not inherited by copies, which therefore know that they are copies.
    _averages: list[GradientAverage] | None = None
    _process_set: ProcessSet
    _settings_for: Callable[[ProcessGroup], AverageSettings]
    _settings: AverageSettings | None
    _parameter_names: dict[torch.Tensor, str]
    _left_out: list[torch.Tensor]
    _synchronized: bool
    _should_synchronize: bool
    backward_passes_per_step: int

    def _begin(
        self,
        names: dict[torch.Tensor, str],
        process_set: ProcessSet,
        settings: Callable[[ProcessGroup], AverageSettings],
        passes: int,
    ) -> None:
        self._parameter_names = names  # as Horovod calls it: programs read it
        self._process_set = process_set
        self._settings_for = settings
        self._should_synchronize = True
        self.backward_passes_per_step = passes
        self.renew()

    def renew(self) -> None:
        """Average over the ranks that the process set has now, as `hvd.elastic` needs it.

        Collective over the process set.
        """
        group = _group_of(self._process_set)
        self._settings = None if group is None else self._settings_for(group)
        self._averages = []
        self._left_out = []
        self._synchronized = False
        self._include()

    def _include(self) -> None:
        """Average what requires a gradient and is not averaged yet. Collective if there is any."""
        if self._settings is None:
            return
        known = {id(p) for average in self._all() for p in average.parameters}
        missing = [
            p
            for group in self.param_groups
            for p in group["params"]
            if id(p) not in known and p.requires_grad
        ]
        if missing:
            names = self._parameter_names
            named = [(names.get(p, f"parameter.{i}"), p) for i, p in enumerate(missing)]
            self._all().append(
                GradientAverage(named, self._settings, self.backward_passes_per_step)
            )
            known.update(map(id, missing))
        self._left_out = [
            p for group in self.param_groups for p in group["params"] if id(p) not in known
        ]

    def _all(self) -> list[GradientAverage]:
        if self._averages is None:
            raise RuntimeError(
                "this is a copy of a DistributedOptimizer, which averages nothing: copy the "
                "optimizer that it was made of, and wrap the copy"
            )
        return self._averages

    def synchronize(self) -> None:
        """Wait until all gradients are averaged. Collective over the process set.

        Call it to clip or unscale gradients, and then `step` in `skip_synchronize`. Gradients that
        no backward has brought are averaged here, too.

        Raises:
            RuntimeError: a gradient was changed after backward, or some rank did not come in time.
            OSError: some rank has too little memory for the first buckets.
        """
        averages = self._all()
        if any(parameter.requires_grad for parameter in self._left_out):
            self._include()
        for average in averages:
            average.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within, `step` takes the gradients as they are: `synchronize` was called. Not collective.

        As in Horovod:

            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, unless in `skip_synchronize`, and step. Collective over the process set.

        Args:
            closure: computes the loss again; the gradients are averaged after each call.

        Raises:
            RuntimeError: see `synchronize`.
        """
        averages = self._all()
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(): all gradients are averaged a second time",
                    stacklevel=2,
                )
            if closure is None or any(average.in_flight for average in averages):
                self.synchronize()
            closure = closure and self._then_synchronize(closure)
        result = super().step(closure)
        self._synchronized = False
        return result

    step.hooked = True  # type: ignore[attr-defined]  # the inner step calls the step hooks

    def _then_synchronize(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def closure_and_synchronize() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            return loss

        return closure_and_synchronize

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget the gradients, as torch's method. Not collective.

        Raises:
            AssertionError: they are being averaged: backward was called, but not `step` or
                `synchronize`.
        """
        if any(average.in_flight for average in self._all()):
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(), while gradients are being averaged"
            )
        super().zero_grad(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce each gradient in the backward pass of this number from now on. Not collective.

        Raises:
            ValueError: it is not a positive number.
            RuntimeError: gradients are being averaged: call it after `step`.
        """
        _check_passes(passes)
        if any(average.in_flight for average in self._all()):
            raise RuntimeError(
                "set_backward_passes_per_step() was called between backward and step(): call it "
                "after step()"
            )
        self.backward_passes_per_step = passes
        for average in self._all():
            average.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch's method; they are averaged too.

        Collective over the process set.
        """
        super().add_param_group(param_group)
        self._include()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load state, as torch's method. Not collective."""
        self._synchronized = False
        self._should_synchronize = True
        super().load_state_dict(state_dict)


def _check_passes(passes: object) -> None:
    if not isinstance(passes, int) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be a positive number, not {passes!r}")


def _check_groups(groups: object) -> None:
    if groups is None or (isinstance(groups, int) and groups > 0):
        return
    if not isinstance(groups, list | tuple):
        raise ValueError(
            f"groups must be a positive number or a list of lists of parameters, not {groups!r}"
        )
    seen: set[int] = set()
    for parameter in (parameter for some in groups for parameter in some):
        if not isinstance(parameter, torch.Tensor):
            raise ValueError(f"groups must hold lists of parameters, not {parameter!r}")
        if id(parameter) in seen:
            raise ValueError("groups must hold each parameter once at most")
        seen.add(id(parameter))


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Named | None
) -> dict[torch.Tensor, str]:
    """Return the names of an optimizer's parameters; check them as Horovod does."""
    own = {
        parameter: f"parameter.{i}.{j}"
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    }
    if named_parameters is None:
        return own
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "named_parameters must be pairs of name and parameter, as model.named_parameters()"
        )
    names = [name for name, _ in pairs]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"names in named_parameters must be unique; these are not: {twice}")
    named = {parameter: name for name, parameter in pairs}
    unnamed = [own[parameter] for parameter in own if parameter not in named]
    if unnamed:
        raise ValueError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's parameters: "
            f"{', '.join(unnamed[:5])} (number of group and parameter)"
        )
    return named


# As Horovod calls the classes that it derives from: programs ask `isinstance`.
_DistributedOptimizer = DistributedMethods
_DistributedAdasumOptimizer = AdasumMethods
