"""The GPU runtime, CUDA's or HIP's, as a table of C functions that are looked up when needed.

Nothing is linked, and no header of either is compiled: the same build works without a GPU.

Note [Which runtime]
~~~~~~~~~~~~~~~~~~~~
Streams and events mean something only to the library that made them, and a process may have loaded
several. So the functions are looked up from torch's own library for the device, whose
dependencies lead to the runtime that it is linked to.

Note [Current devices]
~~~~~~~~~~~~~~~~~~~~~~
A thread has one current device, and a call on a thread that has never chosen one makes a context
on device 0: hundreds of megabytes there for each rank of the node. So threads of this package
choose their device before anything else (`enter_gpu`) and keep it; other threads get back the one
that they had (`leave_gpu`).

Note [Not ready is not an error]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An event that has not passed makes `cudaEventQuery` return a code that the runtime also keeps as
the thread's last error. torch looks at that error after each kernel, so it is cleared at once.
"""

cimport cython

import torch

from mpiddp.mpi.calls cimport mpi
from mpiddp.system.posix cimport getpid


cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *, int)
    void *dlsym(void *, const char *)
    char *dlerror()
    const int RTLD_NOW
    const int RTLD_LOCAL


cdef enum:
    # The same numbers in CUDA and HIP.
    EVENT_DISABLE_TIMING = 2
    STREAM_NON_BLOCKING = 1
    HOST_REGISTER_PORTABLE = 1


# torch's library for devices of type "cuda", which stands for ROCm as well.
_LIBRARIES = {"cuda": "libc10_cuda.so", "hip": "libc10_hip.so"}

_registered = {}


class GpuError(RuntimeError):
    """A call of the GPU's runtime failed.

    Attributes:
        code: the runtime's error code.
        call: the name of the function.
        rank: this process's rank in the world, -1 when unknown.
        device: index of the device.
    """

    def __init__(self, message: str, code: int = 0, call: str = "", rank: int = -1,
                 device: int = -1) -> None:
        super().__init__(message)
        self.code = code
        self.call = call
        self.rank = rank
        self.device = device


cdef object gpu_error(Runtime runtime, int code, str call, int device):
    cdef int rank = -1
    cdef int initialized = 0
    cdef int finalized = 0
    mpi.initialized(&initialized)
    mpi.finalized(&finalized)
    if initialized and not finalized:
        mpi.comm_rank(mpi.comm_world, &rank)
    call = runtime.prefix + call
    name = runtime.functions.get_error_name(code).decode(errors="replace")
    text = runtime.functions.get_error_string(code).decode(errors="replace")
    return GpuError(
        f"{call} failed on world rank {rank}, device {device}: {name} ({code}): {text}",
        code, call, rank, device,
    )


cdef int check_gpu(Runtime runtime, int code, const char *call, int device) except -1 nogil:
    if code == GPU_READY:
        return 0
    runtime.functions.get_last_error()
    with gil:
        raise gpu_error(runtime, code, call.decode(), device)


cdef int event_passed(GpuFunctions *functions, void *event) noexcept nogil:
    cdef int code = functions.event_query(event)
    if code == GPU_READY:
        return 1
    functions.get_last_error()
    return 0 if code == GPU_NOT_READY else -code


cdef int enter_gpu(GpuFunctions *functions, int device, int *before) noexcept nogil:
    cdef int code = functions.get_device(before)
    if code == GPU_READY and before[0] != device:
        code = functions.set_device(device)
    return code


cdef void leave_gpu(GpuFunctions *functions, int device, int before) noexcept nogil:
    if before != device:
        functions.set_device(before)


cdef class Runtime:
    """The functions of one GPU runtime that is loaded into this process.

    Not collective.

    Args:
        library: path of a library that has the functions or depends on one that has them. It is
            never unloaded.
        prefix: of their names: "cuda" or "hip".

    Raises:
        OSError: the library cannot be loaded, or lacks some of them.
    """

    def __init__(self, str library, str prefix="cuda"):
        self.process_id = getpid()
        self.library = library
        self.prefix = prefix
        self.handle = dlopen(library.encode(), RTLD_NOW | RTLD_LOCAL)
        if self.handle == NULL:
            raise OSError(f"cannot load {library}: {dlerror().decode(errors='replace')}")
        functions = &self.functions
        functions.memcpy_async = <int (*)(
            void *, const void *, size_t, int, void *) noexcept nogil>self.find("MemcpyAsync")
        functions.event_create = <int (*)(
            void **, unsigned int) noexcept nogil>self.find("EventCreateWithFlags")
        functions.event_record = <int (*)(void *, void *) noexcept nogil>self.find("EventRecord")
        functions.event_query = <int (*)(void *) noexcept nogil>self.find("EventQuery")
        functions.event_synchronize = <int (*)(void *) noexcept nogil>self.find("EventSynchronize")
        functions.event_destroy = <int (*)(void *) noexcept nogil>self.find("EventDestroy")
        functions.stream_create = <int (*)(
            void **, unsigned int) noexcept nogil>self.find("StreamCreateWithFlags")
        functions.stream_synchronize = <int (*)(
            void *) noexcept nogil>self.find("StreamSynchronize")
        functions.stream_destroy = <int (*)(void *) noexcept nogil>self.find("StreamDestroy")
        functions.stream_wait_event = <int (*)(
            void *, void *, unsigned int) noexcept nogil>self.find("StreamWaitEvent")
        functions.host_register = <int (*)(
            void *, size_t, unsigned int) noexcept nogil>self.find("HostRegister")
        functions.host_unregister = <int (*)(void *) noexcept nogil>self.find("HostUnregister")
        functions.malloc = <int (*)(void **, size_t) noexcept nogil>self.find("Malloc")
        functions.free = <int (*)(void *) noexcept nogil>self.find("Free")
        functions.set_device = <int (*)(int) noexcept nogil>self.find("SetDevice")
        functions.get_device = <int (*)(int *) noexcept nogil>self.find("GetDevice")
        functions.get_last_error = <int (*)() noexcept nogil>self.find("GetLastError")
        functions.get_error_name = <const char *(*)(int) noexcept nogil>self.find("GetErrorName")
        functions.get_error_string = <const char *(*)(
            int) noexcept nogil>self.find("GetErrorString")

    cdef void *find(self, str name) except NULL:
        cdef void *function = dlsym(self.handle, (self.prefix + name).encode())
        if function == NULL:
            raise OSError(f"{self.library} has no {self.prefix}{name}")
        return function

    def current_stream(self, device):
        """Return the handle of the stream that torch launches on in this thread.

        Not collective.
        """
        return torch.cuda.current_stream(device).cuda_stream

    def index_of(self, device):
        """Return the index of a `torch.device`: its own, else that of the current device."""
        return self.current_device if device.index is None else device.index

    @property
    def current_device(self):
        """Index of the calling thread's current device."""
        cdef int device = -1
        check_gpu(self, self.functions.get_device(&device), "GetDevice", -1)
        return device

    def copy_async(self, size_t to, size_t source, size_t size, int kind, size_t stream):
        """Copy bytes, in order of the stream. Not collective.

        Args:
            to: address.
            source: address.
            size: in bytes.
            kind: COPY_TO_GPU, COPY_TO_HOST or COPY_ON_GPU.
            stream: handle.

        Raises:
            GpuError: the runtime refuses.
        """
        cdef int code
        with nogil:
            code = self.functions.memcpy_async(
                <void *>to, <void *>source, size, kind, <void *>stream)
        check_gpu(self, code, "MemcpyAsync", self.current_device if code else -1)

    def stream_wait_event(self, size_t stream, Event event not None):
        """Make later work on the stream wait for the event. Not collective."""
        cdef int code
        with nogil:
            code = self.functions.stream_wait_event(<void *>stream, event.handle, 0)
        check_gpu(self, code, "StreamWaitEvent", event.device)

    def host_register(self, size_t address, size_t size):
        """Pin host memory, so that copies of it are asynchronous. Not collective."""
        cdef int code
        with nogil:
            code = self.functions.host_register(<void *>address, size, HOST_REGISTER_PORTABLE)
        check_gpu(self, code, "HostRegister", self.current_device if code else -1)

    def host_unregister(self, size_t address):
        """Undo `host_register`. Not collective."""
        cdef int code
        with nogil:
            code = self.functions.host_unregister(<void *>address)
        check_gpu(self, code, "HostUnregister", self.current_device if code else -1)


@cython.no_gc_clear
cdef class Stream:
    """A new stream, which does not wait for the default stream.

    Not collective. Work that is on it when the object goes away is still done.

    Args:
        runtime: of the device.
        device: its index.

    Raises:
        GpuError: the runtime refuses.
    """

    def __init__(self, Runtime runtime not None, int device):
        cdef int before = device
        cdef int code
        self.runtime = runtime
        self.device = device
        code = enter_gpu(&runtime.functions, device, &before)
        check_gpu(runtime, code, "SetDevice", device)
        code = runtime.functions.stream_create(&self.handle, STREAM_NON_BLOCKING)
        leave_gpu(&runtime.functions, device, before)
        check_gpu(runtime, code, "StreamCreateWithFlags", device)

    def __dealloc__(self):
        if self.handle != NULL and self.runtime.process_id == getpid():
            self.runtime.functions.stream_destroy(self.handle)

    def synchronize(self):
        """Wait until all work on the stream is over. Not collective."""
        cdef int code
        with nogil:
            code = self.runtime.functions.stream_synchronize(self.handle)
        check_gpu(self.runtime, code, "StreamSynchronize", self.device)

    @property
    def address(self):
        """The runtime's handle."""
        return <size_t>self.handle


@cython.no_gc_clear
cdef class Event:
    """A mark on a stream, without a time.

    Not collective.

    Args:
        runtime: of the device.
        device: its index.

    Raises:
        GpuError: the runtime refuses.
    """

    def __init__(self, Runtime runtime not None, int device):
        cdef int before = device
        cdef int code
        self.runtime = runtime
        self.device = device
        code = enter_gpu(&runtime.functions, device, &before)
        check_gpu(runtime, code, "SetDevice", device)
        code = runtime.functions.event_create(&self.handle, EVENT_DISABLE_TIMING)
        leave_gpu(&runtime.functions, device, before)
        check_gpu(runtime, code, "EventCreateWithFlags", device)

    def __dealloc__(self):
        if self.handle != NULL and self.runtime.process_id == getpid():
            self.runtime.functions.event_destroy(self.handle)

    def record(self, size_t stream):
        """Put the mark behind all work that is on the stream now. Not collective."""
        cdef int code
        with nogil:
            code = self.runtime.functions.event_record(self.handle, <void *>stream)
        check_gpu(self.runtime, code, "EventRecord", self.device)

    def query(self):
        """Return whether the stream has come past the mark. Not collective."""
        cdef int passed = event_passed(&self.runtime.functions, self.handle)
        if passed < 0:
            check_gpu(self.runtime, -passed, "EventQuery", self.device)
        return bool(passed)

    def synchronize(self):
        """Wait until the stream has come past the mark. Not collective."""
        cdef int code
        with nogil:
            code = self.runtime.functions.event_synchronize(self.handle)
        check_gpu(self.runtime, code, "EventSynchronize", self.device)

    @property
    def address(self):
        """The runtime's handle."""
        return <size_t>self.handle


def register(str device_type not None, Runtime runtime):
    """Use a runtime for all devices of a type; return the one that was used before.

    Not collective.

    Args:
        device_type: as in `torch.device.type`.
        runtime: None to forget it.
    """
    before = _registered.pop(device_type, None)
    if runtime is not None:
        _registered[device_type] = runtime
    return before


def runtime_of(device):
    """Return the `Runtime` of a `torch.device`; None where there is none, as for the CPU.

    Not collective.

    Raises:
        OSError: torch's library for the device does not lead to its runtime.
    """
    found = _registered.get(device.type)
    if found is None and device.type == "cuda":
        torch.cuda.init()
        prefix = "hip" if torch.version.hip else "cuda"
        found = _registered["cuda"] = Runtime(_path_of(_LIBRARIES[prefix]), prefix)
    return found


def _path_of(name):
    """Return the path of a library that this process has loaded. Not collective."""
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip().partition("/")[2]
            if path.rpartition("/")[2] == name:
                return "/" + path
    raise OSError(f"{name} is not loaded: is this torch built for a GPU?")
