"""The all-reduce of one bucket's memory, from Python: for tests and measurements of transports."""

import torch

from mpiddp.engine.engine cimport WAIT_DONE, Channel
from mpiddp.engine.memory cimport BucketMemory, GpuMemory
from mpiddp.engine.progress cimport job_is_done
from mpiddp.system.kernels cimport (
    ELEMENT_BFLOAT16, ELEMENT_FLOAT16, ELEMENT_FLOAT32, ELEMENT_FLOAT64, element_bytes,
)


_ELEMENTS = {
    torch.float32: ELEMENT_FLOAT32,
    torch.float64: ELEMENT_FLOAT64,
    torch.float16: ELEMENT_FLOAT16,
    torch.bfloat16: ELEMENT_BFLOAT16,
}

# Kept: objects dropped while the engine could still move them.
_abandoned = []


cdef class SingleAllReduce:
    """Replace a bucket's elements by their means over the ranks, each time it is submitted.

    Not collective.

    Args:
        channel: the channel to put it in.
        memory: one that `channel.allocate` has returned.
        dtype: of the elements: float32, float64, float16 or bfloat16.
        divisor: what the sum over ranks is divided by.
    """

    def __init__(self, Channel channel not None, BucketMemory memory not None, dtype,
                 double divisor):
        size = memory.buffer.numel()
        if isinstance(memory, GpuMemory):
            size += (<GpuMemory>memory).tail.numel()
        self.channel = channel
        self.memory = memory
        self.job.data = <char *><size_t>memory.buffer.data_ptr()
        self.job.element = _ELEMENTS[dtype]
        self.job.count = size // element_bytes(self.job.element)
        self.job.divisor = divisor
        self.job.context = memory.context
        self.job.done = 1

    def __del__(self):
        # None: as in requests.pyx.
        if not job_is_done(&self.job) and _abandoned is not None:
            _abandoned.append(self)

    def submit(self, size_t stream=0):
        """Queue it. Collective: in the same order on all ranks.

        Until it is done, the memory must not be touched, and this object must be kept.

        Args:
            stream: handle of the device's stream that fills the memory.

        Raises:
            RuntimeError: the channel has failed or is closed, or the last submission is not done.
        """
        if not job_is_done(&self.job):
            raise RuntimeError("this all-reduce is still under way")
        self.job.stream = <void *>stream
        self.channel.submit(&self.job)

    def wait(self, double timeout):
        """Wait; return whether the means came in time. Collective.

        Args:
            timeout: in seconds from the last all-reduce that was done in the channel.

        Raises:
            RuntimeError: the all-reduce has failed.
        """
        return self.channel.wait(&self.job, timeout) == WAIT_DONE

    @property
    def done(self):
        """Whether the means are there."""
        return bool(job_is_done(&self.job))
