"""What this process did last, in a page of memory that other processes of the node can read.

Note [A page for others]
~~~~~~~~~~~~~~~~~~~~~~~~
A rank that is stopped, or that holds the GIL, answers no question. So each keeps the last operation
and the last bucket in a memfd, which the others map when a world begins (process_group's
node_states.py); they read it even after it has died. It is written beside the record in the ring,
see Note [Records]: some numbers, and words only where they are not those of the operation before.
Nothing is locked. `writes` is odd while a thread that has the GIL writes: whoever finds the same
even number before and after it has read, has read what belongs together. `left`, and the time at
which an operation or a bucket ends, may change meanwhile: each is one store. `mpiddp top` looks at
ranks that run, and reads again. Ranks of the node read pages of ranks that are stuck, and once.

It also counts operations and, of each wrapped module, steps (Note [Two marks]). `mpiddp top` has no
compiled code of ours: it finds its way by `layout`, which each rank's sign tells it.

Note [Two marks]
~~~~~~~~~~~~~~~~
Who looks once must be told how fast a rank is, now and not since its start. So each 32nd count is
noted with its time, and the one before is kept: since that one there were 32 to 63 counts.
"""

from cpython.ref cimport PyObject
from libc.string cimport memcpy, memset

import mmap
import os
from collections import namedtuple

from mpiddp.engine.interface cimport JobRecord
from mpiddp.system.posix cimport put_id, put_time
from mpiddp.flight_recorder.call_text import describe_dtype, describe_call
from mpiddp.system import memory_files


cdef extern from "Python.h":
    const char *PyUnicode_AsUTF8AndSize(PyObject *, Py_ssize_t *) except NULL
    void release "Py_XDECREF" (void *)
    void retain "Py_XINCREF" (void *)


cdef extern from "<string.h>":
    size_t strnlen(const char *, size_t)


cdef extern from *:
    """
    /* A writer that has raised between the two has left an odd number. */
    static inline void mpiddp_begin_writing(unsigned long long *writes)
    {
        __atomic_store_n(writes, *writes | 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE);
    }
    static inline void mpiddp_end_writing(unsigned long long *writes)
    { __atomic_store_n(writes, (*writes | 1) + 1, __ATOMIC_RELEASE); }
    """
    void begin_writing "mpiddp_begin_writing"(unsigned long long *) noexcept
    void end_writing "mpiddp_end_writing"(unsigned long long *) noexcept


cdef enum:
    MOST_BYTES = 48
    MOST_DIMENSIONS = 8
    MOST_SOURCES = 48
    MOST_MODULES = 4
    MARK = 32               # a power of two


cdef struct ShownOperation:
    JobRecord job
    double began
    long long number
    int source
    int tensors
    int dimensions
    char[MOST_BYTES] name
    char[MOST_BYTES] detail
    char[MOST_BYTES] dtype
    long long[MOST_DIMENSIONS] shape


cdef struct ShownBucket:
    JobRecord job
    double began
    long long number
    int source


cdef struct ShownSource:
    int number
    char[MOST_BYTES + 4] words


cdef struct ShownPace:
    # See Note [Two marks]. Times are seconds on the monotonic clock.
    long long count
    double last             # when the last one came
    long long marked_count
    double marked
    long long before_count
    double before


cdef struct ShownModule:
    long long source        # of its buckets; -1: the place is free
    ShownPace steps
    double step             # seconds of the last
    double exposed          # seconds of all steps: see StepTimes, as for the marks
    double marked_exposed
    double before_exposed
    # Of the last steps that ranks have compared; `compared` is 0 before that.
    long long slowest       # the rank in the world that was late most often; -1: none
    long long late          # in so many of
    long long compared
    double waited           # seconds that this rank has waited for the last one, in the mean step
    double mean_step        # seconds of this rank


cdef struct Page:
    int left                # whether the process has left its world
    unsigned long long writes
    ShownOperation operation
    ShownBucket bucket
    ShownPace operations    # their beginnings
    ShownModule[MOST_MODULES] modules
    ShownSource[MOST_SOURCES] sources


BYTES = mmap.PAGESIZE

Operation = namedtuple("Operation", "words source number began ended")
Bucket = namedtuple("Bucket", "source number began ended")

cdef Page own
cdef Page *page = &own
_forget(page)

# What the page's words are of; kept, so that nothing else gets the same address.
cdef PyObject *shown_name = NULL
cdef PyObject *shown_detail = NULL
cdef PyObject *shown_dtype = NULL

# The words of each detail and dtype that was shown.
_words = {}
_dtypes = {}

# The memory and its descriptor, which stay as long as the process: others may look at any time.
_memory = None
_descriptor = -1


cdef void _forget(Page *each) noexcept:
    cdef int index
    memset(each, 0, sizeof(Page))
    each.operation.job.id = each.bucket.job.id = -1
    for index in range(MOST_MODULES):
        each.modules[index].source = -1


def share():
    """Forget what was done last, and let others see what follows; return a descriptor of memory.

    Not collective. -1 where the system gives no such memory.
    """
    global _memory, _descriptor, page
    cdef unsigned char[::1] view
    if _memory is None:
        try:
            _descriptor = memory_files.create("mpiddp-last-done")
        except OSError:
            return -1
        try:
            os.ftruncate(_descriptor, BYTES)
            _memory = mmap.mmap(_descriptor, BYTES)
        except OSError:
            os.close(_descriptor)
            return -1
        retain(<PyObject *>_memory)  # the engine's thread may still write at the interpreter's end
        view = _memory
        memcpy(&view[0], page, sizeof(Page))
        page = <Page *>&view[0]
    page.operation.job.id = page.bucket.job.id = -1
    memset(&page.operations, 0, sizeof(ShownPace))
    page.left = False
    return _descriptor


def descriptor():
    """Return the descriptor of the memory that `share` has shared, -1 without. Not collective."""
    return _descriptor


def leave():
    """Say that this process leaves its world, and waits for nobody. Not collective."""
    page.left = True


def _leave_page():
    """In a forked process: what it does is not the parent's."""
    global page
    page = &own


os.register_at_fork(after_in_child=_leave_page)


def name(int number, str words not None):
    """Say what a source is, of which operations or buckets will be shown. Not collective."""
    cdef ShownSource *source = &page.sources[number % MOST_SOURCES]
    source.number = number
    _put_words(source.words, sizeof(source.words), words.encode())


cdef void _put_words(char *place, size_t size, bytes words):
    cdef const char *text = words
    cdef size_t length = min(<size_t>len(words), size - 1)
    memcpy(place, text, length)
    place[length] = 0


cdef void _hold(PyObject **place, PyObject *value) noexcept:
    cdef PyObject *before = place[0]
    retain(value)
    place[0] = value
    release(before)


cdef JobRecord *last_operation() noexcept:
    return &page.operation.job


cdef JobRecord *last_bucket() noexcept:
    return &page.bucket.job


cdef void show_bucket(long long id_, int source, long long number, double began) noexcept:
    begin_writing(&page.writes)
    put_id(&page.bucket.job.id, id_)
    put_time(&page.bucket.job.ended, 0)
    page.bucket.began = began
    page.bucket.number = number
    page.bucket.source = source
    end_writing(&page.writes)


cdef int show_operation(
    long long id_, int source, long long number, double began, PyObject *name, PyObject *detail,
    PyObject *dtype, int tensors, int dimensions, const long long *shape
) except -1:
    cdef ShownOperation *shown = &page.operation
    cdef const char *text
    cdef Py_ssize_t length
    begin_writing(&page.writes)
    put_id(&shown.job.id, id_)
    put_time(&shown.job.ended, 0)
    _advance(&page.operations, began)
    shown.began = began
    shown.number = number
    shown.source = source
    shown.tensors = tensors
    shown.dimensions = min(dimensions, MOST_DIMENSIONS)
    memcpy(shown.shape, shape, shown.dimensions * sizeof(long long))
    if name != shown_name:
        text = PyUnicode_AsUTF8AndSize(name, &length)
        length = min(length, MOST_BYTES - 1)
        memcpy(shown.name, text, length)
        shown.name[length] = 0
        _hold(&shown_name, name)
    if detail != shown_detail:
        # By type as well: some of torch's are equal to a number.
        words = _words.get((type(<object>detail), <object>detail))
        if words is None:
            words = describe_call("", <object>detail).encode()
            if len(_words) < 1000:
                _words[(type(<object>detail), <object>detail)] = words
        _put_words(shown.detail, MOST_BYTES, words)
        _hold(&shown_detail, detail)
    if dtype != shown_dtype:
        words = _dtypes.get(<object>dtype)
        if words is None:
            words = b"" if <object>dtype is None else describe_dtype(<object>dtype).encode()
            _dtypes[<object>dtype] = words
        _put_words(shown.dtype, MOST_BYTES, words)
        _hold(&shown_dtype, dtype)
    end_writing(&page.writes)
    return 0


cdef bint _advance(ShownPace *pace, double time) noexcept:
    """Count one; return whether that made a mark."""
    pace.count += 1
    pace.last = time
    if pace.count == 1:
        pace.marked_count, pace.marked = 1, time
        pace.before_count, pace.before = 1, time
    elif pace.count & (MARK - 1):
        return False
    else:
        pace.before_count, pace.before = pace.marked_count, pace.marked
        pace.marked_count, pace.marked = pace.count, time
    return True


cdef int take_place() noexcept:
    """Return a place for a module's steps, -1 if all are taken."""
    cdef int place
    for place in range(MOST_MODULES):
        if page.modules[place].source < 0:
            memset(&page.modules[place], 0, sizeof(ShownModule))
            return place
    return -1


cdef void leave_place(int place) noexcept:
    page.modules[place].source = -1


cdef void show_step(
    int place, int source, double ended, double step, double exposed
) noexcept:
    cdef ShownModule *shown = &page.modules[place]
    begin_writing(&page.writes)
    shown.source = source
    shown.step = step
    shown.exposed = exposed
    if _advance(&shown.steps, ended):
        shown.before_exposed = shown.marked_exposed if shown.steps.count > 1 else exposed
        shown.marked_exposed = exposed
    end_writing(&page.writes)


cdef void show_comparison(
    int place, long long slowest, long long late, long long compared, double waited,
    double mean_step
) noexcept:
    cdef ShownModule *shown = &page.modules[place]
    begin_writing(&page.writes)
    shown.slowest, shown.late, shown.compared = slowest, late, compared
    shown.waited, shown.mean_step = waited, mean_step
    end_writing(&page.writes)


cdef void show_end(long long id_, double time) noexcept:
    if page.operation.job.id == id_:
        put_time(&page.operation.job.ended, time)
    elif page.bucket.job.id == id_:
        put_time(&page.bucket.job.ended, time)


cdef str _text(const char *place, size_t size):
    return place[:strnlen(place, size)].decode(errors="replace")


cdef str _source(const Page *read, int number):
    cdef const ShownSource *source
    if number < 0:
        return ""
    source = &read.sources[number % MOST_SOURCES]
    return _text(source.words, sizeof(source.words)) if source.number == number else ""


def read(bytes memory not None):
    """Return the last operation and bucket that a page tells of, and whether its process has left.

    Not collective. None for none. An operation is its words, the name of its source, its number
    there, and when it began and ended, as in the ring's records.

    Args:
        memory: the bytes of a page; its process may be another one's.
    """
    cdef Page found
    cdef ShownOperation *shown = &found.operation
    cdef int index
    if len(memory) < <Py_ssize_t>sizeof(Page):
        return None, None, False
    memcpy(&found, <const char *>memory, sizeof(Page))
    operation = bucket = None
    if shown.job.id >= 0:
        words = _text(shown.name, MOST_BYTES) + _text(shown.detail, MOST_BYTES)
        if shown.dtype[0]:
            dimensions = min(max(shown.dimensions, 0), MOST_DIMENSIONS)
            shape = tuple([shown.shape[index] for index in range(dimensions)])
            words += f" of {_text(shown.dtype, MOST_BYTES)} {shape}"
        if shown.tensors > 1:
            words += f" and {shown.tensors - 1} more"
        operation = Operation(
            words, _source(&found, shown.source), shown.number, shown.began, shown.job.ended
        )
    if found.bucket.job.id >= 0:
        bucket = Bucket(
            _source(&found, found.bucket.source), found.bucket.number, found.bucket.began,
            found.bucket.job.ended,
        )
    return operation, bucket, bool(found.left)


def layout():
    """Return where a page has what: by name, the offset and the format of `struct`.

    Not collective. Of modules and sources, the offset of the first one, the bytes of each, and
    how many places there are; what is in one begins with "module." or "source.".
    """
    cdef Page *at = &own
    cdef ShownModule *module = &own.modules[0]
    cdef ShownSource *source = &own.sources[0]

    def after(size_t place, str form):
        return [place - <size_t>at, form]

    def pace(str name, size_t place):
        # Its members are 8 bytes each, in the order of ShownPace.
        return {name: [place, "qdqdqd"]}

    words = f"{MOST_BYTES}s"
    return {
        "bytes": sizeof(Page),
        "left": after(<size_t>&at.left, "i"),
        "writes": after(<size_t>&at.writes, "Q"),
        "operation.id": after(<size_t>&at.operation.job.id, "q"),
        "operation.ended": after(<size_t>&at.operation.job.ended, "d"),
        "operation.began": after(<size_t>&at.operation.began, "d"),
        "operation.number": after(<size_t>&at.operation.number, "q"),
        "operation.source": after(<size_t>&at.operation.source, "i"),
        "operation.tensors": after(<size_t>&at.operation.tensors, "i"),
        "operation.dimensions": after(<size_t>&at.operation.dimensions, "i"),
        "operation.name": after(<size_t>&at.operation.name, words),
        "operation.detail": after(<size_t>&at.operation.detail, words),
        "operation.dtype": after(<size_t>&at.operation.dtype, words),
        "operation.shape": after(<size_t>&at.operation.shape, f"{MOST_DIMENSIONS}q"),
        "bucket.id": after(<size_t>&at.bucket.job.id, "q"),
        "bucket.ended": after(<size_t>&at.bucket.job.ended, "d"),
        "bucket.began": after(<size_t>&at.bucket.began, "d"),
        "bucket.number": after(<size_t>&at.bucket.number, "q"),
        "bucket.source": after(<size_t>&at.bucket.source, "i"),
        **pace("operations", <size_t>&at.operations - <size_t>at),
        "modules": [<size_t>module - <size_t>at, sizeof(ShownModule), MOST_MODULES],
        "module.source": [<size_t>&module.source - <size_t>module, "q"],
        **pace("module.steps", <size_t>&module.steps - <size_t>module),
        "module.step": [<size_t>&module.step - <size_t>module, "d"],
        "module.exposed": [<size_t>&module.exposed - <size_t>module, "d"],
        "module.before_exposed": [<size_t>&module.before_exposed - <size_t>module, "d"],
        "module.slowest": [<size_t>&module.slowest - <size_t>module, "qqq"],
        "module.waited": [<size_t>&module.waited - <size_t>module, "dd"],
        "sources": [<size_t>source - <size_t>at, sizeof(ShownSource), MOST_SOURCES],
        "source.number": [<size_t>&source.number - <size_t>source, "i"],
        "source.words": [<size_t>&source.words - <size_t>source, f"{sizeof(source.words)}s"],
    }
