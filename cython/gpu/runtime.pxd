# The same numbers in CUDA and HIP.
cpdef enum:
    COPY_TO_GPU = 1
    COPY_TO_HOST = 2
    COPY_ON_GPU = 3

cdef enum:
    GPU_READY = 0
    GPU_NOT_READY = 600


cdef struct GpuFunctions:
    # What this package calls of CUDA's runtime, or HIP's: all return an error code, 0 for success.
    # `stream` and `event` are the runtime's own handles; stream NULL is the default stream.
    int (*memcpy_async)(
        void *to, const void *source, size_t size, int kind, void *stream) noexcept nogil
    int (*event_create)(void **event, unsigned int flags) noexcept nogil
    int (*event_record)(void *event, void *stream) noexcept nogil
    int (*event_query)(void *event) noexcept nogil
    int (*event_synchronize)(void *event) noexcept nogil
    int (*event_destroy)(void *event) noexcept nogil
    int (*stream_create)(void **stream, unsigned int flags) noexcept nogil
    int (*stream_synchronize)(void *stream) noexcept nogil
    int (*stream_destroy)(void *stream) noexcept nogil
    int (*stream_wait_event)(void *stream, void *event, unsigned int flags) noexcept nogil
    int (*host_register)(void *memory, size_t size, unsigned int flags) noexcept nogil
    int (*host_unregister)(void *memory) noexcept nogil
    int (*malloc)(void **memory, size_t size) noexcept nogil
    int (*free)(void *memory) noexcept nogil
    int (*set_device)(int device) noexcept nogil
    int (*get_device)(int *device) noexcept nogil
    int (*get_last_error)() noexcept nogil
    const char *(*get_error_name)(int code) noexcept nogil
    const char *(*get_error_string)(int code) noexcept nogil


cdef class Runtime:
    cdef GpuFunctions functions
    cdef readonly str prefix            # of the functions' names: "cuda", "hip"
    cdef readonly str library
    cdef void *handle
    cdef int process_id                 # forked children must leave the device alone

    cdef void *find(self, str name) except NULL


cdef class Stream:
    cdef readonly Runtime runtime
    cdef readonly int device            # its index
    cdef void *handle


cdef class Event:
    cdef readonly Runtime runtime
    cdef readonly int device
    cdef void *handle


# Raise a `GpuError` unless `code` is 0. `call` is the function's name without the prefix.
cdef int check_gpu(Runtime runtime, int code, const char *call, int device) except -1 nogil
cdef object gpu_error(Runtime runtime, int code, str call, int device)
# 1 if all work before the event is over, 0 if not, the runtime's error code negated if it fails.
cdef int event_passed(GpuFunctions *functions, void *event) noexcept nogil
# Make `device` the thread's current one; store the last one in `before`. Return an error code.
cdef int enter_gpu(GpuFunctions *functions, int device, int *before) noexcept nogil
cdef void leave_gpu(GpuFunctions *functions, int device, int before) noexcept nogil
