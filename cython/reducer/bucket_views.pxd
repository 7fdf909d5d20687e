from mpiddp.reducer.bucket cimport Bucket


cdef enum Layout:
    # How a gradient is copied into and out of its bucket.
    LAYOUT_CONTIGUOUS       # memcpy if the gradient is contiguous
    LAYOUT_STRIDED          # memcpy if the gradient has the parameter's strides
    LAYOUT_GENERAL          # torch's copy_


cdef struct BucketView:
    char *address           # where the gradient is laid to be reduced
    char *mean              # where its mean is: in the view of the bucket
    size_t bytes
    Layout layout
    bint readable           # whether a gradient of this layout can be found without Python
    bint within_reach       # whether `copy_fast` may be tried
    int dtype               # torch's number for it, if so


cdef int find_view(BucketView *place, Bucket bucket, Py_ssize_t position) except -1
cdef bint copy_to_view(
    BucketView *place, Bucket bucket, Py_ssize_t position, object gradient) except -1
cdef int write_gradient(
    BucketView *place, Bucket bucket, Py_ssize_t position, object parameter) except -1
cdef bint is_in_place(
    BucketView *place, Bucket bucket, Py_ssize_t position, object parameter) except -1
cdef bint copy_fast(
    BucketView *place, Bucket bucket, Py_ssize_t position, object parameter, bint becomes_view
) except -1
