"""Where a gradient has its place in its bucket, and how it is copied in and out.

If a gradient and its place have their elements in the same order, memory is copied, and
converted if the bucket converts; otherwise torch copies.
"""

import torch

from mpiddp.reducer.bucket cimport Bucket, is_at, overlaps, same_layout
from mpiddp.system.copying cimport copy
from mpiddp.system.kernels cimport element_bytes
from mpiddp.torch_internals.tensors cimport (
    dtype_code, gradients_are_within_reach, has_gradient, plain_gradient, plain_tensor,
    point_gradient,
)


cdef enum:
    # Copies below this size are over before the GIL could be handed on.
    RELEASE_GIL_BYTES = 1 << 16


cdef int find_view(BucketView *place, Bucket bucket, Py_ssize_t position) except -1:
    """Describe the place of the bucket's gradient number `position`."""
    view = bucket.views[position]
    place.address = bucket.place_address(position)
    place.mean = bucket.view_address(position)
    place.bytes = view.numel() * view.element_size()
    if view.is_complex():
        # A lazily conjugated gradient must not be copied by memcpy.
        place.layout = LAYOUT_GENERAL
    elif view.is_contiguous():
        place.layout = LAYOUT_CONTIGUOUS
    else:
        place.layout = LAYOUT_STRIDED
    place.readable = (
        gradients_are_within_reach() and place.layout != LAYOUT_GENERAL
        and place.bytes and not bucket.converts
    )
    place.within_reach = place.readable and not bucket.on_gpu
    place.dtype = dtype_code(view)
    return 0


cdef char *_address_of(BucketView *place, Bucket bucket, view, gradient) except? NULL:
    """Return the address of a gradient's elements if they lie as in its place, else NULL."""
    cdef char *address = <char *><size_t>gradient.data_ptr()    # NULL: zeros without memory
    cdef bint plain = False
    if gradient.dtype is not bucket.dtype or gradient.shape != view.shape:
        return NULL
    if place.layout == LAYOUT_CONTIGUOUS:
        plain = gradient.is_contiguous()
    elif place.layout == LAYOUT_STRIDED:
        plain = same_layout(gradient, view)
    # `is_neg`: a negation that torch has deferred.
    return address if plain and not gradient.is_neg() else NULL


cdef bint copy_to_view(
    BucketView *place, Bucket bucket, Py_ssize_t position, object gradient
) except -1:
    """Copy a gradient to its place and return False; return True if it lies there already."""
    view = bucket.places[position]
    cdef char *address = _address_of(place, bucket, view, gradient)
    if address != NULL and bucket.converts:
        bucket.narrow(place.address, address, place.bytes)
    elif address != NULL and view.dtype is bucket.dtype:
        if address == place.address:
            return True
        _copy(bucket, place.address, address, place.bytes)
    elif place.bytes and is_at(gradient, view):
        return True
    else:
        with torch.no_grad():
            view.copy_(gradient.clone() if overlaps(gradient, view) else gradient)
    return False


cdef int write_gradient(
    BucketView *place, Bucket bucket, Py_ssize_t position, object parameter
) except -1:
    """Copy what is in the place to the gradient of `parameter`, a new one if it has none.

    That is its gradient now: it may be another tensor than the one that was copied in, or the
    same one with other memory.
    """
    cdef char *address = NULL
    view = bucket.views[position]
    if place.within_reach:
        address = plain_gradient(
            parameter, view, place.dtype, place.layout == LAYOUT_CONTIGUOUS)
    if address == NULL:
        gradient = parameter.grad
        if gradient is None:
            parameter.grad = view.to(bucket.dtype, copy=True)
            return 0
        if view.dtype is bucket.dtype or bucket.converts:
            address = _address_of(place, bucket, view, gradient)
        if address == NULL:
            with torch.no_grad():
                gradient.copy_(view)
            return 0
    if bucket.converts:
        bucket.widen(address, place.mean, place.bytes)
    else:
        _copy(bucket, address, place.mean, place.bytes)
    return 0


cdef bint is_in_place(
    BucketView *place, Bucket bucket, Py_ssize_t position, object parameter
) except -1:
    """Whether the gradient of `parameter` lies in its place."""
    view = bucket.views[position]
    if place.bytes == 0:
        return has_gradient(parameter)
    if place.readable:
        return place.mean == plain_gradient(
            parameter, view, place.dtype, place.layout == LAYOUT_CONTIGUOUS)
    gradient = parameter.grad
    return gradient is not None and is_at(gradient, view)


cdef bint copy_fast(
    BucketView *place, Bucket bucket, Py_ssize_t position, object parameter, bint becomes_view
) except -1:
    """Copy the gradient of `parameter` to its place, see Note [Gradients without Python objects].

    If it `becomes_view`, ``parameter.grad`` lies there afterwards.

    Returns:
        False if nothing was done and Python must do it.
    """
    cdef bint contiguous = place.layout == LAYOUT_CONTIGUOUS
    view = bucket.views[position]
    cdef char *address = plain_gradient(parameter, view, place.dtype, contiguous)
    if address == NULL or address == place.address:
        return address != NULL
    _copy(bucket, place.address, address, place.bytes)
    if becomes_view:
        tensor = bucket.tensors[position]
        if tensor is None or plain_tensor(tensor, view, place.dtype, contiguous) != place.mean:
            tensor = bucket.tensor_at(position)
        point_gradient(parameter, tensor)
    return True


cdef int _copy(Bucket bucket, char *to, const char *from_, size_t bytes_) except -1:
    cdef size_t total = bucket.job.count * element_bytes(bucket.job.element)
    if bytes_ < RELEASE_GIL_BYTES:
        copy(to, from_, bytes_, total)
    else:
        with nogil:
            copy(to, from_, bytes_, total)
    return 0


def views_by_parameter(buckets):
    """Return the view of each parameter that has one in `buckets`, by index. Not collective."""
    return {
        index: view
        for bucket in buckets or ()
        for index, view in zip(bucket.parameter_indices, bucket.views)
    }


def hold_gradients(parameters, views):
    """Return whether the gradient of some parameter lies in its view. Not collective.

    Args:
        parameters: all of them.
        views: by index of the parameter.
    """
    for index, view in views.items():
        gradient = parameters[index].grad
        if gradient is not None and is_at(gradient, view):
            return True
    return False


def move_gradient(parameter, old_view, Bucket bucket not None, Py_ssize_t position):
    """Point a gradient that lives in `old_view` to its new place. Not collective."""
    if parameter.grad is not None and is_at(parameter.grad, old_view):
        with torch.no_grad():
            bucket.views[position].copy_(parameter.grad)
        parameter.grad = bucket.tensor_at(position)
