from mpiddp.system.kernels cimport ElementType

# Copy memory that may overlap; `total` is the size of all that is being copied along with it. What
# the caches cannot hold goes past them. Helpers take part, see helpers.pxd.
cdef void copy(char *to, const char *from_, size_t bytes_, size_t total) noexcept nogil
# As Kernels.convert, with helpers.
cdef void convert(
    ElementType to, ElementType from_, char *out, const char *array, size_t count
) noexcept nogil
