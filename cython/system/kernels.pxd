cdef enum ElementType:
    # What a bucket's bytes are; complex gradients are pairs of these. As in kernels.h.
    ELEMENT_FLOAT32 = 0
    ELEMENT_FLOAT64 = 1
    ELEMENT_FLOAT16 = 2
    ELEMENT_BFLOAT16 = 3


cdef struct Kernels:
    # Loops over gradients, for one kind of machine. `element` is an ElementType.
    # Buffers are arrays of elements, one per rank and aligned as an element is; only
    # elements [first, first + count) of them are read and written. No two arrays may
    # overlap. Sums are float64 for float64 and float32 for all others, made in the
    # order of the buffers, and results are rounded once. `ranks` is at least 1.
    # Where a sum of finite elements overflows, the mean does not: see Note [Sums that
    # overflow] in kernels_values.h.
    const char *name

    # Put the sum of all buffers, divided, into all buffers.
    void (*mean_in_place)(
        int element, char *const *buffers, size_t ranks, size_t first, size_t count,
        double divisor,
    ) noexcept nogil

    # Put the sum of all buffers, not divided, into out[0 .. count - 1].
    void (*sum_to)(
        int element, void *out, char *const *buffers, size_t ranks, size_t first,
        size_t count,
    ) noexcept nogil

    # Put sum[0 .. count - 1], divided, into all buffers, up to the first block with a sum
    # that is infinite or NaN. Return how many were put: of float16 all, because no sum of
    # these overflows.
    size_t (*spread_mean)(
        int element, char *const *buffers, size_t ranks, size_t first, size_t count,
        const void *sum, double divisor,
    ) noexcept nogil

    # As sum_to, with elements scaled so that a sum of `divisor` of them is finite.
    void (*scaled_sum_to)(
        int element, void *out, char *const *buffers, size_t ranks, size_t first,
        size_t count, double divisor,
    ) noexcept nogil

    # Put sum[0 .. count - 1], divided, into all buffers; where that is infinite or NaN, use
    # scaled[0 .. count - 1] instead: sums from scaled_sum_to, with the same divisor.
    void (*spread_scaled_mean)(
        int element, char *const *buffers, size_t ranks, size_t first, size_t count,
        const void *sum, const void *scaled, double divisor,
    ) noexcept nogil

    # Put the sum of all buffers, divided, into out[0 .. count - 1], which are elements.
    void (*mean_to)(
        int element, void *out, char *const *buffers, size_t ranks, size_t first,
        size_t count, double divisor,
    ) noexcept nogil

    # As scaled_sum_to, with sums that are rounded to elements. Of float16, too, they are scaled.
    void (*scaled_sum_as_element)(
        int element, void *out, char *const *buffers, size_t ranks, size_t first,
        size_t count, double divisor,
    ) noexcept nogil

    # Whether no element of an array is infinite or NaN.
    int (*are_finite)(int element, const void *array, size_t count) noexcept nogil

    # Put the elements of another array in the place of those that are infinite or NaN.
    void (*replace_special)(
        int element, void *array, const void *other, size_t count,
    ) noexcept nogil

    # Convert an array from one element type to another or the same.
    void (*convert)(
        int to, int from_, void *out, const void *array, size_t count,
    ) noexcept nogil


# What the elements of `scaled_sum_to` and `scaled_sum_as_element` were multiplied by.
cdef double scale_of(double divisor) noexcept nogil


# The kernels in use. May be called on any thread.
cdef const Kernels *selected_kernels() noexcept nogil


# Copy memory that does not overlap; the copy is in no cache afterwards, where that can be had.
cdef void copy_past_cache(char *to, const char *from_, size_t bytes_) noexcept nogil


cdef inline size_t element_bytes(ElementType element) noexcept nogil:
    if element == ELEMENT_FLOAT32:
        return 4
    if element == ELEMENT_FLOAT64:
        return 8
    return 2
