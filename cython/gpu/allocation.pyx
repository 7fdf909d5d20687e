"""GPU memory straight from the runtime, as tensors: what MPI can hand to other processes.

With expandable segments, torch's own memory is mapped piece by piece, and CUDA IPC, by which MPI
reaches the memory of another rank of the node, refuses it.
"""

import os

import torch

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t

from mpiddp.gpu.runtime cimport Runtime, check_gpu, enter_gpu, leave_gpu
from mpiddp.system.posix cimport getpid


# The structs of DLPack 0.x, which torch reads.
cdef struct DLDevice:
    int32_t device_type
    int32_t device_id


cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes


cdef struct DLTensor:
    void *data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset


cdef struct DLManagedTensor:
    DLTensor dl_tensor
    void *manager_ctx
    void (*deleter)(DLManagedTensor *) noexcept with gil


cdef struct Exported:
    DLManagedTensor tensor  # first: DLPack's pointer is a pointer to this
    int64_t shape[1]


cdef enum:
    DEVICE_TYPE_CPU = 1
    DEVICE_TYPE_CUDA = 2
    DEVICE_TYPE_ROCM = 10
    CODE_UINT = 1


cdef void release(DLManagedTensor *tensor) noexcept with gil:
    # Called when torch drops the last tensor on the memory, on any thread.
    Py_DECREF(<object>tensor.manager_ctx)
    PyMem_Free(tensor)


cdef void drop_unused(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, "dltensor"):
        release(<DLManagedTensor *>PyCapsule_GetPointer(capsule, "dltensor"))


@cython.no_gc_clear
cdef class Allocation:
    """Memory of one GPU, given back when the last tensor on it is gone.

    Not collective.

    Args:
        runtime: of the device.
        device: its index.
        size: in bytes.

    Raises:
        GpuError: there is not enough memory.
    """

    def __init__(self, Runtime runtime not None, int device, size_t size):
        cdef int before = device
        cdef int code
        self.runtime = runtime
        self.device = device
        self.size = size
        code = enter_gpu(&runtime.functions, device, &before)
        check_gpu(runtime, code, "SetDevice", device)
        code = runtime.functions.malloc(&self.memory, max(size, <size_t>1))
        leave_gpu(&runtime.functions, device, before)
        check_gpu(runtime, code, "Malloc", device)

    def __dealloc__(self):
        cdef int before = self.device
        if self.memory != NULL and self.runtime.process_id == getpid():
            enter_gpu(&self.runtime.functions, self.device, &before)
            self.runtime.functions.free(self.memory)
            leave_gpu(&self.runtime.functions, self.device, before)

    @property
    def address(self):
        """Where it begins."""
        return <size_t>self.memory

    def as_tensor(self, device_type):
        """Return a 1-D uint8 tensor on this memory, which it keeps alive. Not collective.

        Args:
            device_type: of the tensor, as in `torch.device.type`.
        """
        cdef Exported *exported = <Exported *>PyMem_Malloc(sizeof(Exported))
        cdef DLTensor *tensor
        if exported == NULL:
            raise MemoryError
        exported.shape[0] = <int64_t>self.size
        tensor = &exported.tensor.dl_tensor
        tensor.data = self.memory
        tensor.device.device_id = 0 if device_type == "cpu" else self.device
        tensor.device.device_type = (
            DEVICE_TYPE_CPU if device_type == "cpu"
            else DEVICE_TYPE_ROCM if self.runtime.prefix == "hip"
            else DEVICE_TYPE_CUDA
        )
        tensor.ndim = 1
        tensor.dtype.code = CODE_UINT
        tensor.dtype.bits = 8
        tensor.dtype.lanes = 1
        tensor.shape = exported.shape
        tensor.strides = NULL
        tensor.byte_offset = 0
        exported.tensor.manager_ctx = <void *>self
        exported.tensor.deleter = release
        Py_INCREF(self)
        capsule = PyCapsule_New(&exported.tensor, "dltensor", drop_unused)
        return torch.from_dlpack(capsule)


def has_expandable_segments():
    """Return whether torch was told to map its memory piece by piece. Not collective."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        for setting in os.environ.get(name, "").split(","):
            key, _, value = setting.partition(":")
            if key.strip() == "expandable_segments" and value.strip().lower() == "true":
                return True
    return False


def zeros(Runtime runtime not None, device, size_t size):
    """Return a 1-D uint8 tensor of zeros that MPI can hand to other processes.

    Not collective.

    Args:
        runtime: of the device.
        device: a `torch.device`.
        size: in bytes.

    Raises:
        GpuError: there is not enough memory.
        torch.OutOfMemoryError: likewise.
    """
    if not has_expandable_segments():
        return torch.zeros(size, dtype=torch.uint8, device=device)
    tensor = Allocation(runtime, runtime.index_of(device), size).as_tensor(device.type)
    return tensor.zero_()
