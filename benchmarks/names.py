"""The names of what is compared, as results and tables have them."""

OURS = "mpiddp"
OURS_MPI = "mpiddp, transport mpi"
GLOO = "torch DDP, Gloo"
OUR_BACKEND = "torch DDP, backend mpiddp"
TORCH_MPI = "torch DDP, torch's own MPI"
HOROVOD = "Horovod"
FLATTENED = "Allreduce, flattened"
ONE_EACH = "Allreduce a parameter"
LIMIT = "the limit, after backward"
LIMIT_ALONE = "the limit, alone"
LIMIT_IN_PLACE = "the limit, in place"  # of one bucket
# With a hook, so that gradients of float32 travel in 16 bits.
OURS_FP16 = "mpiddp, fp16 hook"
GLOO_FP16 = "torch DDP, Gloo, fp16 hook"
OURS_BF16 = "mpiddp, bf16 hook"  # torch allows its bf16 hook on no CPU
HOOKED = (OURS_FP16, GLOO_FP16, OURS_BF16)

# With the optimizer.
OURS_NODE = "mpiddp, NodeOptimizer"
GLOO_ZERO = "torch DDP, Gloo, ZeRO"
ALONE = "each rank alone"

# Of a collective; ours is mpiddp, by the table of ways and by MPI's calls and messages alone.
MESSAGES = "messages"
GLOO_GROUP = "Gloo"
BARE = "bare"
BLOCKING = "blocking"

# Of a training step, in the order of tables.
NAMES = (
    OURS,
    OURS_MPI,
    GLOO,
    OUR_BACKEND,
    TORCH_MPI,
    HOROVOD,
    FLATTENED,
    ONE_EACH,
    LIMIT,
    LIMIT_ALONE,
    *HOOKED,
)
