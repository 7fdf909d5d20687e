"""Optimizers of the program's own that step shared parameters in parts: no line of it changes.

Note [Adopted optimizers]
~~~~~~~~~~~~~~~~~~~~~~~~~
With MPIDDP_SHARED_PARAMETERS a program makes its optimizer as always, before or after it wraps its
model. At the first step with parameters that a wrapper shares, the optimizer is adopted: for the
time of a step its groups and its state have this rank's parts of the parameters instead of these,
and what runs is the step of its own class, on the object that the program has. So hooks,
schedulers, attributes and `isinstance` are as always; between steps the groups have the program's
parameters, and the state shows whole tensors. How parts are cut, where the state lies and what
ranks compare is NodeOptimizer's, of which there is one for each wrapper that it steps.

What cannot be divided, as LBFGS, is not adopted: it writes whole parameters on each rank, each its
own pages, see Note [Changes of the program]. That is right, too, and gains nothing.
"""

from __future__ import annotations

import functools
import gc
import types
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.ddp import shared_parameters, uneven_inputs
from mpiddp.optim.first_steps import in_portions
from mpiddp.optim.node_optimizer import NodeOptimizer
from mpiddp.optim.same_kind import made_like, problem_of
from mpiddp.optim.same_settings import settings_of
from mpiddp.optim.shown_state import Changes, ShownTable
from mpiddp.torch_internals.compiler_loading import disable_compilation

if TYPE_CHECKING:
    from mpiddp.ddp.shared_parameters import SharedParameters
    from mpiddp.ddp.wrapper import DistributedDataParallel

__all__ = ["install"]

Optimizer = torch.optim.Optimizer
Step = Callable[..., Any]


@functools.cache
def install() -> None:
    """Let every optimizer step parts where parameters are shared. Once a process; not collective.

    Also those that there are, and those that a scheduler has prepared.
    """
    base: Any = Optimizer
    with_hooks: Callable[[Step], Any] = base.profile_hook_step
    base.profile_hook_step = staticmethod(lambda step: with_hooks(_by_parts(step)))
    for kind in _subclasses(Optimizer):
        step = vars(kind).get("step")
        # Decorators may have copied the mark: only what torch has made has the step below it.
        below = getattr(step, "__wrapped__", None)
        if getattr(step, "hooked", False) and below is not None:
            kind.step = base.profile_hook_step(below)
            kind.step.hooked = True
    # Their types are asked: some objects do more than answer when they are asked for their class.
    for optimizer in filter(lambda each: issubclass(type(each), Optimizer), gc.get_objects()):
        if hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
            optimizer.step = types.MethodType(_step_of_scheduled, optimizer)
    uneven_inputs.at_join.append(_adopt_before_join)


def _adopt_before_join(shared: SharedParameters) -> None:
    """Adopt what steps some parameters, which a rank without any inputs follows. Collective."""
    numbers = {id(parameter): number for number, parameter in enumerate(shared.parameters)}

    def found() -> list[tuple[tuple[int, str], Optimizer]]:
        """Return optimizers of the process, each after the number of its first parameter."""
        return [
            ((min(own), f"{type(each).__name__} {[*map(settings_of, each.param_groups)]}"), each)
            for each in gc.get_objects()
            if issubclass(type(each), Optimizer) and not issubclass(type(each), NodeOptimizer)
            for own in [[numbers[k] for k in _keys(each) if k in numbers]]
            if own
        ]

    if not all(each in _adopted for _, each in found()):
        gc.collect()  # what some ranks have not let go yet
    optimizers = found()
    own = [name for name, _ in optimizers]
    of_ranks = [Counter(names) for names in shared.group.allgather_objects(own)]
    for name, optimizer in sorted(optimizers, key=itemgetter(0)):
        if len({names[name] for names in of_ranks}) == 1:
            _adopted.setdefault(optimizer, Adopted(optimizer)).look(optimizer)


def _keys(optimizer: Optimizer) -> Iterator[int]:
    """Yield the ids of the parameters of an optimizer."""
    return (id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _subclasses(kind: type[Any]) -> set[type[Any]]:
    return {each for sub in kind.__subclasses__() for each in (sub, *_subclasses(sub))}


def _step_of_scheduled(self: Any, *args: Any, **kwargs: Any) -> Any:
    self._opt_called = True
    return type(self).step(self, *args, **kwargs)


_step_of_scheduled._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _by_parts(step: Step) -> Step:
    @functools.wraps(step)
    def stepping(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not shared_parameters.generation() or isinstance(self, NodeOptimizer):
            return step(self, *args, **kwargs)
        adopted = _adopted.get(self)
        if adopted is None:
            adopted = _adopted[self] = Adopted(self)
        if adopted.has_parts_in_place:  # a step of a subclass calls that of its base
            return step(self, *args, **kwargs)
        return adopted.step(step, self, args, kwargs)

    return stepping


class _Part(NodeOptimizer):
    """What an optimizer of the program steps of the parameters of one wrapper. Collective.

    Args:
        adopted: the optimizer, with its other parts.
        optimizer: the program's.
        wrapper: the module's.
        shared: its parameters.
        groups: of the optimizer, with parameters of this wrapper only.
    """

    def __init__(
        self,
        adopted: Adopted,
        optimizer: Optimizer,
        wrapper: DistributedDataParallel,
        shared: SharedParameters,
        groups: list[dict[str, Any]],
    ) -> None:
        self._set_up(wrapper, shared, type(optimizer), None)
        self._adopted = weakref.ref(adopted)
        self._optimizer = weakref.ref(optimizer)
        self._construct(groups, dict(optimizer.defaults))
        self._has_numbers = any(k.number for m in self._members for k in m.kinds.values())

    def _make(self, groups: list[dict[str, Any]]) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        made: Optimizer = made_like(optimizer, groups)
        return made

    def lacks(self, groups: list[dict[str, Any]]) -> bool:
        """Return whether groups have parameters of the wrapper that this does not step there."""
        return any(
            id(parameter) in self._indices and id(parameter) not in given
            for group, given in zip(groups, self._given, strict=False)
            for parameter in group["params"]
        )

    def made_again(self, optimizer: Optimizer) -> _Part:
        """Return another one, with the parameters that the groups have now. Collective.

        Those that were removed from them keep their state, as in torch.
        """
        adopted, wrapper = self._adopted(), self._wrapper()
        assert adopted is not None
        assert wrapper is not None
        groups = [_restricted(group, self._indices) for group in optimizer.param_groups]
        present = {id(parameter) for group in groups for parameter in group["params"]}
        for group, given in zip(groups, self._given, strict=False):
            group["params"] += [
                member.tensor
                for member in self._members
                if id(member.tensor) in given and id(member.tensor) not in present
            ]
        return _Part(adopted, optimizer, wrapper, self._shared, groups)

    def take_groups(self, groups: list[dict[str, Any]]) -> None:
        """Take settings and parameters of the program's groups. Collective if some are new.

        Raises:
            RuntimeError: some were taken away.
        """
        if len(groups) < len(self.param_groups):
            raise RuntimeError(
                f"rank {self._shared.group.me}: a group was taken out of param_groups of "
                f"{self._class.__name__}. With shared parameters remove its 'params' instead"
            )
        for number, group in enumerate(groups):
            own = _restricted(group, self._indices)
            if number < len(self.param_groups):
                self.param_groups[number].clear()
                self.param_groups[number].update(own)
            else:
                self.add_param_group(own)

    def begin(self, edited: Mapping[Any, Any] | None, stack: ExitStack) -> None:
        """Begin a step that ends with the stack. Collective.

        Args:
            edited: the state, if the program has changed it.
            stack: of this step.
        """
        self._take_state_of(edited)
        stack.enter_context(self._stepping(self._begin_step()))

    def _take_state_of(self, edited: Mapping[Any, Any] | None) -> None:
        self.state = self._shown if edited is None else edited  # type: ignore[assignment]

    def _step_together(self, settings: Iterable[dict[str, Any]]) -> None:
        """Step this part for others, within join(). Collective."""
        adopted, optimizer = self._adopted(), self._optimizer()
        assert adopted is not None
        assert optimizer is not None
        self._take_state_of(adopted.edited_state(optimizer))
        with self._stepping(settings):
            adopted.call(self._inner_step, optimizer, (), {})
        adopted.show(optimizer)

    def keep_state(self) -> None:
        """Move what the optimizer has made new into shared memory. Not collective."""
        self._keep_state()

    @property
    def inner_groups(self) -> list[dict[str, Any]]:
        """Groups of this rank's parts."""
        return self._inner_groups

    @property
    def inner_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The state of this rank's parts."""
        assert self._inner is not None
        return self._inner.state

    def drop_gradients(self) -> None:
        """Drop gradients that the step has dropped. Not collective."""
        for block in self._all_blocks():
            if block.has_gradient and block.tensor.grad is None:
                for _, member in block.slices:
                    member.tensor.grad = None

    def show(self, table: ShownTable) -> None:
        """Put the state of whole parameters into a table of the program. Not collective."""
        for tensor, state in self._shown.items():
            dict.__setitem__(table, tensor, state)

    def show_numbers(self) -> None:
        """Let numbers of Python in the state be those of now. Not collective."""
        if self._has_numbers:
            self._note_numbers()

    @property
    def shows(self) -> tuple[int, int]:
        """Changes when the state has something new to show."""
        return id(self._shown), len(self._shown)

    @property
    def has_left(self) -> bool:
        """Whether nobody shares its parameters any more."""
        return self._shared.has_left

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether this steps a parameter. Not collective."""
        return self.has_key(id(parameter))

    def has_key(self, key: int) -> bool:
        """Return whether this steps the parameter with this id. Not collective."""
        return key in self._indices

    def has_state(self, state: Mapping[Any, Any]) -> bool:
        """Return whether there is something in a state for these parameters. Not collective."""
        return any(state.get(member.tensor) for member in self._members)


class Adopted:
    """An optimizer of the program, and its parts.

    Args:
        optimizer: the program's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._parts: list[_Part] = []
        self._seen: weakref.WeakSet[SharedParameters] = weakref.WeakSet()
        self._looked: tuple[int, int] | None = None
        # Whether the optimizer has the parts in its groups, for a step.
        self.has_parts_in_place = False
        # What the program sees as the state, and what that was made of.
        self._table: ShownTable | None = None
        self._shows: list[Any] = []
        self._name = type(optimizer).__name__

    def step(
        self, function: Step, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do what `function` does, once for a node where it can be divided. Collective.

        Args:
            function: the step of the optimizer's class.
            optimizer: the program's.
            args: of the step.
            kwargs: of the step.
        """
        self.look(optimizer)
        if not self._parts:
            return function(optimizer, *args, **kwargs)
        return self._step(function, optimizer, *_with_closure_called(args, kwargs))

    def look(self, optimizer: Any) -> None:
        """Find the wrappers whose parameters it steps. Collective where there are new ones."""
        looked = shared_parameters.generation(), len(optimizer.param_groups)
        if looked != self._looked:
            self._find_parts(optimizer)
            self._looked = looked

    @disable_compilation
    @torch.no_grad()
    def _step(
        self, function: Step, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        lacking = [part.lacks(optimizer.param_groups) for part in self._parts]
        if any(lacking):
            # Some were put into groups since: all of the state is taken from what is shown.
            self._parts = [
                part.made_again(optimizer) if lacks else part
                for part, lacks in zip(self._parts, lacking, strict=True)
            ]
        for part in self._parts:
            part.take_groups(optimizer.param_groups)
        edited = self.edited_state(optimizer, any(lacking))
        with ExitStack() as stack:
            for part in self._parts:
                part.begin(edited, stack)
            result = self.call(function, optimizer, args, kwargs)
        self.show(optimizer)
        return result

    def call(
        self, function: Step, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a step of the optimizer with this rank's parts. Not collective by itself."""
        groups, whole = optimizer.param_groups, optimizer.state
        given = [group["params"] for group in groups]
        outside = [[p for p in params if not self._has(p)] for params in given]
        alone = len(self._parts) == 1 and not any(outside)
        if alone:
            state = self._parts[0].inner_state
        else:
            state = defaultdict(dict)
            for part in self._parts:
                state.update(part.inner_state)
            state.update({p: whole[p] for p in chain.from_iterable(outside) if p in whole})
        try:
            self.has_parts_in_place = True
            optimizer.state = state
            for number, (group, others) in enumerate(zip(groups, outside, strict=True)):
                parts = [part.inner_groups[number]["params"] for part in self._parts]
                group["params"] = [*chain.from_iterable(parts), *others]
            result = in_portions(
                type(optimizer) if alone else object,
                groups,
                state,
                lambda: function(optimizer, *args, **kwargs),
                self._parts[0].keep_state,
            )
        finally:
            self.has_parts_in_place = False
            optimizer.state = whole
            for group, params in zip(groups, given, strict=True):
                group["params"] = params
        for part in self._parts:
            part.drop_gradients()
            if state is not part.inner_state:
                for tensor in chain.from_iterable(g["params"] for g in part.inner_groups):
                    if state.get(tensor):
                        part.inner_state[tensor] = state[tensor]
        for parameter in chain.from_iterable(outside):
            if parameter in state and whole.get(parameter) is not state[parameter]:
                dict.__setitem__(whole, parameter, state[parameter])
        return result

    def show(self, optimizer: Any) -> None:
        """Let the program see the state of whole parameters. Not collective."""
        shows = [part.shows for part in self._parts]
        if shows != self._shows or optimizer.state is not self._table:
            table = ShownTable(Changes())
            for parameter, state in optimizer.state.items():
                if not self._has(parameter):
                    dict.__setitem__(table, parameter, state)
            for part in self._parts:
                part.show(table)
            optimizer.state = self._table = table
            self._shows = shows
        for part in self._parts:
            part.show_numbers()

    def _has(self, parameter: torch.Tensor) -> bool:
        return any(part.has(parameter) for part in self._parts)

    def edited_state(self, optimizer: Any, lacking: bool = False) -> Mapping[Any, Any] | None:
        """Return the state if the program has changed it, or if it is `lacking` in what is shown.

        Not collective.
        """
        if not lacking and not self._was_edited(optimizer.state):
            return None
        self._shows = []
        edited: Mapping[Any, Any] = optimizer.state
        return edited

    def _was_edited(self, state: Mapping[Any, Any]) -> bool:
        if self._table is None:
            return any(part.has_state(state) for part in self._parts)
        return state is not self._table or self._table.changes.noted

    # Which parameters it steps in parts.

    def _drop_parts(self, which: Callable[[_Part], bool]) -> None:
        """Step some parts no more. Not collective."""
        kept = [part for part in self._parts if not which(part)]
        if len(kept) < len(self._parts):
            # What is shown is the state that other parts take.
            self._parts, self._table, self._shows = kept, None, []

    def _find_parts(self, optimizer: Any) -> None:
        """Adopt the optimizer for wrappers that are new. Collective where there are some."""
        self._drop_parts(lambda part: part.has_left)
        for shared in shared_parameters.all_of_process():
            wrapper = shared.wrapper()
            if wrapper is None or shared in self._seen:
                continue
            own = {id(parameter) for parameter in shared.parameters}
            groups = [_restricted(group, own) for group in optimizer.param_groups]
            if not any(group["params"] for group in groups):
                continue
            self._seen.add(shared)
            # The module was wrapped again.
            self._drop_parts(functools.partial(_steps_some, own))
            problem = problem_of(optimizer)
            told = [each for each in shared.group.allgather_objects(problem) if each]
            if not told:
                try:
                    self._parts.append(_Part(self, optimizer, wrapper, shared, groups))
                except TypeError as error:  # the same on all ranks
                    told = [str(error)]
                else:
                    if len(self._parts) == 1:
                        optimizer.register_state_dict_post_hook(_with_plain_state)
            if told and shared.group.rank() == 0:
                warnings.warn(
                    f"{self._name} steps whole parameters on every rank, though the ranks of a "
                    f"node share them: {told[0]}",
                    stacklevel=4,
                )


def _steps_some(keys: Iterable[int], part: _Part) -> bool:
    """Return whether a part steps parameters with some of these ids."""
    return any(map(part.has_key, keys))


# By optimizer; an optimizer that is pickled or copied is adopted anew.
_adopted: weakref.WeakKeyDictionary[Any, Adopted] = weakref.WeakKeyDictionary()


def _restricted(group: dict[str, Any], own: Any) -> dict[str, Any]:
    """Return a group with those of its parameters whose id is among some."""
    return {**settings_of(group), "params": [p for p in group["params"] if id(p) in own]}


def _with_closure_called(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure that a step is given, before ranks meet; return one that knows the loss."""
    closure = kwargs.get("closure", args[0] if args else None)
    if not callable(closure):
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    if "closure" in kwargs:
        return args, {**kwargs, "closure": lambda: loss}
    return (lambda: loss, *args[1:]), kwargs


def _with_plain_state(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict whose tables are plain ones. A hook of the optimizer."""
    return {**saved, "state": {key: dict(state) for key, state in saved["state"].items()}}
