"""Flat buffers of gradients and the views into them.

A bucket lays the gradients of some parameters of one dtype end to end, as the
engine reduces them. It knows neither hooks nor MPI.

Note [Flags behind the gradients]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Behind its gradients a bucket carries one element a parameter, 1 where this rank
has a gradient for it, and two more: INCOMPLETE, 1 where this rank lacks some
gradient of the bucket, and MISSED, 1 where autograd never came to some parameter
(it may also come and bring no gradient). They are summed with the gradients:
afterwards every rank knows which parameters no rank used (their gradient must stay
untouched) and whether any rank missed any, at the price of a few bytes and of no
collective. Buckets that are complete everywhere take the fast way out.
A mean of flags is only ever compared with zero: 1/N does not vanish in any dtype
for fewer than 2^24 ranks, while N-1 of N could round to one in bfloat16.
"""

from libc.string cimport memset

import torch

from mpiddp.engine cimport (
    ELEMENT_BFLOAT16,
    ELEMENT_FLOAT16,
    ELEMENT_FLOAT32,
    ELEMENT_FLOAT64,
    ElementType,
    element_bytes,
)
from mpiddp.memory cimport BucketMemory


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


def _view_like(buffer, Py_ssize_t offset, parameter):
    """Return the part of `buffer` from `offset` on in the shape and layout of `parameter`."""
    size = parameter.size()
    # empty_like keeps strides exactly where they are dense and do not overlap.
    stride = torch.empty_like(parameter, device="meta", requires_grad=False).stride()
    if stride == parameter.stride():
        return buffer.as_strided(size, stride, buffer.storage_offset() + offset)
    return buffer.narrow(0, offset, parameter.numel()).view(size)


def bytes_needed(parameters):
    """Return the size of a bucket for `parameters` in bytes. Not collective."""
    elements = sum([parameter.numel() for parameter in parameters]) + len(parameters) + 2
    return elements * parameters[0].element_size()


cdef class Bucket:
    """One flat buffer for the gradients of some parameters.

    Not collective.

    Args:
        index: position in launch order.
        parameters: the parameters, all of one dtype on the CPU.
        parameter_indices: their indices in the reducer's list.
        divisor: what the sum over ranks is divided by.
        memory: `bytes_needed` bytes of zeros; None if sparse.
        sparse: the one parameter's gradient is sparse; nothing is allocated.

    Raises:
        TypeError: gradients of this dtype cannot be averaged.
    """

    def __init__(self, Py_ssize_t index, parameters, parameter_indices, double divisor,
                 BucketMemory memory=None, bint sparse=False):
        cdef Py_ssize_t total, offset, multiple
        cdef ElementType element
        self.index = index
        self.parameter_indices = tuple(parameter_indices)
        self.sparse = sparse
        self.dtype = parameters[0].dtype
        self.views = []
        self.work.done = 1
        if sparse:
            return
        if self.dtype not in _ELEMENTS:
            raise TypeError(
                f"gradients of dtype {self.dtype} cannot be averaged; "
                f"supported are {', '.join(str(dtype) for dtype in _ELEMENTS)}"
            )
        element, multiple = _ELEMENTS[self.dtype]
        total = sum([parameter.numel() for parameter in parameters])
        self.memory = memory
        self.buffer = memory.buffer.view(self.dtype)
        self.bytes_per_element = self.buffer.element_size()
        offset = 0
        with torch.no_grad():
            for parameter in parameters:
                # .data: with a version counter of its own, not one that all views share.
                self.views.append(_view_like(self.buffer, offset, parameter).data)
                offset += parameter.numel()
        self.work.data = <char *><size_t>self.buffer.data_ptr()
        self.work.count = self.buffer.numel() * multiple
        self.work.element = element
        self.work.divisor = divisor
        self.work.context = memory.context
        self.flags = self.work.data + total * self.bytes_per_element

    @property
    def gradients(self):
        """The flat gradients without the flags, a 1-D tensor. Not collective."""
        return self.buffer.narrow(0, 0, self.buffer.numel() - len(self.views) - 2)

    cdef char *view_address(self, Py_ssize_t position) except? NULL:
        return <char *><size_t>self.views[position].data_ptr()

    cdef char *flag_address(self, Py_ssize_t position) noexcept nogil:
        """Where the flag of a parameter is, or that of the bucket: INCOMPLETE, MISSED."""
        cdef Py_ssize_t bytes_used
        if position >= 0:
            return self.flags + position * self.bytes_per_element
        bytes_used = self.work.count * element_bytes(self.work.element)
        return self.work.data + bytes_used + position * self.bytes_per_element

    cdef void set_flag(self, Py_ssize_t position, bint value) noexcept nogil:
        """Set the flag of a parameter or of the bucket on this rank."""
        cdef char *flag = self.flag_address(position)
        memset(flag, 0, self.bytes_per_element)
        if not value:
            return
        if self.work.element == ELEMENT_FLOAT32:
            (<float *>flag)[0] = 1
        elif self.work.element == ELEMENT_FLOAT64:
            (<double *>flag)[0] = 1
        elif self.work.element == ELEMENT_FLOAT16:
            (<unsigned short *>flag)[0] = 0x3c00
        else:
            (<unsigned short *>flag)[0] = 0x3f80

    cdef bint flag(self, Py_ssize_t position) noexcept nogil:
        """Return, after the reduction, whether any rank had set the flag."""
        cdef char *flag = self.flag_address(position)
        if self.work.element == ELEMENT_FLOAT32:
            return (<float *>flag)[0] != 0
        if self.work.element == ELEMENT_FLOAT64:
            return (<double *>flag)[0] != 0
        return (<unsigned short *>flag)[0] != 0
