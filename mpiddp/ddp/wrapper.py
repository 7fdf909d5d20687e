"""DistributedDataParallel: torch's own wrapper with our reducer in it.

Note [Torch's wrapper]
~~~~~~~~~~~~~~~~~~~~~~
The class derives from torch's, so that isinstance, torch.compile and libraries see the
class that they know, and forward, no_sync, buffers and state_dict are torch's own code. We
replace the C++ Reducer and Logger, which `_ddp_init_helper` builds, and the checks that must come
before torch's constructor communicates. versions.py adds what older releases of torch lack.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._functorch import peek_interpreter_stack
from torch.distributed.distributed_c10d import _rank_not_in_group
from torch.nn.parallel.distributed import (
    _cast_buffers,
    _find_tensors,
    _setup_mixed_precision_params,
)

from mpiddp.ddp import arguments as argument_checks
from mpiddp.ddp import distributed_autograd, hooks, optimizer_in_backward
from mpiddp.ddp.bucket_tuning import size_limits, tuning_of
from mpiddp.ddp.groups import group_of, is_communicator
from mpiddp.ddp.hook_registration import HookRegistration
from mpiddp.ddp.kept_parameters import KeptParameters, link_hooks
from mpiddp.ddp.logger import Logger, logs_errors
from mpiddp.ddp.mixed_precision import NarrowParameters, compression_of, gradient_dtypes
from mpiddp.ddp.slow_ranks import comparison_of
from mpiddp.ddp.state_copies import StateCopies
from mpiddp.ddp.torch_reducer import TorchReducer
from mpiddp.ddp.uneven_inputs import UnevenInputs
from mpiddp.engine import forks
from mpiddp.mpi import uncaught
from mpiddp.reducer import errors, model_check
from mpiddp.reducer.assignment import BucketAssignment
from mpiddp.reducer.forward_passes import ForwardPasses
from mpiddp.torch_internals.compiler import compile_what_it_calls, skip_compilation
from mpiddp.torch_internals.compiler_loading import compiler_not_asked
from mpiddp.transports.choice import requested_transport

if TYPE_CHECKING:
    from mpi4py import MPI


@skip_compilation
class DistributedDataParallel(HookRegistration, UnevenInputs, StateCopies):
    """Average the gradients of `module` over all ranks while backward runs.

    Collective: every rank of the group constructs the same model in the same order. All ranks
    start from rank 0's parameters and buffers. Arguments, defaults and behaviour are those of
    `torch.nn.parallel.DistributedDataParallel`; forward is collective where buffers are
    synchronised, backward is collective outside of `no_sync`.

    Args:
        module: the module to train, on the CPU, or on one or several GPUs of CUDA or ROCm.
        device_ids: a list of the one GPU that the module is on: inputs are moved there. None
            for a module on the CPU or on several GPUs.
        output_device: a GPU, unused as in torch; only with `device_ids`.
        dim: unused, as in torch.
        broadcast_buffers: deprecated by torch in favour of `forward_sync_buffers`.
        init_sync: whether the ranks' models are compared and rank 0's state is broadcast.
        process_group: a group of mpiddp, or an mpi4py communicator of some of its ranks, whose
            order counts; None is the world. Construction is collective over it.
        bucket_cap_mb: size of a bucket in MiB; None is 25 inside a node, with a first bucket of
            1, and 1 where messages are sent, or 4 there with a hook in Python. "auto" measures
            several in the first steps and takes the best. None is MPIDDP_BUCKET_CAP_MB, if set.
        find_unused_parameters: whether parameters may take no part in a loss. It costs nothing
            here and silences the error that otherwise names them.
        check_reduction: deprecated, ignored.
        gradient_as_bucket_view: whether each ``.grad`` is a view into its bucket, which saves the
            gradients' memory and a copy.
        static_graph: whether every iteration computes the same graph. The first backward counts
            how often each parameter is used; so several reentrant checkpoints may share one.
        delay_all_reduce_named_params: pairs of name and parameter that are averaged apart from
            the others, in one all-reduce, when the gradient of `param_to_hook_all_reduce` is
            there. As in torch's class.
        param_to_hook_all_reduce: see `delay_all_reduce_named_params`.
        mixed_precision: torch's configuration for low-precision copies of the parameters. On a
            GPU gradients are then not views. It works on the CPU too, where torch's class fails in
            the first forward.
        device_mesh: instead of `process_group`, a mesh of one dimension.
        skip_all_reduce_unused_params: whether to leave out, after the first iteration, buckets of
            which no rank has used any parameter in it; using one later is an error.
        bucket_cap_mb_list: the size of each bucket in MiB.
        batched_grad_copy: ignored: gradients on GPUs are always copied in batches.
        forward_sync_buffers: whether rank 0's buffers are copied to all ranks at each forward;
            None is True.
        lazy_bucket_allocation: whether buckets have no memory but while gradients are in them, from
            backward to its end; of views, until the next forward after `zero_grad`. Not on GPUs.
        transport: how gradients travel: "shared" (in memory that the ranks of a node share),
            "exchange" (each rank adds a slice of all), "mpi" (MPI_Iallreduce), or "auto", which
            takes what is faster. None is MPIDDP_TRANSPORT from the environment, else "auto".
        shared_parameters: whether ranks share parameters, which a NodeOptimizer of `mpiddp.optim`
            steps: those of a "node", "socket" or "numa" node, or so many ranks; True: what suits
            the machine. Gradients are views. None: what MPIDDP_SHARED_PARAMETERS says.

    Raises:
        TypeError: `module` is not a module, `process_group` not of mpiddp, a flag not a bool, or
            some parameter's gradient cannot be averaged (the error names it).
        ValueError: a bucket size is negative, there is no such transport, a parameter or buffer
            is on another kind of device, or the devices that are asked for are not the module's.
        RuntimeError: there is no process group, or two; no parameter needs a gradient; or the
            ranks construct different models (the error names parameters and ranks).
    """

    # Where users import it from: pickles hold this name, and survive when the file moves.
    __module__ = "mpiddp"

    lazy_bucket_allocation: bool
    _require_manual_backward_finalization: bool
    # While the constructor runs: ends its record.
    _construction: contextlib.ExitStack | None = None
    # torch's configuration; None without one, or on a GPU.
    _precision_on_cpu: Any
    _transport: str
    _wants_sharing: str
    _default_bucket_sizes: bool
    _tunes_buckets = False
    logger: Logger
    # torch's constructor ends early, and before it sets this, if all parameters are delayed.
    _lazy_init_ran = False

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | MPI.Comm | None = None,
        bucket_cap_mb: float | str | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        transport: str | None = None,
        shared_parameters: bool | int | str | None = None,
    ) -> None:
        arguments = dict(locals())
        forks.check("DistributedDataParallel")
        argument_checks.check_module(module)
        argument_checks.check_flags(arguments)
        argument_checks.check_devices(module, device_ids, output_device)
        sharing = argument_checks.wants_sharing(module, arguments)
        asked = argument_checks.wanted_bucket_cap(bucket_cap_mb, bucket_cap_mb_list)
        arguments["bucket_cap_mb"], bucket_cap_mb = asked, None if asked == "auto" else asked
        if is_communicator(process_group):
            process_group = group_of(process_group)
        group = argument_checks.check_process_group(process_group, device_mesh)
        argument_checks.compare(group, module, arguments)
        # Read by _build_params_for_reducer, which torch's constructor calls.
        object.__setattr__(self, "_verify_models", bool(init_sync))
        # As in torch: synchronising at forward says nothing about construction.
        with_buffers = forward_sync_buffers is not None or broadcast_buffers in (None, True)
        object.__setattr__(self, "_init_sync_buffers", with_buffers)
        object.__setattr__(self, "_default_bucket_sizes", bucket_cap_mb is None)
        object.__setattr__(self, "_tunes_buckets", asked == "auto")
        object.__setattr__(self, "_transport", requested_transport(transport))
        object.__setattr__(self, "_wants_sharing", sharing)
        on_cpu = mixed_precision is not None and not argument_checks.has_streams(module)
        object.__setattr__(self, "_precision_on_cpu", mixed_precision if on_cpu else None)
        with contextlib.ExitStack() as construction, compiler_not_asked():
            # Begun by _build_params_for_reducer, as soon as there is a process group.
            object.__setattr__(self, "_construction", construction)
            super().__init__(
                module,
                device_ids=device_ids,
                output_device=output_device,
                dim=dim,
                broadcast_buffers=broadcast_buffers,
                init_sync=False,  # done by _build_params_for_reducer
                process_group=process_group,
                bucket_cap_mb=bucket_cap_mb,
                find_unused_parameters=find_unused_parameters,
                check_reduction=check_reduction,
                gradient_as_bucket_view=gradient_as_bucket_view or bool(sharing),
                static_graph=static_graph,
                delay_all_reduce_named_params=delay_all_reduce_named_params,
                param_to_hook_all_reduce=param_to_hook_all_reduce,
                # On the CPU torch's constructor would make streams.
                mixed_precision=None if on_cpu else mixed_precision,
                device_mesh=device_mesh,
                skip_all_reduce_unused_params=skip_all_reduce_unused_params,
                bucket_cap_mb_list=list(bucket_cap_mb_list) if bucket_cap_mb_list else None,
                batched_grad_copy=batched_grad_copy,
                forward_sync_buffers=forward_sync_buffers,
                lazy_bucket_allocation=lazy_bucket_allocation,  # type: ignore[call-arg]  # 2.13
            )
        self._construction = None  # nor for copies, which are made from __dict__
        self._verify_models = False
        if on_cpu:
            self.mixed_precision = mixed_precision
            _setup_mixed_precision_params(mixed_precision, module)
            _cast_buffers(mixed_precision, module)
        if sharing:
            self._share_parameters(arguments["shared_parameters"] is None)
            self._wants_sharing = ""  # copies have parameters of their own

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        parameters, expect_sparse = super()._build_params_for_reducer()
        if self._construction is not None:
            name = f"construction of DistributedDataParallel({type(self.module).__name__})"
            self._construction.enter_context(self.process_group.recorded(name))
        if self._verify_models:
            # Instead of torch's own check, whose error names no parameter, and before anything
            # is broadcast, which needs equal sizes.
            self._verify_equal_models()
            self._broadcast_initial_state()
        return parameters, expect_sparse

    def _verify_equal_models(self) -> None:
        tensors = {
            f"{kind} {name}": tensor
            for kind, named in (
                ("parameter", self.module.named_parameters()),
                ("buffer", self.module.named_buffers()),
            )
            for name, tensor in named
            if name not in self.parameters_to_ignore
        }
        trained = [name for name, tensor in tensors.items() if tensor.requires_grad]
        settings = {
            "shared_parameters": self._wants_sharing,
            "bucket_cap_mb": self.bucket_bytes_cap / 2**20,
            "bucket_cap_mb_list": self.bucket_bytes_cap_list,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "find_unused_parameters": self.find_unused_parameters,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "forward_sync_buffers": self.forward_sync_buffers,
            "transport": self._transport,
            "mixed_precision": self._precision_on_cpu,
        }
        model_check.verify_equal_models(
            self.process_group,
            {
                **model_check.describe_tensors(tensors),
                **{f"{name}'s need of a gradient": "given" for name in trained},
                **model_check.describe_settings(settings),
            },
        )

    def _ddp_init_helper(
        self,
        parameters: Sequence[torch.nn.Parameter],
        expect_sparse_gradient: Sequence[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Build reducer and logger. Collective. Overrides torch's method of this name."""
        group = self.process_group
        names = model_check.ParameterNames(parameters, param_to_name_mapping)

        def report_missing(missing: list[tuple[int, int]], graph_is_static: bool) -> None:
            errors.raise_missing_gradients(
                group, missing, names.describe, names.name, graph_is_static
            )

        channels = group.acquire_channels(self._transport, parameters)
        channel = next(iter(channels.values()))
        limits = size_limits(self, channel)
        # torch.compile ends its graphs where buckets of this size would end.
        self.bucket_bytes_cap = size_limits(self, channel, with_python=True)[-1]
        dtypes = None
        if self._precision_on_cpu is None:
            dtypes = gradient_dtypes(self.mixed_precision, parameters)
        else:
            # Before the reducer: its hooks must come after these.
            narrow = NarrowParameters(
                [
                    parameter
                    for name, parameter in self.module.named_parameters()
                    if name not in self.parameters_to_ignore
                ],
                self._precision_on_cpu.param_dtype,
            )
        link_hooks(parameters)
        try:
            self.reducer = TorchReducer(
                parameters,
                group,
                channels,
                BucketAssignment(parameters, expect_sparse_gradient, limits, group),
                names.describe,
                report_missing,
                expect_sparse=expect_sparse_gradient,
                find_unused_parameters=self.find_unused_parameters,
                gradient_as_bucket_view=self.gradient_as_bucket_view and dtypes is None,
                skip_unused=self.skip_all_reduce_unused_params,
                lazy_buckets=self.lazy_bucket_allocation,
                mixed_precision=dtypes,
                domain=self._find_domain(),
            )
        except BaseException:
            group.release_channels(channels)
            raise
        weakref.finalize(self.reducer, group.release_channels, channels).atexit = False
        group.modules.add(self.reducer, type(self.module).__name__)
        self.reducer.kept = KeptParameters(self.module, parameters, names.describe, group.me)
        self.reducer.passes, self.reducer.comparison = ForwardPasses(), comparison_of(self.reducer)
        self.reducer.ends_by_hand = self._require_manual_backward_finalization
        self.logger = Logger(self.reducer, limits[-1])
        self.reducer.set_logger(self.logger)
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.forward_sync_buffers,
            any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in self.module.modules()),
            static_graph,
        )
        self.reducer.tuning = tuning_of(self)
        self._passing_sync_batchnorm_handle(self.module)
        if self._precision_on_cpu is not None:
            self.reducer.narrow_parameters = narrow
            self.reducer.compress(compression_of(self._precision_on_cpu))
        self._install_copied_hooks()

    def _lazy_init(self) -> None:
        """Set up what torch leaves to the first forward. Overrides torch's method of this name.

        Collective if there is something to set up; so it waits for a forward of all ranks.
        """
        if torch.is_grad_enabled():
            super()._lazy_init()

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. Overrides torch's method of this name."""
        if self._precision_on_cpu is None:
            return super()._run_ddp_forward(*inputs, **kwargs)
        narrow = self.reducer.narrow_parameters
        assert narrow is not None
        narrow.narrow()
        try:
            return super()._run_ddp_forward(*inputs, **kwargs)
        finally:
            if not torch.is_grad_enabled():
                narrow.widen()

    def _setup_in_backward_optimizers(self) -> None:
        optimizer_in_backward.set_up(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Record statistics in the first 10 iterations, then every `sample_rate`. Not collective.

        Overrides torch's method of this name.

        Raises:
            ValueError: it is below 1.
        """
        if sample_rate < 1:
            self._log_and_throw(
                ValueError,
                "DDP runtime logging sample rate should be equal or greater than 1",
            )
        self.logger.set_sample_rate(sample_rate)

    @logs_errors
    def _set_sparse_metadata(self, global_unique_ids: Mapping[str, torch.Tensor]) -> None:
        """Ignore which rows of sparse gradients are used: the ranks tell each other anyway.

        Not collective. Overrides torch's method of this name.

        Raises:
            TypeError: it is not a mapping.
        """
        if not isinstance(global_unique_ids, Mapping):
            raise TypeError(f"global_unique_ids must be a mapping, not {global_unique_ids!r}")

    def _update_process_group(self, new_process_group: Any) -> None:
        """Average over another group from now on. Overrides torch's method of this name.

        Collective over the new group; other ranks return at once. Call it between a backward
        and the next forward.

        Args:
            new_process_group: a group of mpiddp or an mpi4py communicator.

        Raises:
            TypeError: it is not a group of mpiddp.
        """
        self._has_rebuilt_buckets = False
        if is_communicator(new_process_group):
            new_process_group = group_of(new_process_group)
        if _rank_not_in_group(new_process_group):
            return
        if self._shared_parameters is not None:
            raise RuntimeError("a module with shared_parameters keeps its process group")
        argument_checks.check_process_group(new_process_group, None)
        self.reducer._remove_autograd_hooks()
        # Recognised hooks of this module's old group get the new one.
        self._comm_hooks[:] = [
            (hook, state if hooks.runs_in_python(hook, state, self.process_group) else None)
            for hook, state in self._comm_hooks
        ]
        self.process_group = new_process_group
        parameters, expect_sparse = super()._build_params_for_reducer()
        for parameter in parameters:
            if self.gradient_as_bucket_view and parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        names = self._build_debug_param_to_name_mapping(parameters)
        self._ddp_init_helper(parameters, expect_sparse, names, self.static_graph)
        if self.static_graph:
            self.reducer._set_static_graph()
            self.logger._set_static_graph()

    def _take_new_group(self) -> None:
        """Go on with the new world where the group was destroyed, as Gloo does. Collective."""
        old, new = self.process_group, dist.group.WORLD if dist.is_initialized() else None
        if (
            not isinstance(new, type(old))
            or list(old.world_ranks) != list(range(new.size()))
            or self._shared_parameters is not None
        ):
            raise RuntimeError(
                f"rank {old.me}: the process group of this {type(self).__name__} has been "
                f"destroyed. Its communicators are gone: wrap the module again, "
                f"`{type(self).__name__}(wrapped.module)`"
            )
        self._update_process_group(new)

    def _delayed_all_reduce_hook(self, grad: torch.Tensor) -> torch.Tensor:
        # As torch's, but it waits: torch's drops the Work, which is right only on a CUDA stream.
        assert self._delay_grad_buffer is not None
        self._delay_grad_buffer.div_(self.process_group.size())
        dist.all_reduce(self._delay_grad_buffer, group=self.process_group)
        return grad

    # A static graph, see static_graph.pyx.

    @property
    def _static_graph_delay_allreduce_enqueued(self) -> bool:
        """True: torch's wrapper need not delay the first reduction, our reducer does it.

        In torch's class it is an attribute, which copies inherit, so that they never reduce.
        """
        return True

    @_static_graph_delay_allreduce_enqueued.setter
    def _static_graph_delay_allreduce_enqueued(self, value: bool) -> None:
        pass

    # Forward passes.

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Count the forward passes that expect a backward. Overrides torch's method."""
        uncaught.take_part()
        # torch.compile cannot look into a process group.
        if not torch.compiler.is_compiling() and self.process_group.closed:
            self._take_new_group()
        if self._is_reduced() and self.training:
            self.reducer.passes.begin()
        return super()._pre_forward(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        """Watch the outputs, where backward begins. Not collective. Overrides torch's method."""
        output = super()._post_forward(output)
        if self._is_reduced():
            outputs = list(_find_tensors(output))
            self.reducer.passes.end(outputs)
            # The graphs of torch.func's transforms give no parameter a gradient.
            if self.static_graph and peek_interpreter_stack() is None:
                self.reducer.watch(outputs)
            if distributed_autograd.may_be_used():
                distributed_autograd.watch(self.reducer, outputs)
        return output

    def _is_reduced(self) -> bool:
        return (
            torch.is_grad_enabled()
            and self.require_backward_grad_sync
            and not self._delay_all_reduce_all_params
        )


# It calls the user's module.
compile_what_it_calls(DistributedDataParallel._run_ddp_forward)  # type: ignore[arg-type]
