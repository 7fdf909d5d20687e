"""Read and set a parameter's gradient with torch's C functions, without a Python object for it.

Note [Gradients without Python objects]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each new gradient that Python looks at gets a Python object, which is half of what a hook
costs (1 of 2 us), only to be dropped for the view in the bucket. torch exports what is needed
to avoid that: the functions of its stable C interface (torch/csrc/inductor/aoti_torch/c/shim.h)
take a pointer to an at::Tensor, a Python tensor holds one behind its object header
(torch/csrc/autograd/python_variable.h), and c10::TensorImpl::grad gives that of the gradient.
Nothing is linked. The functions are looked up in the libraries that torch has loaded, and used
only if they are all there and agree with Python about some tensors. Otherwise, and for each
gradient that is not plain memory in the layout of its view, Python does it.
"""

from cpython.object cimport PyObject
from libc.stdint cimport int32_t, int64_t

import os

import torch


cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *, int)
    void *dlsym(void *, const char *)
    const int RTLD_NOW
    const int RTLD_NOLOAD

cdef extern from "<stdbool.h>":
    ctypedef bint c_bool "bool"


# A pointer to an at::Tensor, which is itself one pointer, to a c10::TensorImpl.
ctypedef void **Tensor
# Of the C interface: 0 is success.
ctypedef int32_t (*GetPointer)(Tensor, void **) noexcept nogil
ctypedef int32_t (*GetNumber)(Tensor, int32_t *) noexcept nogil
ctypedef int32_t (*GetSize)(Tensor, int64_t *) noexcept nogil
ctypedef int32_t (*GetSizes)(Tensor, int64_t **) noexcept nogil
ctypedef int32_t (*GetFlag)(Tensor, c_bool *) noexcept nogil
ctypedef int32_t (*GetConstant)() noexcept nogil
ctypedef int32_t (*Assign)(Tensor, Tensor) noexcept nogil
# Of C++: methods of c10::TensorImpl, and at::native::is_neg.
ctypedef Tensor (*Gradient)(void *) noexcept nogil
ctypedef c_bool (*IsNegated)(Tensor) noexcept nogil


cdef struct Functions:
    GetPointer data_ptr
    GetNumber dtype
    GetNumber layout
    GetNumber device_type
    GetSize dim
    GetSize numel
    GetSizes sizes
    GetSizes strides
    GetFlag is_defined
    GetFlag is_contiguous
    Assign assign
    Gradient grad
    Gradient mutable_grad
    IsNegated is_neg


cdef Functions functions
cdef Py_ssize_t tensor_offset       # of the at::Tensor in a Python tensor
cdef int32_t strided
cdef int32_t host
# By torch's number for a dtype, the bytes of an element; 0 for what is not plain.
cdef unsigned char widths[64]
cdef bint usable = False
cdef bint memory_known = False        # whether `dense_memory` may be asked
cdef bint in_python = False


cdef bint gradients_are_within_reach() noexcept:
    return usable and not in_python


cdef Tensor tensor_in(PyObject *tensor) noexcept:
    return <Tensor>(<char *>tensor + tensor_offset)


cdef int dtype_code(object tensor) noexcept:
    """Return torch's number for a tensor's dtype, -1 if it is out of reach."""
    cdef int32_t code = -1
    if usable:
        functions.dtype(tensor_in(<PyObject *>tensor), &code)
    return code


cdef bint has_gradient(object parameter) except -1:
    """Whether ``parameter.grad`` is not None."""
    cdef c_bool defined = False
    if not gradients_are_within_reach():
        return parameter.grad is not None
    functions.is_defined(functions.grad(tensor_in(<PyObject *>parameter)[0]), &defined)
    return defined


cdef char *gradient_address(object parameter) except? NULL:
    """Return the address of a dense gradient's elements in whatever order, NULL without one."""
    cdef Tensor gradient
    cdef c_bool defined = False
    cdef int32_t layout = -1
    cdef void *address = NULL
    if gradients_are_within_reach():
        gradient = functions.grad(tensor_in(<PyObject *>parameter)[0])
        if functions.is_defined(gradient, &defined) or not defined:
            return NULL
        if functions.layout(gradient, &layout) or layout != strided:
            return NULL
        functions.data_ptr(gradient, &address)
    elif parameter.grad is not None and parameter.grad.layout is torch.strided:
        address = <void *><size_t>parameter.grad.data_ptr()
    return <char *>address


cdef char *plain_gradient(
    object parameter, object view, int dtype, bint contiguous
) noexcept:
    """Return where the gradient's elements are, NULL if there are none or Python must look.

    They have `dtype` (torch's number) and the shape of `view`, and lie as its elements do: one
    behind the other if `contiguous`.
    """
    return plain_elements(
        functions.grad(tensor_in(<PyObject *>parameter)[0]), view, dtype, contiguous)


cdef char *plain_tensor(object tensor, object view, int dtype, bint contiguous) noexcept:
    """Return what `plain_gradient` does, but for a tensor itself."""
    return plain_elements(tensor_in(<PyObject *>tensor), view, dtype, contiguous)


cdef char *plain_elements(Tensor gradient, object view, int dtype, bint contiguous) noexcept:
    cdef void *address = NULL
    cdef c_bool flag = False
    cdef int32_t number = -1
    if functions.is_defined(gradient, &flag) or not flag:
        return NULL
    if functions.dtype(gradient, &number) or number != dtype:
        return NULL
    if functions.layout(gradient, &number) or number != strided:
        return NULL
    if not same_layout(gradient, tensor_in(<PyObject *>view), contiguous):
        return NULL
    if functions.is_neg(gradient) or functions.data_ptr(gradient, &address):
        return NULL
    return <char *>address


cdef char *dense_memory(object tensor, int *dtype, size_t *size) noexcept:
    """Return where a tensor's elements are, one behind the other; NULL if Python must look.

    Complex tensors are none of these, since they may be conjugates, nor are empty ones.

    Args:
        tensor: a torch.Tensor.
        dtype: torch's number for it.
        size: in bytes.
    """
    cdef Tensor pointer = tensor_in(<PyObject *>tensor)
    cdef void *address = NULL
    cdef c_bool flag = False
    cdef int32_t number = -1
    cdef int64_t elements = 0
    if not memory_known or in_python:
        return NULL
    if functions.device_type(pointer, &number) or number != host:
        return NULL
    if functions.layout(pointer, &number) or number != strided:
        return NULL
    if functions.is_contiguous(pointer, &flag) or not flag or functions.is_neg(pointer):
        return NULL
    if functions.dtype(pointer, &number) or not 0 <= number < 64 or not widths[number]:
        return NULL
    if functions.numel(pointer, &elements) or functions.data_ptr(pointer, &address):
        return NULL
    dtype[0] = number
    size[0] = <size_t>elements * widths[number]
    return <char *>address if elements else NULL


cdef bint same_layout(Tensor gradient, Tensor view, bint contiguous) noexcept:
    cdef int64_t dimensions = -1, others = -1
    cdef int64_t *sizes = NULL
    cdef int64_t *other_sizes = NULL
    cdef int64_t *ours = NULL
    cdef int64_t *theirs = NULL
    cdef c_bool flag = False
    cdef Py_ssize_t dimension
    if functions.dim(view, &dimensions) or functions.dim(gradient, &others):
        return False
    if functions.sizes(view, &sizes) or functions.sizes(gradient, &other_sizes):
        return False
    if dimensions != others:
        return False
    for dimension in range(dimensions):
        if sizes[dimension] != other_sizes[dimension]:
            return False
    if contiguous:
        return functions.is_contiguous(gradient, &flag) == 0 and flag
    if functions.strides(view, &ours) or functions.strides(gradient, &theirs):
        return False
    for dimension in range(dimensions):
        if sizes[dimension] != 1 and ours[dimension] != theirs[dimension]:
            return False
    return True


cdef int point_gradient(object parameter, object view) except -1:
    """Let ``parameter.grad`` be `view`, of the same shape, dtype and device."""
    cdef Tensor gradient = functions.mutable_grad(tensor_in(<PyObject *>parameter)[0])
    if functions.assign(tensor_in(<PyObject *>view), gradient):
        raise RuntimeError("torch cannot point a parameter's gradient to its bucket")
    return 0


def within_reach():
    """Return whether gradients are read and set without Python. Not collective."""
    return gradients_are_within_reach()


def stay_in_python(bint value):
    """Have all gradients read and set by Python from now on, or not. For tests. Not collective."""
    global in_python
    in_python = value


cdef void *find(void *library, const char *name) except NULL:
    cdef void *function = NULL
    if library != NULL:
        function = dlsym(library, name)
    if function == NULL:
        raise LookupError(name.decode())
    return function


cdef void *open_loaded(str name) except? NULL:
    path = os.fsencode(os.path.join(os.path.dirname(torch.__file__), "lib", name))
    return dlopen(path, RTLD_NOW | RTLD_NOLOAD)


cdef _find_functions():
    cdef void *core = open_loaded("libc10.so")
    cdef void *torch_library = open_loaded("libtorch_cpu.so")
    functions.data_ptr = <GetPointer>find(torch_library, "aoti_torch_get_data_ptr")
    functions.dtype = <GetNumber>find(torch_library, "aoti_torch_get_dtype")
    functions.layout = <GetNumber>find(torch_library, "aoti_torch_get_layout")
    functions.dim = <GetSize>find(torch_library, "aoti_torch_get_dim")
    functions.sizes = <GetSizes>find(torch_library, "aoti_torch_get_sizes")
    functions.strides = <GetSizes>find(torch_library, "aoti_torch_get_strides")
    functions.is_defined = <GetFlag>find(torch_library, "aoti_torch_is_defined")
    functions.is_contiguous = <GetFlag>find(torch_library, "aoti_torch_is_contiguous")
    functions.assign = <Assign>find(torch_library, "aoti_torch_assign_tensors")
    functions.is_neg = <IsNegated>find(torch_library, "_ZN2at6native6is_negERKNS_6TensorE")
    functions.grad = <Gradient>find(core, "_ZNK3c1010TensorImpl4gradEv")
    functions.mutable_grad = <Gradient>find(core, "_ZN3c1010TensorImpl12mutable_gradEv")


# What `dense_memory` takes.
PLAIN_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
)


cdef _find_functions_of_memory():
    global host
    cdef void *torch_library = open_loaded("libtorch_cpu.so")
    functions.device_type = <GetNumber>find(torch_library, "aoti_torch_get_device_type")
    functions.numel = <GetSize>find(torch_library, "aoti_torch_get_numel")
    host = (<GetConstant>find(torch_library, "aoti_torch_device_type_cpu"))()
    for dtype in PLAIN_DTYPES:
        code = dtype_code(torch.zeros(1, dtype=dtype))
        if 0 <= code < 64:
            widths[code] = dtype.itemsize


def code_of(dtype):
    """Return torch's number for a dtype, -1 if it is out of reach. Not collective."""
    return dtype_code(torch.zeros(1, dtype=dtype, device="cpu"))


cdef bint _find_offset(tensor) except -1:
    """Return whether the pointer in ``_cdata`` is right behind the object header."""
    global tensor_offset
    tensor_offset = sizeof(PyObject)
    return <size_t>tensor_in(<PyObject *>tensor)[0] == <size_t>tensor._cdata


cdef bint _agrees_with_python() except -1:
    """Whether the functions used here agree with Python on some tensors."""
    global strided, usable
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    view = torch.zeros(2, 3)
    other = torch.ones(2, 3)
    if not (_find_offset(parameter) and _find_offset(view)):
        return False
    if functions.layout(tensor_in(<PyObject *>view), &strided):
        return False
    usable = True
    code = dtype_code(view)
    if code == dtype_code(view.double()):
        return False
    if plain_gradient(parameter, view, code, True) != NULL:
        return False
    parameter.grad = other
    if <size_t>plain_gradient(parameter, view, code, True) != <size_t>other.data_ptr():
        return False
    if <size_t>plain_gradient(parameter, view, code, False) != <size_t>other.data_ptr():
        return False
    # What is not plain: another layout in memory, a deferred negation, another shape.
    for unlike in (
        torch.zeros(3, 2).t(),
        torch._neg_view(torch.zeros(2, 3)),
        torch.zeros(3, 2),
        torch.zeros(6),
    ):
        for contiguous in (True, False):
            if plain_tensor(unlike, view, code, contiguous) != NULL:
                return False
    point_gradient(parameter, view)
    return parameter.grad is view


cdef bint _knows_memory() except -1:
    """Whether `dense_memory` agrees with Python on some tensors."""
    global memory_known
    cdef int dtype = -1
    cdef size_t size = 0
    _find_functions_of_memory()
    memory_known = True
    whole = torch.zeros(3, 4, dtype=torch.int16)
    if <size_t>dense_memory(whole[1:], &dtype, &size) != <size_t>whole[1:].data_ptr():
        return False
    if size != 16 or dtype != dtype_code(whole):
        return False
    for unlike in (whole.t(), whole[:0], torch._neg_view(torch.zeros(2)), torch.zeros(2).to("meta"),
                   torch.zeros(2, dtype=torch.complex64), torch.zeros(2).to_sparse()):
        if dense_memory(unlike, &dtype, &size) != NULL:
            return False
    return True


def _load():
    """Find out whether gradients are within reach."""
    global memory_known, usable
    try:
        _find_functions()
        usable = _agrees_with_python()
    except LookupError:
        usable = False
    try:
        memory_known = usable and _knows_memory()
    except LookupError:
        memory_known = False


with torch.device("cpu"):   # whatever device the user's new tensors are on
    _load()
