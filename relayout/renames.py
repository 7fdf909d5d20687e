# Step 5: words. Runs inside restructure.py.
EVERY = ("mpiddp", "cython", "tests", "benchmarks")
rename({"run_as_it_is": "skip_compilation", "wait_politely": "wait_napping", "OperatingGroup": "OperationRunner",
    "AnsweringGroup": "BackendProperties", "WrapperReducer": "TorchReducer", "Completion": "FutureCompleter", "Ending": "JobExit",
    "AloneOnDevice": "WorldOfOneMemory", "GradientQueues": "ChannelPool", "gradient_queues": "channel_pool",
    "DeviceBucket": "GpuBucket", "DeviceMemory": "GpuMemory", "DeviceIallreduceTransport": "GpuIallreduceTransport",
    "DeviceRingTransport": "GpuRingTransport", "DeviceRuntime": "GpuFunctions", "DeviceError": "GpuError", "DeviceWork": "GpuWork",
    "DeviceSums": "GpuSums", "check_device": "check_gpu", "enter_device": "enter_gpu", "leave_device": "leave_gpu",
    "device_error": "gpu_error", "fail_on_device": "fail_on_gpu", "any_on_device": "any_on_gpu", "on_device": "on_gpu",
    "COPY_TO_DEVICE": "COPY_TO_GPU", "COPY_ON_DEVICE": "COPY_ON_GPU", "DEVICE_READY": "GPU_READY", "DEVICE_NOT_READY": "GPU_NOT_READY",
    "DEVICE_TRANSPORTS": "GPU_TRANSPORTS", "DEVICE_TRANSPORT_VARIABLE": "GPU_TRANSPORT_VARIABLE",
    "requested_device_transport": "requested_gpu_transport", "device_bytes": "gpu_bytes", "device_memory": "gpu_memory",
    "bring_plain": "copy_fast", "copy_to_place": "copy_to_view", "copy_from_place": "copy_from_view", "find_place": "find_view",
    "lease_channels": "acquire_channels", "return_channels": "release_channels", "staged_queues": "staged_channels"}, *EVERY)
# Reduction is two things
rename({"Reduction": "ReductionRule"}, files=["mpiddp/mpi/datatypes.py", "mpiddp/collectives/reductions.py", "tests/mpi/test_datatypes.py"])
rename({"Reduction": "SingleAllReduce"}, files=[p for p in under("cython", "tests", "benchmarks", "mpiddp", suffixes={".py", ".pyx", ".pxd", ".pyi"})
    if "single_all_reduce" in read(p) and p not in ("mpiddp/mpi/datatypes.py", "mpiddp/collectives/reductions.py", "tests/mpi/test_datatypes.py")] + ["cython/engine/single_all_reduce.pyx", "cython/engine/single_all_reduce.pyi", "cython/engine/single_all_reduce.pxd"])
# the pool of channels
rename({"lend_for": "acquire", "lend": "_acquire_one", "take_back": "release"}, files=["mpiddp/transports/channel_pool.py", "mpiddp/process_group/group.py"])
# the reducer's words
RED = ("cython/reducer", "mpiddp/reducer")
rename({"Place": "BucketView"}, *RED)
rename({r"\bPlace place\b": "BucketView view", r"\bBucketView place\b": "BucketView view", r"\bstate\.place\b": "state.view",
    r"\b(self|reducer)\.before\b": r"\1.grads_before", r"\bcdef list before\b": "cdef list grads_before",
    r"\b(self|reducer)\.take\(": r"\1.mark_ready(", r"\bcdef int take\(": "cdef int mark_ready("}, *RED)
rename({"fill_from_staging": "fill_from_gradient_buffer", "read_into_staging": "read_into_gradient_buffer", "staging_dtype": "gradient_buffer_dtype",
    r"\b(self|bucket)\.staging\b": r"\1.gradient_buffer", r"cdef readonly object staging\b": "cdef readonly object gradient_buffer",
    r"^    staging: ": "    gradient_buffer: ", r"`staging`": "`gradient_buffer`"}, "cython/reducer", "mpiddp/reducer")
for p in under("cython/reducer", suffixes={".pyi"}): sub(p, r"^    staging: ", "    gradient_buffer: ", optional=True)
rename({r"\bbucket\.staging\b": "bucket.gradient_buffer", r"\bstaging_dtype\b": "gradient_buffer_dtype"}, "tests")
# Job: the engine's item. Work is torch's.
CYW = under("cython/engine", "cython/transports", "cython/reducer", suffixes={".pyx", ".pxd", ".pyi"})
rename({"Work": "Job", "Works": "Jobs", "works": "jobs", "work_is_done": "job_is_done", "slot_work": "slot_job", "advance_works": "advance_jobs",
    r"\bwork\b": "job", r"\bqueue_lock\b": "channels_lock"}, files=CYW)
for p in CYW:   # verbs and mass nouns stay
    t = read(p)
    for a, b in ((r"leaves the job to the callback", "leaves it to the callback"), (r"of job\b", "of jobs"), (r"there is job\b", "there are jobs"),
                 (r"\bjob in flight", "a job in flight"), (r"\bjob is submitted", "a job is submitted"), (r": job is done when", ": a job is done when"),
                 (r"tensor Jobs", "tensor Works"), (r"that job\b", "that work")):
        t = re.sub(a, b, t)
    write(p, t)
rename({r"\bworks are done when they are submitted": "jobs are done when they are submitted"}, "mpiddp/transports")
# Channel, not queue
def channel(path):
    t = read(path)
    for a, b in ((r"\bAdd a queue and return it", "Add a channel and return it"), (r"\bPut a (work|job) into a queue", "Put a job into a channel"),
        (r"\bRemove an idle queue", "Remove an idle channel"), (r"the queue has (work|a job) in flight", "the channel has a job in flight"),
        (r"An ordered queue of all-reduces", "An ordered channel of all-reduces"), (r"One ordered queue of", "One ordered channel of"),
        (r"strictly in queue order", "strictly in order"), (r"guards queues and counts", "guards channels and counts"),
        (r"Run queues of all-reduces", "Run channels of all-reduces"), (r"knows queues, chunks", "knows channels, chunks"),
        (r"from the head of the queue", "from the head of the channel"), (r"the queue to put it in", "the channel to put it in"),
        (r"the queue that it is submitted to", "the channel that it is submitted to"), (r"the engine's queue(s?)\b", r"the engine's channel\1"),
        (r"has ended the queue", "has ended the channel"), (r"memory from their queues", "memory from their channels"),
        (r"\bReturn a queue\b", "Return a channel"), (r"\bqueues\b(?=,? (each|with|for|are|of|that))", "channels"), (r"for each queue\b", "for each channel"),
        (r"so queues are kept", "so channels are kept"), (r"gradients in this queue", "gradients in this channel"), (r"the queues that are idle", "the channels that are idle"),
        (r"Let queues of", "Let channels of"), (r"Lends queues", "Lends channels"), (r"Return queues for", "Return channels for"), (r"Give queues for", "Give channels for"),
        (r"`ChannelPool\.acquire`", "`ChannelPool.acquire`")):
        t = re.sub(a, b, t)
    write(path, t)
for p in under("cython/engine", "cython/transports", "cython/reducer", "mpiddp/transports", "mpiddp/reducer", "mpiddp/process_group", suffixes={".py", ".pyx", ".pxd"}): channel(p)
# wordings that stopped a reader
def wording(a, b):
    n = 0
    for p in under("mpiddp", "cython", suffixes={".py", ".pyx", ".pxd"}):
        t = read(p)
        t2 = re.sub(r"\s+".join(map(re.escape, a.split())), b, t)
        if t2 != t: write(p, t2); n += 1
    if not n: print("  note: wording not found:", a)
wording("What the engine, who submits jobs to it and its transports know of each other.", "The C interface between the engine, its clients and the transports.")
wording("Which operations there are, it does not know; `mpiddp.process_group.group` builds torch's on it.", "It does not know the individual operations: `mpiddp.process_group.group` defines torch's on it.")
wording("What a rank says about a collective that it has called: a tuple, made into words when asked.", "Record a collective cheaply; format it only for errors.")
wording("Which communication hooks are hooks, and which of them the reducer does without Python.", "Validate communication hooks, and recognise those that the reducer does without Python.")
wording("By these libraries know that nobody needs to start processes any more.", "Libraries read these to see that the processes have been started.")
wording("gets it: not its name is changed but what it\n    constructs, an object of its subclass.", "gets it: the class stays; calling it constructs our\n    subclass.")
wording("Return when the last iteration began and ended what, in seconds. Not collective.", "Return the five timestamps of the last iteration, in seconds. Not collective.")
wording("what its current stream has to do is waited for before.", "first synchronise its current stream.")
