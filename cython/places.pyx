"""Where in its bucket a gradient has its place, and how it gets in and out.

Where a gradient and its place have their elements in the same order, it is a copy of
memory, converting if the bucket does; else torch copies.
"""

from libc.string cimport memcpy

import torch

from mpiddp.bucket cimport Bucket
from mpiddp.torch_tensors cimport (
    dtype_code,
    gradients_are_within_reach,
    hold_gradient,
    let_go,
    plain_gradient,
    point_gradient,
)


cdef enum:
    # Copies below this size are over before the GIL could be handed on.
    RELEASE_GIL_BYTES = 1 << 16


cdef int find_place(Place *place, Bucket bucket, Py_ssize_t position) except -1:
    """Describe the place of the bucket's gradient number `position`."""
    view = bucket.views[position]
    place.address = bucket.view_address(position)
    place.bytes = view.numel() * view.element_size()
    if view.is_complex():
        # A lazily conjugated gradient must not be copied by memcpy.
        place.layout = LAYOUT_GENERAL
    elif view.is_contiguous():
        place.layout = LAYOUT_CONTIGUOUS
    else:
        place.layout = LAYOUT_STRIDED
    place.within_reach = (
        gradients_are_within_reach() and place.layout != LAYOUT_GENERAL
        and place.bytes and not bucket.converts and not bucket.on_device
    )
    place.dtype = dtype_code(view)
    return 0


cdef char *copy_to_place(
    Place *place, Bucket bucket, Py_ssize_t position, object gradient
) except? NULL:
    """Copy a gradient to its place; return the address that `copy_from_place` wants.

    That is the place's own where the gradient lies there already.
    """
    cdef char *address = <char *><size_t>gradient.data_ptr()
    cdef bint plain
    if address == place.address and place.bytes:
        return address
    if address == NULL:
        plain = False           # zeros that torch has not written out
    elif place.layout == LAYOUT_CONTIGUOUS:
        plain = gradient.is_contiguous()
    elif place.layout == LAYOUT_STRIDED:
        plain = _same_layout(gradient, bucket.views[position])
    else:
        plain = False
    if not plain or gradient.is_neg():     # a negation that torch has put off
        with torch.no_grad():
            bucket.views[position].copy_(gradient)
        return NULL
    if bucket.converts:
        bucket.narrow(place.address, address, place.bytes)
    else:
        _copy(place.address, address, place.bytes)
    return address


cdef int copy_from_place(
    Place *place, Bucket bucket, Py_ssize_t position, char *address, object gradient
) except -1:
    """Copy what is in the place to `gradient`, by its `address` if it is not NULL."""
    if address == NULL:
        with torch.no_grad():
            gradient.copy_(bucket.views[position])
    elif bucket.converts:
        bucket.widen(address, place.address, place.bytes)
    else:
        _copy(address, place.address, place.bytes)
    return 0


cdef char *bring_plain(
    Place *place, Bucket bucket, Py_ssize_t position, object parameter, void **held
) except? NULL:
    """Copy the gradient of `parameter` to its place, see Note [Gradients without Python objects].

    If `held` is NULL, ``parameter.grad`` is the view there afterwards, else `held` keeps the
    gradient until `let_go`.

    Returns:
        What `copy_to_place` does; NULL if nothing was done and Python must look.
    """
    view = bucket.views[position]
    cdef char *address = plain_gradient(
        parameter, view, place.dtype, place.layout == LAYOUT_CONTIGUOUS)
    if address == NULL or address == place.address:
        return address
    if held != NULL:
        let_go(held)
        held[0] = hold_gradient(parameter)
    _copy(place.address, address, place.bytes)
    if held == NULL:
        point_gradient(parameter, view)
    return address


cdef int _copy(char *to, const char *from_, size_t bytes_) except -1:
    if bytes_ < RELEASE_GIL_BYTES:
        memcpy(to, from_, bytes_)
    else:
        with nogil:
            memcpy(to, from_, bytes_)
    return 0


def views_by_parameter(buckets):
    """Return the view of each parameter that has one in `buckets`, by index. Not collective."""
    return {
        index: view
        for bucket in buckets or ()
        for index, view in zip(bucket.parameter_indices, bucket.views)
    }


def move_gradient(parameter, old_view, view):
    """Point a gradient that lives in `old_view` to its new place. Not collective."""
    if parameter.grad is not None and parameter.grad.data_ptr() == old_view.data_ptr():
        with torch.no_grad():
            view.copy_(parameter.grad)
        parameter.grad = view


def _same_layout(gradient, view):
    """Whether two tensors of one shape have their elements at the same offsets."""
    for size, ours, theirs in zip(view.size(), view.stride(), gradient.stride()):
        if size != 1 and ours != theirs:
            return False
    return True
