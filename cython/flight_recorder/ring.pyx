"""The last operations and buckets of this process, in memory that is taken once.

Note [Records]
~~~~~~~~~~~~~~
Whoever begins a record holds the GIL, so no lock is needed. The end of a bucket is noted by whoever
finds it done, often the engine's thread, which has no GIL: it compares the record's id first, since
2000 records later another one has the place.
Frames are kept as code objects and positions in them, so no local variable is kept alive. Lines
are looked up when somebody reads. Times are seconds on the monotonic clock.
A call is taken apart: whatever Python object it kept alive would be freed 2000 operations later,
when its memory is in no cache any more, and each of these took as long as the rest of the record.
"""

from cpython.ref cimport PyObject
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.stdlib cimport calloc, free

import torch
from torch.distributed import ReduceOp

from mpiddp.engine.interface cimport Job, JobRecord, note_end
from mpiddp.flight_recorder.page cimport (
    last_bucket, last_operation, show_bucket, show_end, show_operation,
)
from mpiddp.system.kernels cimport (
    ELEMENT_BFLOAT16, ELEMENT_FLOAT16, ELEMENT_FLOAT32, ELEMENT_FLOAT64,
)
from mpiddp.system.posix cimport now, peek_time, put_id, put_time


cdef extern from *:
    """
    #include <frameobject.h>
    /* Before Python 3.11 only the line can be asked for: a negative number. */
    static inline int mpiddp_position(PyFrameObject *frame)
    {
    #if PY_VERSION_HEX < 0x030B0000
        return -1 - PyFrame_GetLineNumber(frame);
    #else
        return PyFrame_GetLasti(frame);
    #endif
    }
    static inline int mpiddp_line_of(PyObject *code, int position)
    {
        return PyCode_Addr2Line((PyCodeObject *)code, position);
    }
    static inline void mpiddp_fetch_for_writing(const void *memory, size_t bytes)
    {
        const char *const start = (const char *)memory;
        for (size_t offset = 0; offset < bytes; offset += 64)
            __builtin_prefetch(start + offset, 1);
    }
    static inline PyFrameObject *mpiddp_current_frame(void)
    {
        return PyThreadState_GetFrame(PyThreadState_Get());
    }
    """
    ctypedef struct PyFrameObject:
        pass
    PyFrameObject *mpiddp_current_frame()
    PyFrameObject *PyFrame_GetBack(PyFrameObject *)
    PyObject *PyFrame_GetCode "(PyObject *)PyFrame_GetCode" (PyFrameObject *)
    int line_of "mpiddp_line_of" (PyObject *, int)
    int mpiddp_position(PyFrameObject *)
    void mpiddp_fetch_for_writing(const void *, size_t) noexcept
    void release "Py_XDECREF" (void *)
    void retain "Py_XINCREF" (void *)
    unsigned long PyThread_get_thread_ident()


cdef enum:
    MOST_FRAMES = 16
    MOST_DIMENSIONS = 8


cdef struct Record:
    JobRecord job           # its id, and when it ended; 0: not yet, -1: it failed
    int source
    int element             # of a bucket
    long long number        # in its source
    long long elements      # of a bucket
    double began
    double started
    unsigned long thread
    PyObject *name          # of an operation, else NULL, as are its
    PyObject *detail
    PyObject *dtype
    int tensors
    int dimensions
    long long shape[MOST_DIMENSIONS]    # of the first tensor
    bint message            # only another rank takes part
    int depth
    PyObject *codes[MOST_FRAMES]
    int positions[MOST_FRAMES]


cdef Record *records = NULL
cdef long long capacity = 0
cdef long long next_id = 0
cdef long long first_id = 0

# While a trace is on: what takes the records, called when half of the ring is new.
_taker = None
_reduced = None              # called when a reducer has averaged gradients
cdef long long call_at = -1

_DTYPES = {
    ELEMENT_FLOAT32: torch.float32, ELEMENT_FLOAT64: torch.float64,
    ELEMENT_FLOAT16: torch.float16, ELEMENT_BFLOAT16: torch.bfloat16,
}


# One object for each reduction, by its hash: torch makes a new one for each call.
_reductions = {}


def allocate(long long size):
    """Forget all records and make place for `size`; 0: record nothing. Not collective.

    No operation may be under way, and no bucket. Ids go on: what has kept one of before may not end
    another's record.
    """
    global records, capacity, first_id
    cdef long long place
    cdef Record *old = records
    cdef Record *fresh = NULL
    if size > 0:
        fresh = <Record *>calloc(size, sizeof(Record))
        if fresh == NULL:
            raise MemoryError
        for place in range(size):
            fresh[place].job.id = -1
    size_before, capacity = capacity, 0
    records = fresh
    first_id = next_id
    capacity = max(size, 0)
    for place in range(size_before):
        _forget(&old[place])
    free(old)


cdef void _forget(Record *record) noexcept:
    cdef int index
    for index in range(MOST_FRAMES):
        release(record.codes[index])
    release(record.name)
    release(record.detail)
    release(record.dtype)


cdef void _keep(PyObject **place, PyObject *value) noexcept:
    cdef PyObject *before = place[0]
    retain(value)
    place[0] = value
    release(before)


cdef Record *_new_record(int source, long long number) noexcept:
    global next_id
    cdef Record *record = &records[next_id % capacity]
    put_id(&record.job.id, next_id)
    put_time(&record.job.ended, 0)
    record.source = source
    record.number = number
    record.began = now()
    record.started = 0
    record.thread = PyThread_get_thread_ident()
    record.message = False
    record.depth = 0
    record.job.traced = tracing
    if tracing:
        record.job.filled = record.job.full = record.job.waited = 0
        record.job.first_chunk = record.job.last_chunk = 0
    next_id += 1
    # All 2000 are more than the fastest caches hold.
    mpiddp_fetch_for_writing(&records[next_id % capacity], sizeof(Record))
    if next_id == call_at:
        _call_taker()
    return record


cdef void _call_taker() noexcept:
    global call_at
    call_at = next_id + max(capacity // 2, 1)
    _taker()


cdef int _note_call(Record *record, tuple call) except -1:
    # torch.Size, or a tuple.
    cdef PyObject *shape = <PyObject *>call[3]
    cdef int index
    _keep(&record.name, <PyObject *>call[0])
    detail = call[1]
    if type(detail) is ReduceOp:
        detail = _reductions.setdefault(hash(detail), detail)
    _keep(&record.detail, <PyObject *>detail)
    _keep(&record.dtype, <PyObject *>call[2])
    record.tensors = call[4]
    record.dimensions = min(PyTuple_GET_SIZE(<object>shape), MOST_DIMENSIONS)
    for index in range(record.dimensions):
        record.shape[index] = <object>PyTuple_GET_ITEM(<object>shape, index)
    return 0


cdef void _note_frames(Record *record) noexcept:
    cdef PyFrameObject *frame = mpiddp_current_frame()
    cdef PyFrameObject *back
    cdef PyObject *before
    cdef int depth = 0
    while frame != NULL and depth < MOST_FRAMES:
        before = record.codes[depth]
        record.codes[depth] = PyFrame_GetCode(frame)
        release(before)
        record.positions[depth] = mpiddp_position(frame)
        back = PyFrame_GetBack(frame)
        release(frame)
        frame = back
        depth += 1
    release(frame)
    record.depth = depth


cdef Record *_find(long long id_) noexcept:
    """Return a record, NULL if another one has its place."""
    cdef Record *record
    if id_ < 0 or not capacity:
        return NULL
    record = &records[id_ % capacity]
    return record if record.job.id == id_ else NULL


def begin(
    int source, long long number, tuple call not None, bint message=False, bint at_once=False
):
    """Record that an operation begins; return its id, -1 if nothing is recorded.

    Not collective.

    Args:
        source: what it belongs to, of `sources.add`.
        number: which of its source's operations it is, the same on all ranks.
        call: what `call_text.call_of` returns.
        message: whether only one other rank takes part.
        at_once: whether it is handed to MPI at once, so that nobody need call `started`.
    """
    cdef Record *record
    if not capacity:
        return -1
    record = _new_record(source, number)
    record.message = message
    if at_once:
        record.started = record.began
    _note_call(record, call)
    _note_frames(record)
    show_operation(
        record.job.id, source, number, record.began, record.name, record.detail, record.dtype,
        record.tensors, record.dimensions, record.shape,
    )
    return record.job.id


def started(long long id_):
    """Record that an operation has been handed to MPI. Not collective."""
    cdef Record *record = _find(id_)
    if record != NULL:
        record.started = now()


def attach(long long id_, size_t address):
    """Let the engine record the end of an operation when its job has ended.

    Not collective. Where the job has ended already, `ended` records it.

    Args:
        id_: of the record.
        address: of the job.
    """
    cdef Record *record = _find(id_)
    cdef Job *job = <Job *>address
    if record != NULL:
        job.record_id = id_
        job.shown = last_operation()
        job.record = &record.job        # at last: the engine may look


def ended(long long id_):
    """Record that an operation is complete. Not collective."""
    cdef Record *record = _find(id_)
    if record != NULL:
        put_time(&record.job.ended, now())
        show_end(id_, record.job.ended)


def failed(long long id_):
    """Record that nobody waits for an operation any more. Not collective."""
    cdef Record *record = _find(id_)
    if record != NULL:
        put_time(&record.job.ended, -1)
        show_end(id_, -1)


def fail_source(int source):
    """Record that nobody waits any more for what is under way of a source. Not collective."""
    cdef long long id_
    cdef Record *record
    for id_ in range(max(next_id - capacity, 0), next_id):
        record = _find(id_)
        if record != NULL and record.source == source and peek_time(&record.job.ended) == 0:
            put_time(&record.job.ended, -1)
            show_end(id_, -1)


cdef void begin_bucket(
    int source, long long number, long long elements, int element, double filled, double full,
    Job *job
) noexcept:
    """Record that a bucket is handed to the engine, which will note its end. Needs the GIL.

    `filled`, `full`: when its first and its last gradient came, 0 where nobody traces.
    """
    cdef Record *record
    job.record = NULL
    if not capacity:
        return
    record = _new_record(source, number)
    _keep(&record.name, NULL)
    record.elements = elements
    record.element = element
    record.started = record.began
    record.job.filled, record.job.full = filled, full
    job.record_id = record.job.id
    job.shown = last_bucket()
    job.record = &record.job
    show_bucket(record.job.id, source, number, record.began)


cdef tuple _call_of(Record *record):
    cdef int index
    shape = tuple([record.shape[index] for index in range(record.dimensions)])
    return (
        <object>record.name, <object>record.detail, <object>record.dtype, shape, record.tensors,
    )


cdef tuple _told(Record *record):
    cdef int index, line
    cdef PyObject *code
    frames = []
    for index in range(record.depth):
        code = record.codes[index]
        line = record.positions[index]
        line = -1 - line if line < 0 else line_of(code, line)
        name = getattr(<object>code, "co_qualname", None) or (<object>code).co_name
        frames.append((name, (<object>code).co_filename, line))
    call, dtype = None, None
    if record.name != NULL:
        call = _call_of(record)
    else:
        dtype = _DTYPES.get(record.element)
    return (
        record.job.id, record.source, record.number, call, record.elements, dtype,
        record.began, record.started, peek_time(&record.job.ended), record.thread, frames,
    )


def snapshot():
    """Return all records, the oldest first. Not collective."""
    cdef long long id_
    cdef Record *record
    told = []
    for id_ in range(max(next_id - capacity, 0), next_id):
        record = _find(id_)
        if record != NULL:
            told.append(_told(record))
    return told


cdef int note_reduction(object reducer) except -1:
    """Tell a trace that a reducer has averaged gradients. Only while `tracing`."""
    if _reduced is not None:
        _reduced(reducer)
    return 0


def trace(taker, reduced=None):
    """Note for each record what a trace needs, from now on. Not collective.

    Args:
        taker: called when half of the ring is new; it is to call `take`. None: the trace ends.
        reduced: called with each reducer that has averaged gradients, at the end of that.

    Returns:
        the id of the next record.
    """
    global _taker, _reduced, call_at, tracing
    _taker, _reduced = taker, reduced
    tracing = taker is not None
    call_at = next_id + max(capacity // 2, 1) if tracing else -1
    return next_id


def take(long long since, list unfinished not None):
    """Return what is new among the records that have ended, without frames. Not collective.

    Args:
        since: the id of the first record that is new.
        unfinished: ids of older ones that had not ended.

    Returns:
        the id of the next record, the records, the ids of those that have not ended, and how many
        were lost, because others have their places by now.
    """
    cdef long long id_, lost = 0
    cdef Record *record
    cdef double ended_at
    taken, left = [], []
    cdef long long first = max(since, next_id - capacity)
    lost = first - since
    for id_ in unfinished + list(range(first, next_id)):
        record = _find(id_)
        if record == NULL:
            lost += 1
            continue
        ended_at = peek_time(&record.job.ended)
        if ended_at == 0:
            left.append(id_)
            continue
        taken.append((
            record.source, record.number, None if record.name == NULL else _call_of(record),
            record.elements, _DTYPES.get(record.element), record.began, record.started, ended_at,
            record.thread, record.job.filled, record.job.full, record.job.waited,
            peek_time(&record.job.first_chunk), peek_time(&record.job.last_chunk),
        ))
    return next_id, taken, left, lost


def oldest():
    """Return the oldest record that has not ended as `snapshot` does, None if all have.

    Not collective. Messages are left out: a program may wait for one as long as it likes.
    """
    cdef long long id_
    cdef Record *record
    for id_ in range(max(next_id - capacity, 0), next_id):
        record = _find(id_)
        if record != NULL and peek_time(&record.job.ended) == 0 and not record.message:
            return _told(record)
    return None


def find_call(int source, long long number):
    """Return the call of an operation, and whether it has not ended; None if it is not here.

    Not collective.
    """
    cdef long long id_
    cdef Record *record
    for id_ in range(next_id - 1, max(next_id - capacity, 0) - 1, -1):
        record = _find(id_)
        if (record != NULL and record.source == source and record.number == number
                and record.name != NULL):
            return _call_of(record), peek_time(&record.job.ended) == 0
    return None


def first():
    """Return the id of the first record since `allocate`, also if it is not kept by now.

    Not collective.
    """
    return first_id


def under_way():
    """Return how many records have not ended. Not collective."""
    cdef long long place, count = 0
    for place in range(capacity):
        count += records[place].job.id >= 0 and peek_time(&records[place].job.ended) == 0
    return count


def seconds_per_bucket(long long count):
    """Return what the record of a bucket costs, measured over `count`. Not collective.

    For tests and benchmarks: it fills the ring with records of the source -1.
    """
    cdef Job job
    cdef long long index
    cdef double began = now()
    for index in range(count):
        begin_bucket(-1, index, 1, ELEMENT_FLOAT32, 0, 0, &job)
        note_end(&job, began)
    return (now() - began) / count
