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

# Of a collective; ours is mpiddp.
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
)
