"""The names of horovod.torch.functions, for programs that import them from there."""

from mpiddp.horovod.broadcast_state import broadcast_optimizer_state, broadcast_parameters
from mpiddp.horovod.objects import allgather_object, broadcast_object

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
