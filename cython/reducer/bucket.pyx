"""Flat buffers of gradients and the views into them.

A bucket lays the gradients of some parameters of one dtype end to end, as the
engine reduces them. It knows neither hooks nor MPI.

Note [Flags behind the gradients]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Behind its gradients a bucket carries one flag for each parameter, 1 where this rank
has a gradient for it, and some for the whole bucket. INCOMPLETE is 1 where this rank
lacks some gradient of the bucket; MISSED is 1 where autograd never reached some
parameter (it may also reach one and bring no gradient). For the others see Note
[A number in flags]. All are summed with the gradients: afterwards every rank knows
which parameters no rank used (their gradient must stay untouched) and whether any
rank missed any, for a few bytes and no further collective. Buckets that are
complete everywhere take the fast path.
A mean of flags is only compared with zero: 1/N does not vanish in any dtype
for fewer than 2^24 ranks, while N-1 of N could round to one in bfloat16.

Note [A number in flags]
~~~~~~~~~~~~~~~~~~~~~~~~
One bucket of each backward also tells whether a number is the same on all ranks. Each of its
COUNT_BITS lowest bits has two flags, one for 0 and one for 1, and a rank sets one of the two. After
the sum both are set where two ranks have different bits, and only there. That is exact in every
dtype and for every order of summation, and differences cannot cancel out. Only a difference by
a multiple of 2^COUNT_BITS goes unnoticed. A rank that has joined sets JOINED instead of these.

Note [Compression]
~~~~~~~~~~~~~~~~~~
With compression, the engine reduces elements of a 16-bit dtype where the gradients are
float32 or float64: transports sum such elements in float32 and round once. Copying a
gradient into its view or back converts it, with the kernels where it is a plain copy,
else with torch's `copy_` (which rounds float64 twice, by way of float32).
Gradients that are views of the bucket cannot lie in 16 bits. They have a buffer of
their own, `gradient_buffer`, that is converted as a whole when the bucket is launched and when
the mean is there. In both cases the flags are in the memory that the engine reduces.
Other dtypes travel as they are: 16-bit ones have nothing to gain, and complex ones
have no 16-bit dtype that is supported and wide enough.

Note [Gradients that are views]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
`.grad` is the user's: its data may be rebound (`p.grad.data = ...`, `module.to(...)`), and its
storage moved elsewhere (`module.share_memory()`) or resized, while it stays the same tensor. So
`views` never leave the reducer. `.grad` is set to another tensor on the same memory, with a storage
of its own. This tensor is checked before it is used again (`tensor_at`): if it has left its place,
a new one is made. A gradient counts as a view only while it lies in its place.

Note [Gradients of a node]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Where ranks share parameters, the mean of a bucket lies once for all of them (`common`), and so do
gradients, which are views of it. What a rank gives to the sum it lays into its stage, when the
bucket is launched: until then gradients are where autograd has put them, and from then on views of
the mean that is to come. The stage is that of all buckets, so flags have memory of their own, and
are copied behind the gradients and back.

Note [Hooks in Python]
~~~~~~~~~~~~~~~~~~~~~~
A communication hook in Python moves the gradients itself, and the engine only the flags.
The gradients lie in `gradient_buffer`, memory that torch may resize, as hooks do.
"""

from libc.string cimport memcpy, memset

import torch

from mpiddp.engine.memory cimport BucketMemory, CommonMemory
from mpiddp.system.copying cimport convert
from mpiddp.system.kernels cimport (
    ELEMENT_BFLOAT16, ELEMENT_FLOAT16, ELEMENT_FLOAT32, ELEMENT_FLOAT64, ElementType,
    element_bytes,
)


cdef enum:
    # Conversions of fewer elements are over before the GIL could be handed on.
    RELEASE_GIL_ELEMENTS = 1 << 15


# How the engine sees a dtype: element type, elements per torch element.
_ELEMENTS = {
    torch.float32: (ELEMENT_FLOAT32, 1),
    torch.float64: (ELEMENT_FLOAT64, 1),
    torch.float16: (ELEMENT_FLOAT16, 1),
    torch.bfloat16: (ELEMENT_BFLOAT16, 1),
    torch.complex64: (ELEMENT_FLOAT32, 2),
    torch.complex128: (ELEMENT_FLOAT64, 2),
    torch.complex32: (ELEMENT_FLOAT16, 2),
}


def supported_dtypes():
    """Return the dtypes that a bucket can hold, as a tuple. Not collective."""
    return tuple(_ELEMENTS)


def view_like(buffer, Py_ssize_t offset, parameter):
    """Return the part of `buffer` from `offset` on in the shape and layout of `parameter`.

    Not collective.
    """
    size = parameter.size()
    # empty_like keeps strides exactly where they are dense and do not overlap.
    stride = torch.empty_like(parameter, device="meta", requires_grad=False).stride()
    if stride == parameter.stride():
        return buffer.as_strided(size, stride, buffer.storage_offset() + offset)
    return buffer.narrow(0, offset, parameter.numel()).view(size)


cdef bint same_layout(tensor, view) except -1:
    """Whether a tensor has the shape of `view`, and its elements at the same offsets."""
    if tensor.shape != view.shape:
        return False
    for size, ours, theirs in zip(view.size(), view.stride(), tensor.stride()):
        if size != 1 and ours != theirs:
            return False
    return True


cdef bint is_at(tensor, view) except -1:
    """Whether a tensor and `view` are the same elements in the same memory."""
    return (
        tensor.data_ptr() == view.data_ptr() and tensor.dtype is view.dtype
        and same_layout(tensor, view) and not tensor.is_neg() and not tensor.is_conj()
    )


cdef bint overlaps(tensor, view) except -1:
    """Whether a tensor may have memory in common with `view`, which is dense."""
    cdef size_t start = view.data_ptr(), end = start + view.nbytes, other
    if tensor.layout is not torch.strided or tensor.data_ptr() == 0:
        return False        # 0: a tensor of zeros without memory
    storage = tensor.untyped_storage()
    other = storage.data_ptr()
    return other < end and start < other + <size_t>storage.nbytes()


def wire_dtype(dtype, compression=None):
    """Return the dtype in which gradients of `dtype` travel. Not collective.

    Args:
        dtype: of the gradients.
        compression: torch.float16 or torch.bfloat16, None for none.
    """
    if compression is not None and dtype in (torch.float32, torch.float64):
        return compression
    return dtype


def bytes_needed(parameters, compression=None, bint flags_only=False, dtype=None):
    """Return the size of a bucket for `parameters` in bytes. Not collective.

    Args:
        parameters: of the bucket.
        compression: as for `Bucket`.
        flags_only: without the gradients.
        dtype: of the gradients; None is that of the parameters.
    """
    elements = len(parameters) + BUCKET_FLAGS
    if not flags_only:
        elements += sum([parameter.numel() for parameter in parameters])
    return elements * wire_dtype(dtype or parameters[0].dtype, compression).itemsize


cdef int _convert(
    ElementType to, ElementType from_, char *out, const char *array, size_t count
) except -1:
    if count < RELEASE_GIL_ELEMENTS:
        convert(to, from_, out, array, count)
    else:
        with nogil:
            convert(to, from_, out, array, count)
    return 0


cdef class Bucket:
    """One flat buffer for the gradients of some parameters.

    Not collective.

    Args:
        index: position in launch order.
        parameters: the parameters, all of one dtype on one device.
        parameter_indices: their indices in the reducer's list.
        divisor: what the sum over ranks is divided by.
        memory: `bytes_needed` bytes of zeros; None if sparse.
        channel: the engine's channel that allocated the memory.
        dtype: of the gradients; None is that of the parameters.
        sparse: the one parameter's gradient is sparse; nothing is allocated.
        compression: the 16-bit dtype in which float32 and float64 travel, None for none.
        gradients_are_views: the gradients will be the views, so these must be of their dtype.
        flags_only: a hook in Python moves the gradients, see Note [Hooks in Python].
        gradient_buffer_dtype: of what that hook gets; None is that of the gradients.

    Raises:
        TypeError: gradients of this dtype cannot be averaged.
    """

    def __init__(self, Py_ssize_t index, parameters, parameter_indices, double divisor,
                 BucketMemory memory=None, Channel channel=None, bint sparse=False,
                 compression=None, bint gradients_are_views=False, bint flags_only=False,
                 dtype=None, gradient_buffer_dtype=None):
        cdef Py_ssize_t total, offset, multiple
        cdef ElementType element
        self.index = index
        self.parameter_indices = tuple(parameter_indices)
        self.sparse = sparse
        self.channel = channel
        self.dtype = parameters[0].dtype if dtype is None else dtype
        self.views = self.places = []
        self.tensors = [None] * len(parameters)
        self.job.done = 1
        if sparse:
            return
        if self.dtype not in _ELEMENTS:
            raise TypeError(
                f"gradients of dtype {self.dtype} cannot be averaged; "
                f"supported are {', '.join(str(dtype) for dtype in _ELEMENTS)}"
            )
        travels_as = wire_dtype(self.dtype, compression)
        self.element = _ELEMENTS[self.dtype][0]
        element, multiple = _ELEMENTS[travels_as]
        total = sum([parameter.numel() for parameter in parameters])
        self.gradient_elements = total
        self.memory = memory
        self.buffer = memory.buffer.view(travels_as)
        self.flags_only = flags_only
        if flags_only or travels_as is not self.dtype:
            if flags_only or gradients_are_views:
                self.gradient_buffer = torch.zeros(
                    total, dtype=gradient_buffer_dtype or self.dtype, device=self.buffer.device)
            else:
                self.converts = True
        self.bytes_per_element = self.buffer.element_size()
        self.flag_count = len(parameters) + BUCKET_FLAGS
        offset = 0
        viewed = self.buffer if self.gradient_buffer is None else self.gradient_buffer
        with torch.no_grad():
            for parameter in parameters:
                # .data: with a version counter of its own, not one that all views share.
                self.views.append(view_like(viewed, offset, parameter).data)
                offset += parameter.numel()
        self.job.data = <char *><size_t>self.buffer.data_ptr()
        if isinstance(memory, CommonMemory):
            self.common = memory
            stage = self.common.stage.view(travels_as)
            self.job.data = <char *><size_t>stage.data_ptr()
            self.places = []
            offset = 0
            for parameter in parameters:
                self.places.append(view_like(stage, offset, parameter))
                offset += parameter.numel()
        self.job.count = self.flag_count * multiple
        self.job.element = element
        self.job.divisor = divisor
        self.job.context = memory.context
        self.flags = self.job.data
        if not flags_only:
            self.flags += total * self.bytes_per_element
            self.job.count += total * multiple
        if self.common is not None:
            self.own_flags = torch.zeros(self.flag_count, dtype=travels_as, device="cpu")
            self.flags = <char *><size_t>self.own_flags.data_ptr()

    @property
    def gradients(self):
        """The memory of the views: a 1-D tensor without the flags. Not collective."""
        if self.gradient_buffer is not None:
            return self.gradient_buffer
        return self.buffer.narrow(0, 0, sum([view.numel() for view in self.views]))

    @property
    def means(self):
        """The gradients as all ranks see them, if they lie once; else None. Not collective."""
        if self.common is None:
            return None
        return self.common.means.view(self.dtype).narrow(0, 0, self.gradient_elements)

    def own_elements(self):
        """Return what this rank may have written in `gradients` that others do not see.

        Not collective. Pairs of the first element and that behind the last one.
        """
        cdef Py_ssize_t start, stop
        if self.common is None:
            return []
        return [
            (start // self.bytes_per_element,
             min(stop // self.bytes_per_element, self.gradient_elements))
            for start, stop in self.common.owner.own_ranges(self.common)
        ]

    cdef void note_gradient(self, double moment) noexcept:
        """Note for a trace that a gradient has come."""
        if self.filled == 0:
            self.filled = moment
        self.full = moment

    cdef object tensor_at(self, Py_ssize_t position):
        """Return what a gradient is set to, see Note [Gradients that are views]."""
        view, tensor = self.views[position], self.tensors[position]
        if tensor is not None and is_at(tensor, view):
            return tensor
        if self.memory.given_out != NULL and self.gradient_buffer is None:
            self.memory.given_out[0] = True
        if self.on_gpu or self.flags_only or not view.numel():
            # Hooks in Python resize the storage: nothing else may refer to memory that this frees.
            tensor = view.data
        else:
            start = view.storage_offset() * view.itemsize
            memory = view.untyped_storage()[start:start + view.nbytes]
            tensor = torch.empty(0, dtype=view.dtype, device=view.device)
            tensor.set_(memory, 0, view.size(), view.stride())
        self.tensors[position] = tensor
        return tensor

    cdef int narrow(self, char *view, const char *gradient, size_t bytes_) except -1:
        """Convert a gradient into its view of `bytes_`, where the bucket `converts`."""
        return _convert(
            self.job.element, self.element, view, gradient, bytes_ // self.bytes_per_element)

    cdef int widen(self, char *gradient, const char *view, size_t bytes_) except -1:
        """Convert a view of `bytes_` into a gradient, where the bucket `converts`."""
        return _convert(
            self.element, self.job.element, gradient, view, bytes_ // self.bytes_per_element)

    cdef int fill_from_gradient_buffer(self) except -1:
        """Convert all gradients to what travels, if they have a buffer of their own."""
        if self.gradient_buffer is not None and not self.flags_only:
            _convert(
                self.job.element, self.element, self.job.data,
                <char *><size_t>self.gradient_buffer.data_ptr(), self.gradient_buffer.numel())
        return 0

    cdef int read_into_gradient_buffer(self) except -1:
        """Convert all means back from what has travelled."""
        if self.gradient_buffer is not None and not self.flags_only:
            _convert(
                self.element, self.job.element, <char *><size_t>self.gradient_buffer.data_ptr(),
                self.job.data, self.gradient_buffer.numel())
        return 0

    cdef int fill_with_zeros(self) except -1:
        """Fill the bucket with zeros: no gradient, and no flag set."""
        if self.flags_only:
            self.gradient_buffer.zero_()
        memset(self.job.data, 0, self.job.count * element_bytes(self.job.element))
        if self.common is not None:
            memset(self.flags, 0, self.flag_count * self.bytes_per_element)
        return 0

    cdef int submit(self) except -1:
        """Hand the bucket to the engine."""
        cdef size_t before = self.gradient_elements * self.bytes_per_element
        if self.common is not None:
            memcpy(self.job.data + before, self.flags, self.flag_count * self.bytes_per_element)
        self.channel.submit(&self.job)
        return 0

    cdef int read_flags(self) except -1:
        """Take the sums of all ranks' flags, when the job is done."""
        cdef size_t before = self.gradient_elements * self.bytes_per_element
        cdef char *means
        if self.common is not None:
            means = <char *><size_t>self.common.means.data_ptr()
            memcpy(self.flags, means + before, self.flag_count * self.bytes_per_element)
        return 0

    cdef char *place_address(self, Py_ssize_t position) except? NULL:
        return <char *><size_t>self.places[position].data_ptr()

    cdef char *view_address(self, Py_ssize_t position) except? NULL:
        return <char *><size_t>self.views[position].data_ptr()

    cdef char *flag_address(self, Py_ssize_t position) noexcept nogil:
        """Where the flag of a parameter is, or one of the bucket, counted from the end."""
        if position < 0:
            position += self.flag_count
        return self.flags + position * self.bytes_per_element

    cdef void set_flag(self, Py_ssize_t position, bint value) noexcept nogil:
        """Set the flag of a parameter or of the bucket on this rank."""
        cdef char *flag = self.flag_address(position)
        memset(flag, 0, self.bytes_per_element)
        if not value:
            return
        if self.job.element == ELEMENT_FLOAT32:
            (<float *>flag)[0] = 1
        elif self.job.element == ELEMENT_FLOAT64:
            (<double *>flag)[0] = 1
        elif self.job.element == ELEMENT_FLOAT16:
            (<unsigned short *>flag)[0] = 0x3c00
        else:
            (<unsigned short *>flag)[0] = 0x3f80

    cdef bint flag(self, Py_ssize_t position) noexcept nogil:
        """Return, after the reduction, whether any rank had set the flag."""
        cdef char *flag = self.flag_address(position)
        if self.job.element == ELEMENT_FLOAT32:
            return (<float *>flag)[0] != 0
        if self.job.element == ELEMENT_FLOAT64:
            return (<double *>flag)[0] != 0
        return (<unsigned short *>flag)[0] != 0

    cdef void set_count(self, Py_ssize_t count) noexcept nogil:
        """Set the flags for this rank's number, see Note [A number in flags]."""
        cdef Py_ssize_t bit, value
        for bit in range(COUNT_BITS):
            value = (count >> bit) & 1
            self.set_flag(COUNT + 2 * bit + value, True)
            self.set_flag(COUNT + 2 * bit + 1 - value, False)
        self.set_flag(JOINED, False)

    cdef bint counts_differ(self) noexcept nogil:
        """Return, after the reduction, whether two ranks had set different numbers."""
        cdef Py_ssize_t bit
        for bit in range(COUNT_BITS):
            if self.flag(COUNT + 2 * bit) and self.flag(COUNT + 2 * bit + 1):
                return True
        return False
