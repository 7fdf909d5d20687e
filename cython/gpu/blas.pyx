"""Sums of vectors on a GPU without the GIL: the axpy of cuBLAS or rocBLAS.

torch has loaded one of them; nothing is linked. 16-bit elements are added in float32, and each
sum is rounded to 16 bits.
"""

cimport cython

from mpiddp.gpu.runtime cimport GPU_READY, Runtime, Stream, enter_gpu, leave_gpu
from mpiddp.system.kernels cimport ELEMENT_FLOAT32, ELEMENT_FLOAT64, ElementType
from mpiddp.system.posix cimport getpid
from mpiddp.gpu.runtime import GpuError


cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *, int)
    void *dlsym(void *, const char *)
    char *dlerror()
    const int RTLD_NOW
    const int RTLD_LOCAL


# torch's library for the GPU leads to the BLAS library that it is linked to.
_LIBRARIES = {"cuda": "libtorch_cuda.so", "hip": "libtorch_hip.so"}
_NAMES = {
    "cuda": ("cublasCreate_v2", "cublasDestroy_v2", "cublasSetStream_v2", "cublasAxpyEx"),
    "hip": (
        "rocblas_create_handle", "rocblas_destroy_handle", "rocblas_set_stream",
        "rocblas_axpy_ex",
    ),
}

# cudaDataType and rocblas_datatype, by ElementType. Both libraries take a factor of float32 with
# 16-bit vectors, and compute in float32 then.
cdef int[4] CUBLAS_TYPES
CUBLAS_TYPES[:] = [0, 1, 2, 14]
cdef int[4] ROCBLAS_TYPES
ROCBLAS_TYPES[:] = [151, 152, 150, 168]

cdef float ONE = 1.0
cdef double ONE_DOUBLE = 1.0


cdef int add(
    GpuSums *sums, ElementType element, void *to, const void *source, size_t count
) noexcept nogil:
    cdef int *types = &ROCBLAS_TYPES[0] if sums.runs_rocm else &CUBLAS_TYPES[0]
    cdef int wide = types[<int>(
        ELEMENT_FLOAT64 if element == ELEMENT_FLOAT64 else ELEMENT_FLOAT32
    )]
    cdef const void *factor = (
        <const void *>&ONE_DOUBLE if element == ELEMENT_FLOAT64 else <const void *>&ONE
    )
    cdef int own = types[<int>element]
    return sums.axpy(
        sums.handle, <int>count, factor, wide, source, own, 1, to, own, 1, wide
    )


cdef const char *axpy_name(GpuSums *sums) noexcept nogil:
    return "rocblas_axpy_ex" if sums.runs_rocm else "cublasAxpyEx"


@cython.no_gc_clear
cdef class Adder:
    """Adds vectors on one GPU, on a stream of its own.

    Not collective.

    Args:
        runtime: of the device.
        device: its index.

    Raises:
        OSError: no BLAS library of this runtime is loaded.
        GpuError: the library refuses.
    """

    def __init__(self, Runtime runtime not None, int device):
        cdef Stream stream = Stream(runtime, device)
        cdef int before = device
        cdef int code
        cdef str call
        self.runtime = runtime
        self.device = device
        self.stream = stream
        self.library = _library_of(runtime)
        self.loaded = dlopen(self.library.encode(), RTLD_NOW | RTLD_LOCAL)
        if self.loaded == NULL:
            raise OSError(f"cannot load {self.library}: {dlerror().decode(errors='replace')}")
        names = _NAMES[runtime.prefix]
        sums = &self.sums
        sums.runs_rocm = runtime.prefix == "hip"
        sums.stream = stream.handle
        sums.create = <int (*)(void **) noexcept nogil>self.find(names[0])
        sums.destroy = <int (*)(void *) noexcept nogil>self.find(names[1])
        sums.set_stream = <int (*)(void *, void *) noexcept nogil>self.find(names[2])
        sums.axpy = <int (*)(
            void *, int, const void *, int, const void *, int, int, void *, int, int, int,
        ) noexcept nogil>self.find(names[3])
        enter_gpu(&runtime.functions, device, &before)
        call = names[0]
        code = sums.create(&sums.handle)
        if code == GPU_READY:
            call = names[2]
            code = sums.set_stream(sums.handle, stream.handle)
        leave_gpu(&runtime.functions, device, before)
        if code != GPU_READY:
            raise GpuError(
                f"{call} failed on device {device} with status {code}", code, call, -1, device
            )

    def __dealloc__(self):
        cdef int before = self.device
        if self.sums.handle != NULL and self.runtime.process_id == getpid():
            enter_gpu(&self.runtime.functions, self.device, &before)
            self.sums.destroy(self.sums.handle)
            leave_gpu(&self.runtime.functions, self.device, before)

    cdef void *find(self, str name) except NULL:
        cdef void *function = dlsym(self.loaded, name.encode())
        if function == NULL:
            raise OSError(f"{self.library} leads to no {name}")
        return function

    def add(self, int element, size_t to, size_t source, size_t count):
        """Add elements to others, in order of the stream. Not collective.

        Args:
            element: an ElementType: 0 float32, 1 float64, 2 float16, 3 bfloat16.
            to: address.
            source: address.
            count: of elements.

        Raises:
            GpuError: the library refuses.
        """
        cdef int before = self.device
        cdef int code
        enter_gpu(&self.runtime.functions, self.device, &before)
        code = add(&self.sums, <ElementType>element, <void *>to, <const void *>source, count)
        leave_gpu(&self.runtime.functions, self.device, before)
        if code != GPU_READY:
            call = axpy_name(&self.sums).decode()
            raise GpuError(
                f"{call} failed on device {self.device} with status {code}", code, call, -1,
                self.device,
            )


def _library_of(Runtime runtime):
    """Return the path of a loaded library that leads to the BLAS library of a runtime."""
    cdef bytes wanted = _NAMES[runtime.prefix][3].encode()
    if dlsym(runtime.handle, wanted) != NULL:
        return runtime.library
    name = _LIBRARIES[runtime.prefix]
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip().partition("/")[2]
            if path.rpartition("/")[2] == name:
                return "/" + path
    raise OSError(f"{name} is not loaded: is this torch built for a GPU?")
