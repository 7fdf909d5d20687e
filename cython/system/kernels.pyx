"""Select the SIMD kernels with which this process reduces gradients; run any of them for tests.

The kernels are C (kernels.h), compiled for several machines into this one module.
Importing it selects the best that the processor can run, or those that the environment
variable MPIDDP_KERNELS names. The transports take them from `selected_kernels`; the
functions here run any of them on tensors.
"""

from libc.stdlib cimport calloc, free

import torch

from mpiddp import settings


cdef extern from "kernels.h" nogil:
    cdef struct mpiddp_kernels:
        const char *name
        void (*mean_in_place)(
            int, char *const *, size_t, size_t, size_t, double) noexcept nogil
        void (*sum_to)(int, void *, char *const *, size_t, size_t, size_t) noexcept nogil
        size_t (*spread_mean)(
            int, char *const *, size_t, size_t, size_t, const void *, double) noexcept nogil
        void (*scaled_sum_to)(
            int, void *, char *const *, size_t, size_t, size_t, double) noexcept nogil
        void (*spread_scaled_mean)(
            int, char *const *, size_t, size_t, size_t, const void *, const void *, double,
        ) noexcept nogil
        void (*mean_to)(
            int, void *, char *const *, size_t, size_t, size_t, double) noexcept nogil
        void (*scaled_sum_as_element)(
            int, void *, char *const *, size_t, size_t, size_t, double) noexcept nogil
        int (*are_finite)(int, const void *, size_t) noexcept nogil
        void (*replace_special)(int, void *, const void *, size_t) noexcept nogil
        void (*convert)(int, int, void *, const void *, size_t) noexcept nogil
    enum:
        MPIDDP_MAX_KERNELS
    double mpiddp_scale(double) noexcept
    size_t mpiddp_available_kernels(const mpiddp_kernels **) noexcept
    void mpiddp_copy_past_cache(void *, const void *, size_t) noexcept


# What the kernels take.
ELEMENTS = {
    torch.float32: ELEMENT_FLOAT32,
    torch.float64: ELEMENT_FLOAT64,
    torch.float16: ELEMENT_FLOAT16,
    torch.bfloat16: ELEMENT_BFLOAT16,
}

cdef Kernels _tables[MPIDDP_MAX_KERNELS]
cdef size_t _count = 0
cdef const Kernels *_selected = NULL
# What is wrong with the name in the environment, "" if nothing is.
cdef str _problem = ""


cdef const Kernels *selected_kernels() noexcept nogil:
    return _selected


cdef double scale_of(double divisor) noexcept nogil:
    return mpiddp_scale(divisor)


cdef void copy_past_cache(char *to, const char *from_, size_t bytes_) noexcept nogil:
    mpiddp_copy_past_cache(to, from_, bytes_)


cdef _list():
    """Fill the tables with what this processor can run."""
    global _count
    cdef const mpiddp_kernels *found[MPIDDP_MAX_KERNELS]
    cdef size_t i
    _count = mpiddp_available_kernels(found)
    for i in range(_count):
        _tables[i].name = found[i].name
        _tables[i].mean_in_place = found[i].mean_in_place
        _tables[i].sum_to = found[i].sum_to
        _tables[i].spread_mean = found[i].spread_mean
        _tables[i].scaled_sum_to = found[i].scaled_sum_to
        _tables[i].spread_scaled_mean = found[i].spread_scaled_mean
        _tables[i].mean_to = found[i].mean_to
        _tables[i].scaled_sum_as_element = found[i].scaled_sum_as_element
        _tables[i].are_finite = found[i].are_finite
        _tables[i].replace_special = found[i].replace_special
        _tables[i].convert = found[i].convert


cdef const Kernels *_find(name) except NULL:
    cdef size_t i
    for i in range(_count):
        if _tables[i].name.decode() == name:
            return &_tables[i]
    raise ValueError(f"kernels must be one of {', '.join(available())} here, not {name!r}")


def available():
    """Return the names of the kernels that this processor can run, the best one last.

    Not collective.

    Returns:
        "plain" (C for any machine) and, on x86-64, "avx2" and "avx512"; on 64-bit ARM,
        "neon".
    """
    cdef size_t i
    return tuple(_tables[i].name.decode() for i in range(_count))


def selected():
    """Return the name of the kernels in use.

    Not collective.

    Raises:
        ValueError: the environment names some that this processor cannot run.
    """
    if _problem:
        raise ValueError(_problem)
    return _selected.name.decode()


def use(name):
    """Use other kernels from now on.

    Not collective. The results stay the same, bit for bit; this is for tests and
    measurements. A computation under way on another thread keeps its kernels.

    Args:
        name: one of `available`.

    Raises:
        ValueError: this processor cannot run such kernels, or there are none.
    """
    global _selected, _problem
    _selected, _problem = _find(name), ""


cdef class _Buffers:
    """The addresses of some tensors of one dtype."""

    cdef char **addresses
    cdef size_t count
    cdef int element
    cdef object tensors     # keeps their memory

    def __cinit__(self, buffers, size_t elements):
        cdef size_t i
        self.tensors = tuple(buffers)
        if not self.tensors:
            raise ValueError("there are no buffers")
        self.count = len(self.tensors)
        self.element = _element(self.tensors[0])
        self.addresses = <char **>calloc(self.count, sizeof(char *))
        if self.addresses == NULL:
            raise MemoryError
        for i in range(self.count):
            self.addresses[i] = _address(self.tensors[i], self.tensors[0].dtype, elements)

    def __dealloc__(self):
        free(self.addresses)


cdef int _element(tensor) except -1:
    if tensor.dtype not in ELEMENTS:
        raise TypeError(
            f"no kernels for {tensor.dtype}; there are some for "
            f"{', '.join(str(dtype) for dtype in ELEMENTS)}"
        )
    return ELEMENTS[tensor.dtype]


cdef char *_address(tensor, dtype, size_t elements) except? NULL:
    if tensor.dtype != dtype:
        raise TypeError(f"a tensor must be {dtype}, not {tensor.dtype}")
    if tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError("a tensor must be one-dimensional, contiguous and in the CPU's memory")
    if tensor.numel() < elements:
        raise ValueError(f"a tensor has {tensor.numel()} elements where {elements} are needed")
    return <char *><size_t>tensor.data_ptr()


cdef _sum_dtype(_Buffers buffers):
    return torch.float64 if buffers.element == ELEMENT_FLOAT64 else torch.float32


def mean_in_place(name, buffers, size_t first, size_t count, double divisor):
    """Put the sum of all buffers, divided, into all buffers, with the kernels `name`.

    Not collective. 16-bit elements are summed and divided as float32.

    Args:
        name: one of `available`.
        buffers: one-dimensional contiguous CPU tensors of one dtype: float32, float64,
            float16 or bfloat16.
        first: the first element to read and write.
        count: how many to read and write.
        divisor: what the sum is divided by.

    Raises:
        ValueError: there are no such kernels, or a tensor is too short or of another kind.
        TypeError: the tensors are of an unsupported or of different dtypes.
    """
    cdef const Kernels *kernels = _find(name)
    cdef _Buffers given = _Buffers(buffers, first + count)
    with nogil:
        kernels.mean_in_place(
            given.element, given.addresses, given.count, first, count, divisor)


def sum_to(name, out, buffers, size_t first, size_t count):
    """Put the sum of all buffers, not divided, into another tensor.

    Not collective. For arguments and errors not listed see `mean_in_place`.

    Args:
        out: of at least `count` elements; float64 for float64 and float32 for all others.
    """
    cdef const Kernels *kernels = _find(name)
    cdef _Buffers given = _Buffers(buffers, first + count)
    cdef char *sums = _address(out, _sum_dtype(given), count)
    with nogil:
        kernels.sum_to(given.element, sums, given.addresses, given.count, first, count)


def spread_mean(name, buffers, size_t first, size_t count, sums, double divisor):
    """Put sums, divided, into all buffers, up to a block with one that is infinite or NaN.

    Not collective. For arguments and errors not listed see `mean_in_place`.

    Args:
        sums: of at least `count` elements; float64 for float64 and float32 for all others.

    Returns:
        How many elements were put; of float16, all.
    """
    cdef const Kernels *kernels = _find(name)
    cdef _Buffers given = _Buffers(buffers, first + count)
    cdef char *summed = _address(sums, _sum_dtype(given), count)
    with nogil:
        count = kernels.spread_mean(
            given.element, given.addresses, given.count, first, count, summed, divisor)
    return count


def scaled_sum_to(name, out, buffers, size_t first, size_t count, double divisor):
    """Put the sum of all buffers, scaled so that the mean is in range, into another tensor.

    Not collective. For arguments and errors not listed see `mean_in_place` and `sum_to`.
    """
    cdef const Kernels *kernels = _find(name)
    cdef _Buffers given = _Buffers(buffers, first + count)
    cdef char *sums = _address(out, _sum_dtype(given), count)
    with nogil:
        kernels.scaled_sum_to(
            given.element, sums, given.addresses, given.count, first, count, divisor)


def spread_scaled_mean(name, buffers, size_t first, size_t count, sums, scaled, double divisor):
    """Put sums, divided, into all buffers; scaled ones where these are not finite.

    Not collective. For arguments and errors not listed see `mean_in_place` and `spread_mean`.

    Args:
        scaled: the sums that `scaled_sum_to` gives for the same divisor.
    """
    cdef const Kernels *kernels = _find(name)
    cdef _Buffers given = _Buffers(buffers, first + count)
    cdef char *summed = _address(sums, _sum_dtype(given), count)
    cdef char *smaller = _address(scaled, _sum_dtype(given), count)
    with nogil:
        kernels.spread_scaled_mean(
            given.element, given.addresses, given.count, first, count, summed, smaller, divisor)


def mean_to(name, out, buffers, size_t first, size_t count, double divisor):
    """Put the sum of all buffers, divided and rounded to their dtype, into another tensor.

    Not collective. For arguments and errors not listed see `mean_in_place`.

    Args:
        out: of at least `count` elements, of the dtype of the buffers.
    """
    cdef const Kernels *kernels = _find(name)
    cdef _Buffers given = _Buffers(buffers, first + count)
    cdef char *means = _address(out, given.tensors[0].dtype, count)
    with nogil:
        kernels.mean_to(given.element, means, given.addresses, given.count, first, count, divisor)


def scaled_sum_as_element(name, out, buffers, size_t first, size_t count, double divisor):
    """Put what `scaled_sum_to` gives, rounded to the dtype of the buffers, into another tensor.

    Not collective. For arguments and errors not listed see `mean_to`. Of float16, too, the
    elements are scaled.
    """
    cdef const Kernels *kernels = _find(name)
    cdef _Buffers given = _Buffers(buffers, first + count)
    cdef char *sums = _address(out, given.tensors[0].dtype, count)
    with nogil:
        kernels.scaled_sum_as_element(
            given.element, sums, given.addresses, given.count, first, count, divisor)


def are_finite(name, array):
    """Return whether no element of a tensor is infinite or NaN.

    Not collective. For errors see `mean_in_place`.
    """
    cdef const Kernels *kernels = _find(name)
    cdef size_t count = array.numel()
    cdef char *address = _address(array, array.dtype, count)
    return bool(kernels.are_finite(_element(array), address, count))


def replace_special(name, array, other):
    """Put the elements of another tensor in the place of those that are infinite or NaN.

    Not collective. For errors see `mean_in_place`.

    Args:
        name: one of `available`.
        array: what is changed.
        other: of the same dtype, and at least as many elements.
    """
    cdef const Kernels *kernels = _find(name)
    cdef size_t count = array.numel()
    cdef char *address = _address(array, array.dtype, count)
    kernels.replace_special(
        _element(array), address, _address(other, array.dtype, count), count)


def convert(name, out, array):
    """Convert a tensor into another one, rounding once.

    Not collective. For errors see `mean_in_place`.

    Args:
        name: one of `available`.
        out: where the result goes; at least as many elements as in `array`.
        array: what is converted.
    """
    cdef const Kernels *kernels = _find(name)
    cdef size_t count = array.numel()
    cdef int to = _element(out)
    cdef int from_ = _element(array)
    cdef char *target = _address(out, out.dtype, count)
    cdef char *source = _address(array, array.dtype, count)
    with nogil:
        kernels.convert(to, from_, target, source, count)


cdef _select():
    """Select what the environment names, or the best.

    A wrong name is reported at the start, on all ranks: an error here, on import, would leave
    the other ranks waiting.
    """
    global _selected, _problem
    name = settings.KERNELS.read()
    _selected = &_tables[_count - 1]
    if name in available():
        _selected = _find(name)
    elif name is not None:
        _problem = (
            f"{settings.KERNELS.name} must be one of {', '.join(available())} on this machine, "
            f"not {name!r}"
        )


_list()
_select()
