"""What goes where: flat names to rooms."""
PY = {  # mpiddp/NAME.py -> (room, new name)
 "mpi": dict(library_check="compatibility", datatypes="datatypes", abort="abort", uncaught="uncaught"),
 "torch_internals": dict(torch_versions="versions", replacement="patching", compilation="compiler"),
 "transports": dict(transport="choice", gradient_queues="channel_pool", device_transports="gpu_choice",
    device_support="gpu_support", device_trial="gpu_trial", device_trial_rank="gpu_trial_rank"),
 "collectives": dict(reductions="reductions", data_movement="movement", messages="point_to_point", tensors_around_mpi="packing"),
 "process_group": dict(process_group="group", backend_questions="backend_properties", operating_group="operation_runner",
    work="work", completion="futures", device_tensors="gpu_tensors", device_copies="gpu_copies",
    state_broadcast="state_broadcast", calls="call_text", agreement="call_check", roll_call="roll_call", monitored_barrier="monitored_barrier"),
 "reducer": dict(bucket_assignment="assignment", bucket_building="building", sparse_gradients="sparse", bucket_roll_call="bucket_roll_call", forward_passes="forward_passes"),
 "rendezvous": dict(rendezvous="world", init_by_name="init_by_name", split_group="split_group", lazy_store="store", launch_checks="launch_checks"),
 "ddp": dict(distributed="wrapper", wrapper_reducer="torch_reducer", argument_checks="arguments", verification="model_check",
    logger="logger", comm_hooks="hooks", python_hook="python_hook", grad_bucket="grad_bucket", mixed_precision="mixed_precision",
    optimizer_in_backward="optimizer_in_backward", communicator_group="groups", sync_batch_norm="sync_batch_norm"),
 "runner": dict(torchrun="torchrun", script="program", ending="job_exit", output="output", line_pump="output_relay", __main__="command"),
}
STAY = {"__init__", "doctor", "compression", "settings", "version"}   # in mpiddp/
CY = {  # cython/NAME.* -> (room, new name)
 "system": dict(kernels="kernels", system="posix", waiting="waiting", forks="forks"),
 "mpi": dict(library="library", errors="errors"),
 "torch_internals": dict(torch_tensors="tensors"),
 "gpu": dict(device_runtime="runtime", device_allocation="allocation", device_sums="blas"),
 "engine": dict(queues="interface", engine="engine", chunks="chunks", memory="memory", requests="requests", reduction="single_all_reduce"),
 "transports": dict(iallreduce="iallreduce", shared="shared", shared_memory="shared_memory", shared_broadcast="shared_broadcast",
    lanes="lanes", staging="gpu_staging", device_pointers="gpu_direct", device_iallreduce="gpu_iallreduce", device_ring="gpu_ring", chunk_sums="chunk_sums"),
 "reducer": dict(reducer="reducer", bucket="bucket", device_bucket="gpu_bucket", places="bucket_views",
    static_graph="static_graph", unused_parameters="unused", joined="joined"),
}
HEADERS = {"kernels.h": "system", "kernels_loops.h": "system", "kernels_neon.h": "system", "kernels_values.h": "system",
    "kernels_variant.h": "system", "kernels_x86.h": "system"}
TESTS = {  # tests/NAME -> folder/NAME
 "support": "collective_calls.py gpus.py group_data.py launch.py launch_report.py launch_progress.py launch_durations.json models.py mpirun.py replicas.py staged_queues.py=staged_channels.py torch_versions.py simulated_gpu scripts",
 "system": "test_kernels.py test_kernel_functions.py test_kernel_machines.py",
 "mpi": "test_library_check.py=test_compatibility.py test_datatypes.py",
 "torch_internals": "test_replacement.py=test_patching.py test_torch_tensors.py test_torch_versions.py",
 "gpu": "test_device_runtime.py=test_gpu_runtime.py",
 "engine": "test_engine.py test_progress.py",
 "transports": "test_shared.py test_lanes.py test_staging.py=test_gpu_staging.py test_staging_errors.py=test_gpu_staging_errors.py test_device_support.py=test_gpu_support.py test_device_transports.py=test_gpu_choice.py test_device_trial.py=test_gpu_trial.py test_device_pointers.py=test_gpu_direct.py test_device_pointer_modules.py=test_gpu_direct_modules.py test_memory_refused.py test_overflow.py",
 "collectives": "test_all_reduce.py test_all_to_all.py test_many_elements.py test_messages.py=test_point_to_point.py test_reduce_and_scatter.py",
 "process_group": "test_agreement.py=test_call_check.py test_autograd_collectives.py test_device_tensors.py=test_gpu_tensors.py test_group_life.py test_groups_of_ranks.py test_monitored_barrier.py test_process_group.py test_roll_call.py test_work.py test_time_limits.py test_interrupt.py test_interrupts.py",
 "reducer": "test_accumulation.py test_buckets.py test_gradients.py test_graphs.py test_join.py test_skipped_buckets.py test_sparse_gradients.py test_static_graph.py test_unused_parameters.py test_user_hooks.py test_rebound_gradients.py test_iterations.py test_bucket_timeouts.py test_backward_errors.py test_missing_buckets.py test_out_of_step.py",
 "rendezvous": "test_failures.py test_init_by_name.py test_lazy_store.py=test_store.py test_rendezvous.py test_split_group.py test_abort.py test_fork.py test_settings_agree.py",
 "ddp": "test_arguments.py test_buffers.py test_checkpoint.py test_comm_hook_errors.py test_comm_hooks.py test_compile.py test_compression.py test_construction.py test_delayed_parameters.py test_device_modules.py=test_gpu_modules.py test_device_streams.py=test_gpu_streams.py test_distributed_optimizers.py test_lifetime.py test_logging_data.py test_nesting.py test_optimizers_in_backward.py test_sync_batch_norm.py test_distributed_autograd.py test_mixed_precision.py",
 "runner": "test_run_module.py",
 "parity": "test_torch_parity.py test_torch_details.py test_random_models.py test_optimizers.py test_sharded_models.py torch_suite.py torch_suite_rank.py torch_suite_cpu.py torch_suite_exclusions.txt torch_suite_excluded.toml",
 "libraries": "test_libraries.py test_torchmetrics.py",
 "on_gpu": "test_gpu.py test_gpu_collectives.py",
 "project": "test_benchmarks.py test_cost_model.py test_doctor.py test_examples.py test_launch.py test_packaging.py test_slurm.py test_settings.py test_torch_suite.py",
}
TESTS_STAY = {"conftest.py", "lab", "project", "__pycache__", ".hypothesis"}
# (flat module, name) -> new module: what moves out of its file.
MOVES = [
 # (source after the move, destination, names, docstring of a new destination)
 ("mpiddp/rendezvous/world.py", "mpiddp/mpi/nodes.py", ["Topology", "find_topology"],
  'Where a rank stands among the nodes, and which ranks share its memory.'),
 ("mpiddp/transports/choice.py", "mpiddp/mpi/nodes.py", ["ranks_of_node"], None),
 ("mpiddp/mpi/compatibility.py", "mpiddp/torch_internals/versions.py", ["_WRAPPER_METHODS", "check_torch"], None),
 ("mpiddp/rendezvous/world.py", "mpiddp/rendezvous/mpi_world.py",
  ["_LAUNCHER_SIZES", "_SCHEDULER_SIZES", "checked_communicator", "_check_thread_level", "_refuse_separate_worlds"],
  'Initialise MPI, and refuse what the launcher or the MPI cannot give.'),
 ("mpiddp/ddp/model_check.py", "mpiddp/reducer/errors.py",
  ["raise_used_again", "raise_other_kind", "refuse_shared_views", "raise_timed_out"],
  'Errors of a backward pass, for the reducer: what happened, on which rank, what to do.'),
 ("mpiddp/ddp/python_hook.py", "mpiddp/reducer/futures.py", ["completed", "wait_for_all"],
  'Wait for the futures that hooks have returned, within a time limit.'),
]
