"""What is compared: each way to average gradients, as a training step to call.

All candidates of a model share the memory of its parameters, so that they differ in nothing
but the synchronisation.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from limit import Limit
from mpi4py import MPI
from names import (
    FLATTENED,
    GLOO,
    GLOO_FP16,
    HOROVOD,
    LIMIT,
    LIMIT_ALONE,
    ONE_EACH,
    OUR_BACKEND,
    OURS,
    OURS_BF16,
    OURS_FP16,
    OURS_MPI,
    TORCH_MPI,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from workloads import Workload

import mpiddp

Views = bool | None
Action = Callable[[], None]


def nothing() -> None:
    """Do nothing."""


@dataclass
class Candidate:
    """One way to average gradients.

    Attributes:
        name: one of `names.NAMES`.
        views: gradient_as_bucket_view, None where it makes no difference.
        model: what is trained.
        inputs: a batch.
        after: what synchronises after backward, where the model's own hooks do not.
        alone: the model of a step without synchronisation; None is `model` under no_sync.
        keep_gradients: whether zero_grad keeps the gradients' memory.
        begin: called before the candidate's turn, on all ranks.
        end: called after it.
        averaged: returns the means after a synchronised step; None where `.grad` has them.
    """

    name: str
    views: Views
    model: nn.Module
    inputs: torch.Tensor
    after: Action = nothing
    alone: nn.Module | None = None
    keep_gradients: bool = False
    begin: Action = nothing
    end: Action = nothing
    averaged: Callable[[], list[torch.Tensor]] | None = None

    def means(self) -> list[torch.Tensor]:
        """Return the averaged gradients after a synchronised step."""
        if self.averaged is not None:
            return self.averaged()
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def step(self, synchronised: bool) -> None:
        """Take one step: zero_grad, forward, backward. Collective if `synchronised`."""
        model = self.model if synchronised or self.alone is None else self.alone
        quiet: AbstractContextManager[Any] = nullcontext()
        if not synchronised and isinstance(model, nn.parallel.DistributedDataParallel):
            quiet = model.no_sync()
        with quiet:
            model.zero_grad(set_to_none=not self.keep_gradients)
            model(self.inputs).float().square().mean().backward()
        if synchronised:
            self.after()

    def rest(self) -> None:
        """Let go of the gradients until the next turn."""
        if not self.keep_gradients:
            for model in (self.model, self.alone):
                if model is not None:
                    model.zero_grad()


@dataclass
class LimitAlone:
    """limit.c with nothing around it; measured by itself, not as a difference of steps."""

    limit: Limit
    views: bool
    name: str = LIMIT_ALONE


class Maker:
    """Makes the candidates of one model.

    Collective.

    Args:
        workload: the model.
        gloo: a group of torch's Gloo over all ranks, None to go without.
        wanted: names of candidates.
        views: settings of gradient_as_bucket_view.
    """

    def __init__(
        self,
        workload: Workload,
        gloo: dist.ProcessGroup | None,
        wanted: Sequence[str],
        views: Sequence[bool],
    ) -> None:
        torch.manual_seed(1)
        self.first, self.inputs = workload.make()
        # Each rank has data of its own.
        if self.inputs.is_floating_point():
            drawn = torch.randn(self.inputs.shape, generator=_generator())
            self.inputs = drawn.to(self.inputs.dtype)
        else:
            self.inputs = torch.randint(8192, self.inputs.shape, generator=_generator())
        self.workload = workload
        self.gloo = gloo
        self.wanted = wanted
        self.views = views
        self.notes: dict[str, str] = {}

    def model(self) -> nn.Module:
        """Return a replica that shares the memory of all others of this rank."""
        replica = copy.deepcopy(self.first)
        for parameter, shared in zip(replica.parameters(), self.first.parameters(), strict=True):
            parameter.data = shared.data
        return replica

    def make(self) -> list[Candidate | LimitAlone]:
        """Return the candidates that exist here; `notes` says why others do not. Collective."""
        made: list[Candidate | LimitAlone] = []
        for views in self.views:
            ours = mpiddp.DistributedDataParallel
            made += self._wrapped(OURS, views, ours)
            made += self._wrapped(OURS_FP16, views, ours, default_hooks.fp16_compress_hook)
            made += self._wrapped(OURS_BF16, views, ours, default_hooks.bf16_compress_hook)
            if "transport" in inspect.signature(mpiddp.DistributedDataParallel).parameters:
                made += self._wrapped(OURS_MPI, views, ours, transport="mpi")
            else:
                self.notes[OURS_MPI] = "this mpiddp has no argument `transport`"
            torch_ddp = nn.parallel.DistributedDataParallel
            if self.gloo is not None:
                for name, hook in ((GLOO, None), (GLOO_FP16, default_hooks.fp16_compress_hook)):
                    made += self._wrapped(name, views, torch_ddp, hook, process_group=self.gloo)
            made += self._wrapped(OUR_BACKEND, views, torch_ddp, process_group=dist.group.WORLD)
            if dist.is_mpi_available() and TORCH_MPI in self.wanted:
                made += self._wrapped(TORCH_MPI, views, torch_ddp, process_group=_torch_mpi_group())
        for name, by_hand in ((FLATTENED, flattened), (ONE_EACH, one_each)):
            if name in self.wanted:
                model = self.model()
                made.append(Candidate(name, None, model, self.inputs, by_hand(model)))
        if HOROVOD in self.wanted and (horovod := self._horovod()):
            made.append(horovod)
        return made + self._limits()

    def _wrapped(
        self,
        name: str,
        views: bool,
        wrapper: Callable[..., Any],
        hook: Callable[..., Any] | None = None,
        **arguments: Any,
    ) -> list[Candidate | LimitAlone]:
        if name not in self.wanted:
            return []
        problem, model = "", None
        try:
            model = wrapper(
                self.model(),
                gradient_as_bucket_view=views,
                forward_sync_buffers=self.workload.buffers,
                **arguments,
            )
            if hook is not None:
                model.register_comm_hook(arguments.get("process_group"), hook)
        # One that cannot be made is left out on all ranks, and the table says why.
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:  # say why below
            problem = str(error).splitlines()[0]
        problems = [other for other in MPI.COMM_WORLD.allgather(problem) if other]
        if problems or model is None:
            self.notes[name] = problems[0]
            return []
        return [Candidate(name, views, model, self.inputs)]

    def _horovod(self) -> Candidate | None:
        """Return Horovod, started anew for each turn: its thread never rests and slows others."""
        try:
            import horovod.torch as hvd
        except ImportError:
            return None
        model = self.model()
        optimizers: list[Any] = []

        def begin() -> None:
            hvd.init()
            optimizers.append(
                hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), lr=0.0),
                    named_parameters=model.named_parameters(),
                )
            )

        def end() -> None:
            del optimizers[:]
            hvd.shutdown()

        def after() -> None:
            optimizers[0].synchronize()

        return Candidate(
            HOROVOD, None, model, self.inputs, after, self.model(), begin=begin, end=end
        )

    def _limits(self) -> list[Candidate | LimitAlone]:
        if not {LIMIT, LIMIT_ALONE} & set(self.wanted):
            return []
        if mpiddp.get_topology().node_count > 1:
            self.notes[LIMIT] = "the ranks are on several nodes"
            return []
        # zero_grad() that keeps the gradients, so that their addresses stay. The step without
        # synchronisation does the same, so the difference is the loop and nothing else.
        model = self.model()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in reversed(list(model.parameters())) if p.grad is not None]
        try:
            limit = Limit(gradients, MPI.COMM_WORLD)
        except RuntimeError as error:
            self.notes[LIMIT] = self.notes[LIMIT_ALONE] = str(error)
            return []
        made: list[Candidate | LimitAlone] = []
        for views in self.views:
            if LIMIT in self.wanted:
                made.append(
                    Candidate(
                        LIMIT,
                        views,
                        model,
                        self.inputs,
                        lambda views=views: limit.step(not views),  # type: ignore[misc]
                        keep_gradients=True,
                        averaged=limit.means,
                    )
                )
            if LIMIT_ALONE in self.wanted:
                made.append(LimitAlone(limit, views))
        return made


def flattened(model: nn.Module) -> Action:
    """Return one blocking Allreduce of all gradients in one flat buffer."""
    parameters = list(model.parameters())
    flat = torch.empty(sum(parameter.numel() for parameter in parameters))
    pieces = [
        piece.view_as(parameter)
        for piece, parameter in zip(
            torch.split(flat, [parameter.numel() for parameter in parameters]),
            parameters,
            strict=True,
        )
    ]
    buffer = flat.numpy()

    def reduce() -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_copy_(pieces, gradients)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)
        flat.div_(MPI.COMM_WORLD.size)
        torch._foreach_copy_(gradients, pieces)

    return reduce


def one_each(model: nn.Module) -> Action:
    """Return one blocking Allreduce a parameter."""
    parameters = list(model.parameters())

    def reduce() -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, parameter.grad.numpy())
                parameter.grad.div_(MPI.COMM_WORLD.size)

    return reduce


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(100 + dist.get_rank())


_torch_mpi: list[Any] = []


def _torch_mpi_group() -> Any:
    """Return a group of torch's own MPI backend, which only a torch built with MPI has."""
    if not _torch_mpi:
        _torch_mpi.append(dist.new_group(backend="mpi"))
    return _torch_mpi[0]
