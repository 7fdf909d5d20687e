"""Every name that torch does not promise and mpiddp uses: what for, where, since and until when.

A new torch may drop one without a word. `python mpiddp/torch_internals/private_names.py` says
which, also where `import mpiddp` fails. test_private_names.py compares the list with the source.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple

__all__ = ["PRIVATE_NAMES", "PrivateName", "gone"]


class PrivateName(NamedTuple):
    """One name.

    Args:
        name: in full. After "()." comes an attribute that instances of a class set.
        used_in: files of mpiddp/ and cython/, as "room/file".
        purpose: what for.
        since: the first of the tested releases of torch that has it; "": all do.
        until: the last one that has it; "": the newest does.
    """

    name: str
    used_in: tuple[str, ...]
    purpose: str
    since: str = ""
    until: str = ""


def _names(
    prefix: str, names: str, used_in: str, purpose: str, since: str = "", until: str = ""
) -> list[PrivateName]:
    """Return several names of one prefix, separated by spaces, as the files are."""
    return [
        PrivateName(prefix + name, tuple(used_in.split()), purpose, since, until)
        for name in names.split()
    ]


_C10D = "torch._C._distributed_c10d."
_HIDDEN = "options, stores and base classes that torch.distributed does not show"
_MODES = ("process_group/dispatch_modes", "to show operations to a TorchDispatchMode")

PRIVATE_NAMES = [
    *_names("torch._C.", "Future", "ddp/python_hook", "the type of what a hook in Python returns"),
    *_names(
        "torch._C._autograd.",
        "_get_current_graph_task_keep_graph",
        "data_parallel/remote_call",
        "whether a backward keeps its graph",
    ),
    *_names(
        "torch._C.",
        "_current_autograd_node",
        "ddp/distributed_autograd ddp/mixed_precision ddp/torch_reducer reducer/backward_kinds "
        "reducer/reducer",
        "whether a backward runs within another one",
    ),
    *_names(
        "torch._C.",
        "_current_graph_task_id",
        "ddp/torch_reducer horovod/optimizer_reducer",
        "whether a backward runs",
    ),
    *_names("torch.nn.utils.clip_grad.", "_clip_grads_with_norm_", "ddp/mean_scaling", "a clip"),
    *_names("torch._C.", "_len_torch_dispatch_stack", *_MODES),
    *_names("torch._ops.", "OpOverload", *_MODES),
    *_names("torch.utils._python_dispatch.", "_pop_mode_temporarily", *_MODES),
    *_names(
        "torch._C._functorch.",
        "peek_interpreter_stack",
        "ddp/wrapper",
        "whether a forward runs within a transform of torch.func",
    ),
    *_names(
        "torch._C._distributed_autograd.",
        "_current_context backward get_gradients",
        "ddp/distributed_autograd",
        "backward passes of torch.distributed.autograd",
    ),
    *_names(
        _C10D,
        "AllToAllOptions ReduceScatterOptions",
        "horovod/execution process_group/group",
        _HIDDEN,
    ),
    *_names(
        _C10D,
        "AllgatherOptions",
        "collectives/sparse ddp/bucket_tuning horovod/execution process_group/group "
        "reducer/building reducer/model_check",
        _HIDDEN,
    ),
    *_names(
        _C10D,
        "AllreduceCoalescedOptions BarrierOptions GatherOptions ReduceOptions ScatterOptions",
        "process_group/group",
        _HIDDEN,
    ),
    *_names(
        _C10D,
        "AllreduceOptions",
        "horovod/execution optim/same_settings process_group/group transports/channel_pool",
        _HIDDEN,
    ),
    *_names(
        _C10D,
        "BroadcastOptions",
        "ddp/buffer_broadcast horovod/execution process_group/group",
        _HIDDEN,
    ),
    *_names(_C10D, "BuiltinCommHookType", "ddp/hooks", _HIDDEN),
    *_names(
        _C10D,
        "DebugLevel",
        "process_group/operation_runner reducer/errors rendezvous/launch_checks",
        _HIDDEN,
    ),
    *_names(
        _C10D,
        "GradBucket",
        "compression ddp/grad_bucket ddp/hooks ddp/optimizer_in_backward",
        _HIDDEN,
    ),
    *_names(
        _C10D,
        "HookOpName PostHookArgs PreHookArgs",
        "process_group/call_hooks",
        "hooks of groups",
        since="2.14.1",
    ),
    *_names(_C10D, "PrefixStore", "rendezvous/store", _HIDDEN),
    *_names(_C10D, "Store", "process_group/group rendezvous/store rendezvous/world", _HIDDEN),
    *_names(
        _C10D,
        "Work",
        "horovod/execution process_group/call_hooks process_group/group "
        "process_group/operation_runner process_group/work",
        _HIDDEN,
    ),
    *_names(
        _C10D,
        "_compute_bucket_assignment_by_size",
        "reducer/assignment",
        "the same buckets as torch's class",
    ),
    *_names(
        _C10D,
        "get_debug_level",
        "process_group/operation_runner reducer/errors rendezvous/launch_checks",
        _HIDDEN,
    ),
    *_names(
        "torch._C._distributed_rpc.",
        "_is_current_rpc_agent_set",
        "ddp/distributed_autograd",
        "whether RPC was started",
    ),
    *_names(
        "torch._C._dynamo.eval_frame.",
        "_FrameAction _FrameExecStrategy set_code_exec_strategy",
        "torch_internals/compiler",
        "keeps torch.compile out of our functions, without importing it",
    ),
    *_names(
        "torch._C.",
        "_storage_Use_Count",
        "ddp/mean_scaling reducer/lazy",
        "whether a tensor of the user lies in a bucket",
    ),
    *_names(
        "torch._C.",
        "_will_engine_execute_node",
        "reducer/backward_kinds",
        "whether a backward reaches a parameter",
    ),
    *_names(
        "torch.",
        "_amp_foreach_non_finite_check_and_unscale_",
        "optim/uneven_steps",
        "unscales gradients as GradScaler does",
    ),
    *_names(
        "torch._compile.",
        "_disable_dynamo",
        "torch_internals/compiler_loading",
        "keeps torch.compile out of a method",
    ),
    *_names(
        "torch.nn.parallel.distributed.DistributedDataParallel.",
        "_inside_ddp_forward",
        "torch_internals/compiler_loading",
        "to call it without importing the compiler",
    ),
    *_names("torch.", "_foreach_copy_", "reducer/gpu_bucket", "copies of many tensors on a GPU"),
    *_names("torch.", "_foreach_norm", "optim/members", "norms as torch's clip takes them"),
    *_names("torch.", "_foreach_zero_", "reducer/gpu_bucket", "zeros in many tensors on a GPU"),
    *_names(
        "torch.",
        "_neg_view",
        "torch_internals/tensors",
        "makes a tensor whose sign is put off, to find the flag in memory",
    ),
    *_names(
        "torch._utils.",
        "_flatten_dense_tensors _unflatten_dense_tensors",
        "apex/reducer ddp/buffer_broadcast",
        "tensors of one message",
    ),
    *_names("torch._utils.", "_take_tensors", "ddp/buffer_broadcast", "tensors of one message"),
    *_names(
        "torch.autograd.Variable._execution_engine.",
        "queue_callback",
        "ddp/distributed_autograd ddp/mixed_precision ddp/optimizer_in_backward",
        "the end of backward",
    ),
    *_names(
        "torch.autograd.profiler.",
        "_is_profiler_enabled",
        "process_group/operation_runner torch_internals/profiling",
        "whether a profiler runs",
    ),
    *_names("torch.distributed.", "_functional_collectives", "ddp/mixed_precision", "its class"),
    *_names(
        "torch.distributed.Logger.",
        "_get_ddp_logging_data _set_comm_hook_name _set_static_graph _set_uneven_input_join",
        "ddp/logger",
        "our logger answers it to torch's wrapper",
    ),
    *_names(
        "torch.distributed.ProcessGroup.",
        "_add_ephemeral_timeout",
        "process_group/backend_properties",
        "overridden: torch.distributed asks a group for it",
        since="2.14.1",
    ),
    *_names(
        "torch.distributed.ProcessGroup.",
        "_allgather_base _reduce_scatter_base",
        "process_group/group",
        "overridden: torch.distributed asks a group for it",
    ),
    *_names(
        "torch.distributed.ProcessGroup.",
        "_device_types _get_backend _get_sequence_number_for_group",
        "process_group/backend_properties",
        "overridden: torch.distributed asks a group for it",
    ),
    *_names(
        "torch.distributed.ProcessGroup.",
        "_end_coalescing _set_group_desc _set_group_name _start_coalescing",
        "process_group/operation_runner",
        "overridden: torch.distributed asks a group for it",
    ),
    *_names(
        "torch.distributed.ProcessGroup.",
        "_set_sequence_number_for_group",
        "process_group/backend_properties",
        "overridden: torch.distributed asks a group for it",
        until="2.13.0",
    ),
    *_names(
        "torch.distributed.Reducer.",
        "_autograd_hook _check_reducer_finalized _ddp_graph_static _get_local_used_map "
        "_install_post_backward_futures _push_all_rebuilt_params _run_allreduce_hook "
        "_run_comm_hook _set_forward_pass_work_handle _set_mixed_precision_param_dtype "
        "_set_static_graph",
        "ddp/torch_reducer",
        "our reducer answers it to torch's wrapper",
    ),
    *_names(
        "torch.distributed.Reducer.",
        "_finalize_backward_manual _set_manual_finalization_required "
        "_should_finalize_after_backward",
        "ddp/torch_reducer",
        "our reducer answers it to torch's wrapper",
        since="2.15.0",
    ),
    *_names(
        "torch.distributed.Reducer.",
        "_rebuild_buckets _remove_autograd_hooks",
        "reducer/reducer",
        "our reducer answers it to torch's wrapper",
    ),
    *_names(
        "torch.distributed.Work.",
        "_get_sequence_number",
        "process_group/work",
        "overridden: torch.distributed asks a Work for it",
        since="2.14.1",
    ),
    *_names(
        "torch.distributed.Work.",
        "_source_rank",
        "process_group/work",
        "overridden: torch.distributed asks a Work for it",
    ),
    *_names(
        "torch.distributed.",
        "_DEFAULT_FIRST_BUCKET_BYTES",
        "transports/choice",
        "the same first bucket as torch's class",
    ),
    *_names(
        "torch.distributed.checkpoint.filesystem.",
        "_StorageInfo",
        "checkpoint/shard_files",
        "where a shard lies, in lists of shards that are read without running code",
    ),
    *_names("torch.utils.data.dataloader.", "_BaseDataLoaderIter", "tracing/hooks", "batches"),
    *_names(
        "torch.serialization.",
        "_get_layout",
        "checkpoint/shard_files",
        "what a tensor's layout is pickled as, in those lists",
    ),
    *_names(
        "torch.distributed.distributed_c10d.",
        "_FR_SELF_RECORDING_BACKENDS",
        "torch_internals/versions",
        "keeps torch's flight recorder from groups that have their own",
        since="2.15.0",
    ),
    *_names(
        "torch.distributed.Backend.", "_plugins", "torch_internals/backend_names", "whose ccl is"
    ),
    *_names(
        "torch.distributed.distributed_c10d.",
        "_set_pg_timeout",
        "rendezvous/patches",
        "changes the time limit of a group",
    ),
    *_names(
        "torch.distributed.distributed_c10d.",
        "_process_group_name",
        "rendezvous/patches",
        "names of groups that members make",
    ),
    *_names(
        "torch.distributed.distributed_c10d.",
        "_rank_not_in_group",
        "ddp/wrapper",
        "whether this rank is in a group",
    ),
    *_names(
        "torch.distributed.distributed_c10d._world.",
        "pg_group_ranks",
        "torch_internals/versions",
        "the order of a group's ranks",
    ),
    *_names(
        "torch.distributed.distributed_c10d._world.",
        "pg_map",
        "ddp/groups horovod/process_sets rendezvous/store",
        "which groups there are, and their stores",
    ),
    *_names(
        "torch.distributed.launcher.api.",
        "_get_entrypoint_name",
        "runner/elastic",
        "names of programs under elastic_launch",
    ),
    *_names(
        "torch.nn.Parameter.",
        "_post_accumulate_grad_hooks",
        "ddp/kept_parameters ddp/second_backward reducer/reducer",
        "the order of hooks",
    ),
    *_names(
        "torch.nn.modules.batchnorm._BatchNorm.",
        "forward",
        "ddp/sync_batch_norm",
        "batch norm in a world of one",
    ),
    *_names(
        "torch.nn.parallel.DistributedDataParallel().",
        "_comm_hooks _delay_all_reduce_all_params _delay_grad_buffer _has_rebuilt_buckets "
        "_static_graph_delay_allreduce_enqueued",
        "ddp/wrapper",
        "an attribute that torch's constructor sets",
    ),
    *_names(
        "torch.nn.parallel.DistributedDataParallel().",
        "_divide_by_initial_world_size _join_config",
        "ddp/uneven_inputs",
        "an attribute that torch's constructor sets",
    ),
    *_names(
        "torch.nn.parallel.DistributedDataParallel().",
        "_module_parameters",
        "ddp/optimizer_in_backward",
        "an attribute that torch's constructor sets",
    ),
    *_names(
        "torch.nn.parallel.DistributedDataParallel().",
        "_require_manual_backward_finalization",
        "ddp/wrapper",
        "an attribute that torch's constructor sets",
        since="2.15.0",
    ),
    *_names(
        "torch.nn.parallel.DistributedDataParallel.",
        "_build_debug_param_to_name_mapping _build_params_for_reducer _ddp_init_helper "
        "_delayed_all_reduce_hook _lazy_init _log_and_throw _run_ddp_forward "
        "_post_forward _set_ddp_runtime_logging_sample_rate _set_sparse_metadata "
        "_setup_in_backward_optimizers _update_process_group",
        "ddp/wrapper",
        "overridden in our wrapper, or called by it",
    ),
    *_names(
        "torch.nn.parallel.DistributedDataParallel.",
        "_check_global_requires_backward_grad_sync _match_all_reduce_for_bwd_pass "
        "_match_unused_params_allreduce _sync_final_model",
        "ddp/uneven_inputs",
        "overridden in our wrapper, or called by it",
    ),
    *_names(
        "torch.nn.parallel.DistributedDataParallel.",
        "_default_broadcast_coalesced _distributed_broadcast_coalesced",
        "ddp/state_copies",
        "overridden in our wrapper, or called by it",
    ),
    *_names(
        "torch.nn.parallel.DistributedDataParallel.",
        "_passing_sync_batchnorm_handle",
        "ddp/sync_batch_norm ddp/wrapper",
        "overridden in our wrapper, or called by it",
    ),
    *_names(
        "torch.nn.parallel.DistributedDataParallel.",
        "_pre_forward",
        "ddp/parameter_sharing ddp/wrapper",
        "overridden in our wrapper, or called by it",
    ),
    *_names(
        "torch.nn.parallel.DistributedDataParallel.",
        "_register_builtin_comm_hook",
        "ddp/hook_registration",
        "overridden in our wrapper, or called by it",
    ),
    *_names(
        "torch.nn.parallel.distributed.",
        "_cast_buffers _setup_mixed_precision_params",
        "ddp/wrapper",
        "mixed precision on the CPU",
    ),
    *_names(
        "torch.nn.parallel.distributed.",
        "_find_tensors",
        "ddp/wrapper",
        "the tensors in what forward returns",
    ),
]


def gone() -> list[PrivateName]:
    """Return the names that the installed torch should have, and has not. Not collective."""
    import torch

    release = _numbers(torch.__version__)
    return [
        each
        for each in PRIVATE_NAMES
        if _numbers(each.since or "0") <= release
        and not (each.until and release > _numbers(each.until))
        and not _exists(each.name)
    ]


def _exists(name: str) -> bool:
    name, _, attribute = name.partition("().")
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return not attribute or any(
            attribute in getattr(getattr(method, "__code__", None), "co_names", ())
            for method in vars(found).values()
        )
    return False


def _numbers(release: str) -> list[int]:
    return [int(part) for part in release.partition("+")[0].split(".") if part.isdigit()]


if __name__ == "__main__":
    for each in gone():
        print(f"{each.name}: {each.purpose} ({', '.join(each.used_in)})")
    sys.exit(bool(gone()))
