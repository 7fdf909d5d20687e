"""NodeOptimizer: each rank steps its part of the parameters, once for all ranks of its node."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn

import torch
from torch.distributed.algorithms.join import Join, Joinable

from mpiddp.ddp import node_parts
from mpiddp.ddp.shared_parameters import SharedParameters
from mpiddp.ddp.wrapper import DistributedDataParallel
from mpiddp.optim import grad_scaler, same_settings, whole_parameters
from mpiddp.optim.blocks import BLOCK_BYTES, Block
from mpiddp.optim.elementwise import ELEMENTWISE, StateKind
from mpiddp.optim.first_steps import in_portions
from mpiddp.optim.gradient_uses import GradientUses
from mpiddp.optim.members import Member
from mpiddp.optim.same_settings import settings_of
from mpiddp.optim.state_memory import StateMemory
from mpiddp.optim.uneven_steps import UnevenSteps
from mpiddp.optim.whole_state import WholeState
from mpiddp.torch_internals.compiler_loading import disable_compilation


class NodeOptimizer(WholeState, GradientUses, UnevenSteps):
    """Step each parameter of a node once, in place, for all ranks of the node.

    Collective: all ranks of the model's process group construct it, and step it, together. Each
    rank steps the part of the parameters whose gradients it has averaged itself. So the optimizer's
    time, its traffic, and the memory of parameters and state are divided by the ranks of the node,
    and nothing is gathered afterwards.

    ``.grad`` is the mean, and lies once for the ranks of a node. What a program changes there, as
    `torch.nn.utils.clip_grad_value_` does, takes memory of its own until the next backward; what
    clips by norm does not. Changes of `state`, and parameters that are removed from groups, count
    from the next step on; all ranks must make the same.

    Within ``model.join()`` it steps once after each backward that is reduced, with the settings
    of a rank that has inputs. Ranks without inputs follow it, also where the others clip, or a
    GradScaler skips the step.

    An optimizer that does not treat each element by itself, such as Muon and Adafactor, gets whole
    parameters: one rank of a node steps each of them.

    Args:
        model: a `mpiddp.DistributedDataParallel` with ``shared_parameters=True``.
        optimizer_class: of torch or the user's.
        params: parameters of the model, or groups of them, as torch's optimizers take them. None is
            all that need a gradient.
        elementwise: whether `optimizer_class` treats each element by itself. None: that is tried.
        settings: those of `optimizer_class`.

    Raises:
        TypeError: `optimizer_class` looks at several parameters at once, as LBFGS does.
        ValueError: `model` does not share parameters, or some parameter is not the model's.
        OSError: some rank has too little memory for its state; raised on all ranks.
    """

    # Where users import it from.
    __module__ = "mpiddp.optim"

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        *,
        elementwise: bool | None = None,
        **settings: Any,
    ) -> None:
        wrapper = getattr(model, "_orig_mod", model)  # of torch.compile
        shared = getattr(wrapper, "_shared_parameters", None)
        if not isinstance(wrapper, DistributedDataParallel) or shared is None:
            raise ValueError(
                "NodeOptimizer needs a DistributedDataParallel of mpiddp that was made with "
                "shared_parameters=True"
            )
        if settings.get("differentiable"):
            raise ValueError("the step of a NodeOptimizer is not differentiable")
        self._set_up(wrapper, shared, optimizer_class, elementwise)
        self._settings = settings
        if params is None:
            params = [parameter for parameter in wrapper.parameters() if parameter.requires_grad]
        # Only to learn the defaults.
        defaults = optimizer_class([{"params": []}], **settings).defaults
        self._construct(params, defaults)

    def _set_up(
        self,
        wrapper: DistributedDataParallel,
        shared: SharedParameters,
        optimizer_class: type[torch.optim.Optimizer],
        elementwise: bool | None,
    ) -> None:
        Joinable.__init__(self)
        self._wrapper = weakref.ref(wrapper)
        self._shared: SharedParameters = shared
        self._class = optimizer_class
        self._elementwise = elementwise
        # Whether some group's parameters are stepped whole.
        self._steps_whole = False
        self._indices = {id(parameter): n for n, parameter in enumerate(shared.parameters)}
        self._frozen = {
            id(parameter) for parameter in wrapper.parameters() if not parameter.requires_grad
        }
        self._members: list[Member] = []
        self._without_state: list[Member] = []
        self._memories: list[StateMemory] = []
        # Of each group, as they were cut, and as they are stepped.
        self._undivided: list[list[Block]] = []
        self._blocks: list[list[Block]] = []
        self._slices = 0
        self._given: list[set[int]] = []
        self._present: list[list[torch.Tensor]] = []
        # What was done to gradients since the last step, by name.
        self._used: dict[str, str] = {}
        self._replaced: list[Member] = []
        self._inner: torch.optim.Optimizer | None = None

    def _construct(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        shared, optimizer_class = self._shared, self._class
        torch.optim.Optimizer.__init__(self, params, defaults)
        self._show_nothing()
        kind = {
            "the optimizer's class": f"{optimizer_class.__module__}.{optimizer_class.__qualname__}",
            "elementwise": self._elementwise,
        }
        same_settings.compare_groups(shared, kind, enumerate(self.param_groups))
        made = [self._prepare(group) for group in self.param_groups]
        self._inner = self._make([inner for inner, _ in made])
        # What hooks of all optimizers see is this one, once.
        step = type(self._inner).step
        self._inner_step: Callable[[Any], Any] = getattr(step, "__wrapped__", step)
        for _, members in made:
            self._begin(members)
        self._let_follow()
        shared.exchange(0)  # what is there from the start is there for all ranks

    def _make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return an optimizer of other tensors, which have no state yet. Not collective."""
        return self._class(groups, **self._settings)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a NodeOptimizer cannot be copied or pickled: use its state_dict")

    # Construction.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, as torch's method of this name. Collective.

        Raises:
            TypeError: with these settings the optimizer looks at several parameters at once.
            ValueError: a parameter is not the model's.
        """
        super().add_param_group(param_group)
        if self._inner is not None:
            added = [(len(self.param_groups) - 1, self.param_groups[-1])]
            same_settings.compare_groups(self._shared, {}, added)
            inner, members = self._prepare(self.param_groups[-1])
            self._inner.add_param_group(inner)
            self._begin(members)
            self._shared.exchange(0)

    def _prepare(self, group: dict[str, Any]) -> tuple[dict[str, Any], list[Member]]:
        """Return a group of this rank's slices of the parameters of a group. Collective."""
        shared = self._shared
        self._present.append(list(group["params"]))
        self._given.append({id(parameter) for parameter in group["params"]})
        given = [each for each in group["params"] if id(each) in self._indices]
        for parameter in group["params"]:
            if id(parameter) not in self._indices and id(parameter) not in self._frozen:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is not one that the model "
                    f"shares: a NodeOptimizer steps those of one model"
                )
        found, whole = self._find_state(group, given)
        members = [
            Member(self._indices[id(parameter)], parameter, kinds)
            for parameter, kinds in zip(given, found, strict=True)
        ]
        by_index = {member.index: member for member in members}
        if whole:
            self._steps_whole = True
            cut = whole_parameters.deal(shared.layouts, by_index, shared.ranks, self._slices)
        else:
            most = None
            if members and not group.get("foreach") and not group.get("fused"):
                most = BLOCK_BYTES // members[0].tensor.itemsize
            cut = node_parts.cut(shared.layouts, by_index, most, self._slices)
        slices = [part for block in cut for part in block]
        self._slices += len(slices)
        kinds = {member.index: member.kinds for member in members}
        memory = None
        if any(kinds.values()):
            memory = StateMemory(shared, slices, kinds)
            self._memories.append(memory)
        blocks = []
        for block in cut:
            if block[0].owner == shared.rank:
                of_block = [(part, by_index[part.parameter]) for part in block]
                blocks.append(Block(of_block, shared.flat[block[0].bucket], memory, whole))
                for part, member in of_block:
                    member.own.append(part)
        for member in members:
            member.memory = memory
        self._undivided.append(blocks)
        self._blocks.append(list(blocks))
        return {**settings_of(group), "params": [block.tensor for block in blocks]}, members

    def _find_state(
        self, group: dict[str, Any], parameters: Sequence[torch.Tensor]
    ) -> tuple[list[dict[str, StateKind]], bool]:
        """Return what is kept for each parameter of a group, and whether they are stepped whole."""
        settings = settings_of(group)

        def make(tensors: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
            return self._make([{**settings, "params": list(tensors)}])

        if not parameters:
            return [], False
        is_elementwise = self._elementwise
        if is_elementwise is None and self._class in ELEMENTWISE:
            is_elementwise = True
        return whole_parameters.find_state(make, parameters, self._class.__name__, is_elementwise)

    def _begin(self, members: list[Member]) -> None:
        """Take parameters that are new. Not collective."""
        self._members += members
        self._without_state += [member for member in members if member.kinds]
        self._bind()
        assert self._inner is not None
        # Some optimizers have a state before the first step.
        if any(self._inner.state[block.tensor] for block in self._all_blocks()):
            self._keep_state()
        if members:
            like = torch.zeros(
                [2] * members[0].tensor.dim(), dtype=members[0].tensor.dtype, device="cpu"
            )
            trial = self._make([{**settings_of(self.param_groups[-1]), "params": [like]}])
            if any(trial.state.values()):
                self._show_state(members)
        self._inner.state = defaultdict(
            dict, {tensor: state for tensor, state in self._inner.state.items() if state}
        )

    # The step.

    @disable_compilation
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's part, and wait for the others' parts. Collective.

        Args:
            closure: computes the loss again, with gradients; called once on each rank.

        Returns:
            What the closure returns.

        Raises:
            RuntimeError: another rank failed in this step, or did not come within the group's
                timeout. What this rank's part raises is raised, too. Parameters that were half
                changed are not used any more, and not saved.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        Join.notify_join_context(self)
        settings = self._begin_step()
        self._step_together(settings)
        for outer, inner in zip(self.param_groups, self._inner_groups, strict=True):
            outer.update(settings_of(inner))
        return loss

    def _begin_step(self) -> list[dict[str, Any]]:
        """Return the settings of the groups, with which this rank will step."""
        self._take_gradients()
        settings = [settings_of(group) for group in self.param_groups]
        self._tell_of_changes()
        self._tell("step", settings)
        return settings

    @property
    def _inner_groups(self) -> list[dict[str, Any]]:
        assert self._inner is not None
        return self._inner.param_groups

    def _step_together(self, settings: Iterable[dict[str, Any]]) -> None:
        """Step this rank's part, with what the user has changed in the optimizer. Collective.

        Args:
            settings: of the groups.
        """
        inner = self._inner
        assert inner is not None
        with self._stepping(settings):
            in_portions(
                self._class,
                self._inner_groups,
                inner.state,
                lambda: self._inner_step(inner),
                self._keep_state,
            )

    @contextmanager
    def _stepping(self, settings: Iterable[dict[str, Any]]) -> Iterator[None]:
        """Let the inner optimizer step, while no rank of the node reads parameters. Collective."""
        in_place = self._changes_in_place()
        edited = self._copy_of_edits() if in_place or self._was_edited() else None
        settings = list(settings)
        description = self._describe_step(settings, edited)
        changes = self._shared.own_changes()
        description["parameters changed by the program"] = changes or "none"
        description["optimizer.state changed in place"] = in_place or "nothing"
        same = same_settings.Comparison(self._shared, description)
        with self._shared.stepping(same.number, same.explain, bool(changes), self._steps_whole):
            if in_place:
                self._keep_changes_in_place()
            if edited is not None:
                self._take_edits(edited)
            self._put_back()
            for group, of_group in zip(self._inner_groups, settings, strict=True):
                group.update(of_group)
            for block in self._all_blocks():
                block.restore_gradient()
            yield
            self._keep_state()
            if self._without_state:
                self._show_state([m for m in self._without_state if m.has_gradient])
            same.finish()
        self._used.clear()

    def _take_edits(self, edited: dict[torch.Tensor, dict[str, Any]]) -> None:
        with_gradient = [member for member in self._members if member.has_gradient]
        self._take_state(edited)
        for member in with_gradient:
            member.has_gradient = True
        self._show_gradients()

    def _bind(self) -> None:
        """Give parameters and blocks their gradients' memory, if that is new."""
        shared = self._shared
        self._bound = shared.reducer.buckets
        gradients = [bucket.gradients for bucket in self._bound]
        views = {
            index: view
            for bucket in self._bound
            for index, view in zip(bucket.parameter_indices, bucket.views, strict=True)
        }
        for member in self._members:
            member.bind(views[member.index])
        for block in self._all_blocks():
            block.bind(gradients)
            block.show_gradient()

    def _all_blocks(self) -> Iterator[Block]:
        return chain.from_iterable(self._blocks)

    def _divide(self, kind_of: Callable[[Member], object]) -> None:
        """Divide blocks of parameters that are not of one kind, see Note [Slices in blocks]."""
        assert self._inner is not None
        for number, blocks in enumerate(self._blocks):
            parts = [part for block in blocks for part in block.divided(kind_of, self._inner.state)]
            self._blocks[number] = parts
            self._inner_groups[number]["params"] = [block.tensor for block in parts]

    def _show_gradients(self) -> None:
        """Let the optimizer see the gradients of parameters that have one."""
        self._divide(lambda member: member.has_gradient)
        for block in self._all_blocks():
            block.show_gradient()

    @torch.no_grad()
    def _take_gradients(self) -> None:
        """Let the blocks have the gradients that their parameters have."""
        self._take_groups()
        if self._bound is not self._shared.reducer.buckets:
            self._bind()
        changed = [member.take_gradient() for member in self._members]
        self._replaced = [member for member in self._members if member.is_replaced]
        if any(changed):
            self._show_gradients()

    def _put_back(self) -> None:
        """Put gradients that the user has replaced where they are stepped. Not collective."""
        for member in self._replaced:
            member.put_back()
        self._replaced = []

    def _keep_state(self) -> None:
        """Move what the optimizer has made new into shared memory."""
        assert self._inner is not None
        for block in self._all_blocks():
            block.keep_state(self._inner.state, self._class.__name__)


grad_scaler.install(NodeOptimizer)
