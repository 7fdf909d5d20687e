"""Flat buffers of gradients on a GPU, filled and emptied by torch on the streams of the caller.

What `Bucket` does on memory, this one does with torch's kernels; the flags stay on the host,
where the ranks read them. The host never waits for the GPU here: streams keep the order.

Note [Gradients on a GPU]
~~~~~~~~~~~~~~~~~~~~~~~~~
The hook of a parameter only notes the gradient. When the bucket is launched one fused kernel
copies all of them in, casting if the bucket converts, and the means come out the same way: a
launch costs as much as the copy of a megabyte, and models have hundreds of small parameters.
Where gradients are views of the bucket, noted ones hold memory that the copy would free.
They are copied as soon as they take up `GATHERED_BYTES`, so that a step needs at most that much
more memory than with a copy in each hook.

Note [Streams]
~~~~~~~~~~~~~~
autograd runs a hook on the stream that has made the gradient, and the streams of one bucket may
differ. The copy into the bucket and the launch run on the current stream of the thread that
brings the last gradient. That stream first waits for the others, and afterwards they wait for it:
the memory of a gradient that became a view goes back to the stream that it was made on, and must
not be overwritten before it is read.
At the end of backward the current stream is the one on which the user called it. That one
waits for the means, as it does for the gradients of a single process.

Note [Mixed precision on a GPU]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch.autocast and torch.amp.GradScaler need nothing from a wrapper. With autocast the parameters
and their gradients stay float32. A scaler multiplies the loss by the same factor on every rank, and
scaled gradients average like others; an infinity on one rank reaches the mean and so all ranks,
which then skip the same step.
"""

from libc.string cimport memset

import torch

from mpiddp.engine.memory cimport GpuMemory
from mpiddp.gpu.runtime cimport Event, check_gpu, enter_gpu, leave_gpu
from mpiddp.reducer.bucket cimport Bucket, is_at, overlaps

from mpiddp.gpu.runtime import runtime_of


cdef enum:
    # How much memory gradients may hold until they become views.
    GATHERED_BYTES = 4 << 20


cdef copy_all(list to, list sources):
    """Copy tensors to others, in one kernel except for those that it cannot copy."""
    cdef Py_ssize_t position, count = len(to)
    plain = [
        position for position in range(count)
        # A negation or conjugation that torch has deferred.
        if not (to[position].is_neg() or to[position].is_conj()
                or sources[position].is_neg() or sources[position].is_conj())
    ]
    with torch.no_grad():
        if len(plain) < count:
            for position in set(range(count)).difference(plain):
                to[position].copy_(sources[position])
            to = [to[position] for position in plain]
            sources = [sources[position] for position in plain]
        if to:
            torch._foreach_copy_(to, sources)


cdef class GpuBucket(Bucket):
    """One flat buffer on a GPU for the gradients of some parameters there.

    Not collective. The arguments and errors are those of `Bucket`.

    Args:
        memory: an `mpiddp.engine.memory.GpuMemory` for gradients and flags.
    """

    def __init__(self, Py_ssize_t index, parameters, parameter_indices, double divisor,
                 GpuMemory memory not None, *, bint gradients_are_views=False, **options):
        super().__init__(
            index, parameters, parameter_indices, divisor, memory,
            gradients_are_views=gradients_are_views, **options,
        )
        self.on_gpu = True
        self.device = parameters[0].device
        self.runtime = runtime_of(self.device)
        self.device_index = self.runtime.index_of(self.device)
        self.gpu_memory = memory
        self.gradients_are_views = gradients_are_views
        self.limit = GATHERED_BYTES if gradients_are_views else <size_t>-1
        self.parameters = list(parameters)
        self.gathered = []
        self.positions = []
        self.cleared = []
        self.streams = set()
        self.mark = Event(self.runtime, self.device_index)
        self.flags = memory.host_tail

    cdef int gather(self, Py_ssize_t position, object gradient) except -1:
        """Note a gradient to be copied into the bucket, unless it lies there already."""
        view = self.views[position]
        self.note_stream()
        if view.numel() and is_at(gradient, view):
            return 0
        if overlaps(gradient, view):
            gradient = gradient.clone()     # in another order of elements
        self.gathered.append(gradient)
        self.positions.append(position)
        self.gathered_bytes += gradient.nbytes
        if self.gathered_bytes >= self.limit:
            self.flush(self.runtime.current_stream(self.device))
        return 0

    cdef int clear(self, Py_ssize_t position) except -1:
        """Note that this rank has no gradient at a position."""
        self.note_stream()
        self.cleared.append(position)
        return 0

    cdef int forget(self) except -1:
        """Drop what was noted in a backward that ended early."""
        if self.gathered or self.cleared:
            self.gathered, self.positions, self.cleared = [], [], []
            self.gathered_bytes = 0
        return 0

    cdef int note_stream(self) except -1:
        self.streams.add(self.runtime.current_stream(self.device))
        return 0

    cdef int fill_from_gradient_buffer(self) except -1:
        """Copy all gradients into what travels, and note on which stream that was."""
        cdef size_t stream = self.runtime.current_stream(self.device)
        self.flush(stream)
        self.streams = set()
        if not self.flags_only:
            with torch.no_grad():
                if self.gradient_buffer is not None:
                    self.buffer.copy_(self.gradient_buffer)
                if self.gpu_memory.divides_before and self.job.divisor != 1:
                    self.buffer.div_(self.job.divisor)
        self.job.stream = <void *>stream
        return 0

    cdef int fill_with_zeros(self) except -1:
        """Fill the bucket with zeros: no gradient, and no flag set."""
        with torch.no_grad():
            self.buffer.zero_()
            if self.flags_only:
                self.gradient_buffer.zero_()
        memset(self.flags, 0, self.flag_count * self.bytes_per_element)
        self.job.stream = <void *><size_t>self.runtime.current_stream(self.device)
        return 0

    cdef int receive(self) except -1:
        """Make the current stream wait for the means of a job that is done."""
        cdef size_t stream = self.runtime.current_stream(self.device)
        cdef int earlier = self.device_index
        # The default stream has the same handle on every device.
        check_gpu(
            self.runtime,
            enter_gpu(&self.runtime.functions, self.device_index, &earlier),
            "SetDevice", self.device_index,
        )
        try:
            self.gpu_memory.wait_on(stream)
        finally:
            leave_gpu(&self.runtime.functions, self.device_index, earlier)
        if self.flags_only:
            # The hook in Python reads its gradients on this stream.
            self.order(<size_t>self.job.stream, stream)
        return 0

    cdef int read_into_gradient_buffer(self) except -1:
        """Convert all means back from what has travelled."""
        if self.gradient_buffer is not None and not self.flags_only:
            with torch.no_grad():
                self.gradient_buffer.copy_(self.buffer)
        return 0

    cdef int write_out(self, list parameters) except -1:
        """Copy the means to the gradients of all parameters; one that has none gets a new one."""
        gradients, views = [], []
        for parameter, view in zip(parameters, self.views):
            if parameter.grad is None:
                parameter.grad = view.to(self.dtype, copy=True)
            else:
                gradients.append(parameter.grad)
                views.append(view)
        copy_all(gradients, views)
        return 0

    cdef int flush(self, size_t stream) except -1:
        """Copy what was gathered into the bucket on the current stream, after the other streams."""
        self.streams.discard(stream)
        for other in self.streams:
            self.order(other, stream)
        self.copy_gathered()
        for other in self.streams:
            self.order(stream, other)
        self.streams = {stream}
        return 0

    cdef int copy_gathered(self) except -1:
        gathered, self.gathered = self.gathered, []
        positions, self.positions = self.positions, []
        cleared, self.cleared = self.cleared, []
        self.gathered_bytes = 0
        copy_all([self.views[position] for position in positions], gathered)
        if cleared:
            with torch.no_grad():
                torch._foreach_zero_([self.views[position] for position in cleared])
        if self.gradients_are_views:
            for position in positions:
                self.parameters[position].grad = self.tensor_at(position)
        return 0

    cdef int order(self, size_t before, size_t after) except -1:
        """Make later work on the stream `after` wait for what is on `before` now."""
        cdef int device = self.device_index
        cdef int earlier = device
        cdef int code
        if before == after:
            return 0
        with nogil:
            code = enter_gpu(&self.runtime.functions, device, &earlier)
            if code == 0:
                code = self.runtime.functions.event_record(self.mark.handle, <void *>before)
            if code == 0:
                code = self.runtime.functions.stream_wait_event(
                    <void *>after, self.mark.handle, 0)
            leave_gpu(&self.runtime.functions, device, earlier)
        check_gpu(self.runtime, code, "StreamWaitEvent", device)
        return 0
