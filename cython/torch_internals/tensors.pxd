cdef bint gradients_are_within_reach() noexcept
cdef int dtype_code(object tensor) noexcept
cdef bint has_gradient(object parameter) except -1
cdef char *gradient_address(object parameter) except? NULL
cdef char *plain_gradient(
    object parameter, object view, int dtype, bint contiguous
) noexcept
cdef char *plain_tensor(object tensor, object view, int dtype, bint contiguous) noexcept
cdef int point_gradient(object parameter, object view) except -1
cdef char *dense_memory(object tensor, int *dtype, size_t *size) noexcept
