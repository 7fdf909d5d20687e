/* A GPU runtime without a GPU: the functions of CUDA's that mpiddp calls, over host memory.
 *
 * A stream is a thread that takes operations from a queue, so copies happen later than the call
 * and in order of the stream, and events pass when their stream comes to them. The default
 * stream (NULL) is the calling thread itself: on it everything happens at once, and waiting
 * for an event blocks the caller. That is what a tensor on the CPU needs, whose "kernels" are the
 * caller's own loops.
 *
 * What a real runtime would forbid, this one refuses: unknown handles, an event on the stream of
 * another device, copies of host memory out of nowhere. And it counts what is alive.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
};

enum { TO_DEVICE = 1, TO_HOST = 2, ON_DEVICE = 3 };
enum { COPY, RECORD, WAIT, SLEEP, ADD, CALL, END };

#define MAX_REGISTRATIONS 4096
#define MAX_FAILURES 8

/* One record of an event on a stream: who waits for it is not concerned by later ones. */
typedef struct Mark {
    int users;              /* the event, if it is its last one, and operations on streams */
    int passed;
} Mark;

typedef struct Event {
    int device;
    Mark *last;             /* NULL: never recorded */
} Event;

typedef struct Operation {
    int what;
    long gate;              /* goes on when so many were released, 0: at once */
    int kind;
    void *to;
    const void *from;
    size_t size;
    double seconds;
    Mark *mark;
    void (*function)(void *);
    void *argument;
    struct Operation *next;
} Operation;

typedef struct Stream {
    int device;
    pthread_t thread;
    Operation *head, *tail;
    int busy;
    struct Stream *next;
} Stream;

/* One lock for everything: nothing here is meant to be fast. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Stream *streams;
static struct { char *start; size_t size; } registrations[MAX_REGISTRATIONS];
static struct { char call[32]; int code; long after; } failures[MAX_FAILURES];
static int devices = 1;
static double delay_to_host, delay_to_device;
static int hold_to_host, hold_to_device;
static long held, released;
static int ending;               /* streams that were destroyed and have not come to their end */
static uint64_t contexts;       /* devices that some call has made a context on, a bit each */
static long live_streams, live_events, live_registrations, live_allocations;
static long copies_to_host, copies_to_device, unpinned_copies, landed_on_host, queries;

static __thread int current_device;
static __thread int last_error;

static void take_lock(void)
{
    pthread_mutex_lock(&lock);
}

static void let_lock_go(void)
{
    pthread_mutex_unlock(&lock);
}

/* A forked child must not find the lock taken by a thread that it does not have. */
__attribute__((constructor)) static void mind_forks(void)
{
    pthread_atfork(take_lock, let_lock_go, let_lock_go);
}

static void sleep_seconds(double seconds)
{
    struct timespec time = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    while (nanosleep(&time, &time) && errno == EINTR) {}
}

/* Return the code that a call with this name has to give. The caller holds the lock. */
static int injected(const char *call)
{
    contexts |= 1ull << current_device;
    for (int i = 0; i < MAX_FAILURES; i++)
        if (failures[i].code && !strcmp(failures[i].call, call) && failures[i].after-- <= 0)
            return failures[i].code;
    return SUCCESS;
}

static int result(int code)
{
    if (code)
        last_error = code;
    return code;
}

static void drop(Mark *mark)
{
    if (mark && --mark->users == 0)
        free(mark);
}

static int under_way(const Event *event)
{
    return event->last && !event->last->passed;
}

static int known(Stream *stream)
{
    for (Stream *s = streams; s; s = s->next)
        if (s == stream)
            return 1;
    return 0;
}

static int is_registered(const void *memory, size_t size)
{
    const char *start = memory;
    for (int i = 0; i < MAX_REGISTRATIONS; i++)
        if (registrations[i].start && start >= registrations[i].start
            && start + size <= registrations[i].start + registrations[i].size)
            return 1;
    return 0;
}

/* Do one operation. The caller holds the lock, which is let go while time passes. */
static void perform(Operation *operation)
{
    while (released < operation->gate)
        pthread_cond_wait(&changed, &lock);
    switch (operation->what) {
    case COPY:
    case ADD:
        pthread_mutex_unlock(&lock);
        if (operation->seconds > 0)
            sleep_seconds(operation->seconds);
        if (operation->what == COPY)
            memmove(operation->to, operation->from, operation->size);
        else
            for (size_t i = 0; i < operation->size / sizeof(float); i++)
                ((float *)operation->to)[i] += ((const float *)operation->from)[i];
        pthread_mutex_lock(&lock);
        landed_on_host += operation->kind == TO_HOST;
        break;
    case SLEEP:
    case CALL:
        pthread_mutex_unlock(&lock);
        sleep_seconds(operation->seconds);
        if (operation->what == CALL)
            operation->function(operation->argument);
        pthread_mutex_lock(&lock);
        break;
    case RECORD:
        operation->mark->passed = 1;
        drop(operation->mark);
        pthread_cond_broadcast(&changed);
        break;
    case WAIT:
        while (operation->mark && !operation->mark->passed)
            pthread_cond_wait(&changed, &lock);
        drop(operation->mark);
        break;
    }
}

static void *run(void *argument)
{
    Stream *stream = argument;
    Operation *operation;
    int ended = 0;
    pthread_mutex_lock(&lock);
    while (!ended) {
        if (!stream->head) {
            stream->busy = 0;
            pthread_cond_broadcast(&changed); /* once: idle streams would wake each other */
        }
        while (!stream->head)
            pthread_cond_wait(&changed, &lock);
        stream->busy = 1;
        operation = stream->head;
        perform(operation);
        ended = operation->what == END;
        stream->head = operation->next;
        if (!stream->head)
            stream->tail = NULL;
        free(operation);
    }
    ending--;
    pthread_mutex_unlock(&lock);
    free(stream);
    return NULL;
}

/* Add an operation to a stream. The caller holds the lock. */
static int enqueue(Stream *stream, Operation operation)
{
    Operation *copy;
    if (!stream) {
        perform(&operation);
        return SUCCESS;
    }
    copy = malloc(sizeof *copy);
    if (!copy)
        return OUT_OF_MEMORY;
    *copy = operation;
    copy->next = NULL;
    if (stream->tail)
        stream->tail->next = copy;
    else
        stream->head = copy;
    stream->tail = copy;
    stream->busy = 1;
    pthread_cond_broadcast(&changed);
    return SUCCESS;
}

static int enqueue_if_known(Stream *stream, Operation operation)
{
    return stream && !known(stream) ? INVALID_HANDLE : enqueue(stream, operation);
}

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream)
{
    int code;
    pthread_mutex_lock(&lock);
    code = injected("MemcpyAsync");
    if (!code && (kind < TO_DEVICE || kind > ON_DEVICE || (size && (!to || !from))))
        code = INVALID_VALUE;
    if (!code) {
        int held_back = kind == TO_HOST ? hold_to_host : kind == TO_DEVICE && hold_to_device;
        copies_to_host += kind == TO_HOST;
        copies_to_device += kind == TO_DEVICE;
        unpinned_copies += (kind == TO_HOST && !is_registered(to, size))
            || (kind == TO_DEVICE && !is_registered(from, size));
        code = enqueue_if_known(
            stream, (Operation){
                .what = COPY, .kind = kind, .to = to, .from = from, .size = size,
                .gate = held_back ? ++held : 0,
                .seconds = kind == TO_HOST ? delay_to_host : kind == TO_DEVICE ? delay_to_device : 0});
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}

int cudaEventCreateWithFlags(void **event, unsigned flags)
{
    Event *made = calloc(1, sizeof *made);
    int code;
    pthread_mutex_lock(&lock);
    code = injected("EventCreateWithFlags");
    if (!code && !(flags & 2))
        code = INVALID_VALUE;   /* an event that takes the time is slower: a mistake here */
    if (!code) {
        made->device = current_device;
        live_events++;
        *event = made;
    } else {
        free(made);
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}

int cudaEventRecord(void *handle, void *stream)
{
    Event *event = handle;
    Mark *mark;
    int code;
    pthread_mutex_lock(&lock);
    code = injected("EventRecord");
    if (!code && (!event || (stream && !known(stream))
                  || (stream && ((Stream *)stream)->device != event->device)))
        code = INVALID_HANDLE;
    mark = code ? NULL : calloc(1, sizeof *mark);
    if (!code && !mark)
        code = OUT_OF_MEMORY;
    if (!code) {
        mark->users = 2;
        drop(event->last);
        event->last = mark;
        code = enqueue(stream, (Operation){.what = RECORD, .mark = mark});
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}

int cudaEventQuery(void *handle)
{
    Event *event = handle;
    int code;
    pthread_mutex_lock(&lock);
    queries++;
    code = injected("EventQuery");
    if (!code && !event)
        code = INVALID_HANDLE;
    if (!code && under_way(event))
        code = NOT_READY;
    pthread_mutex_unlock(&lock);
    return result(code);
}

int cudaEventSynchronize(void *handle)
{
    Event *event = handle;
    Mark *mark = NULL;
    int code;
    pthread_mutex_lock(&lock);
    code = injected("EventSynchronize");
    if (!code && !event)
        code = INVALID_HANDLE;
    if (!code && event->last) {
        mark = event->last;
        mark->users++;
    }
    while (mark && !mark->passed)
        pthread_cond_wait(&changed, &lock);
    drop(mark);
    pthread_mutex_unlock(&lock);
    return result(code);
}

int cudaEventDestroy(void *handle)
{
    int code;
    pthread_mutex_lock(&lock);
    code = injected("EventDestroy");
    if (!code && !handle)
        code = INVALID_HANDLE;
    if (!code) {
        live_events--;
        drop(((Event *)handle)->last);
        free(handle);
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}

int cudaStreamCreateWithFlags(void **stream, unsigned flags)
{
    Stream *made = calloc(1, sizeof *made);
    pthread_t thread;
    int code;
    (void)flags;
    pthread_mutex_lock(&lock);
    code = injected("StreamCreateWithFlags");
    if (!code) {
        made->device = current_device;
        made->busy = 1;
        code = pthread_create(&thread, NULL, run, made) ? OUT_OF_MEMORY : SUCCESS;
    }
    if (!code) {
        made->thread = thread;
        made->next = streams;
        streams = made;
        live_streams++;
        *stream = made;
    } else {
        free(made);
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}

int cudaStreamSynchronize(void *handle)
{
    Stream *stream = handle;
    int code;
    pthread_mutex_lock(&lock);
    code = injected("StreamSynchronize");
    if (!code && stream && !known(stream))
        code = INVALID_HANDLE;
    while (!code && stream && stream->busy)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return result(code);
}

int cudaStreamDestroy(void *handle)
{
    Stream **link;
    Stream *stream = handle;
    int code;
    pthread_mutex_lock(&lock);
    code = injected("StreamDestroy");
    if (!code && !known(stream))
        code = INVALID_HANDLE;
    if (!code) {
        for (link = &streams; *link != stream; link = &(*link)->next) {}
        *link = stream->next;
        live_streams--;
        ending++;
        pthread_detach(stream->thread);
        enqueue(stream, (Operation){.what = END});
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}

int cudaStreamWaitEvent(void *stream, void *handle, unsigned flags)
{
    Event *event = handle;
    int code;
    (void)flags;
    pthread_mutex_lock(&lock);
    code = injected("StreamWaitEvent");
    if (!code && (!event || (stream && !known(stream))))
        code = INVALID_HANDLE;
    if (!code) {
        if (event->last)
            event->last->users++;
        code = enqueue(stream, (Operation){.what = WAIT, .mark = event->last});
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}

int cudaHostRegister(void *memory, size_t size, unsigned flags)
{
    int code;
    (void)flags;
    pthread_mutex_lock(&lock);
    code = injected("HostRegister");
    if (!code && (!memory || !size))
        code = INVALID_VALUE;
    for (int i = 0; !code && i < MAX_REGISTRATIONS; i++)
        if (registrations[i].start && (char *)memory < registrations[i].start + registrations[i].size
            && (char *)memory + size > registrations[i].start)
            code = ALREADY_REGISTERED;
    if (!code) {
        int i = 0;
        while (i < MAX_REGISTRATIONS && registrations[i].start)
            i++;
        if (i == MAX_REGISTRATIONS) {
            code = OUT_OF_MEMORY;
        } else {
            registrations[i].start = memory;
            registrations[i].size = size;
            live_registrations++;
        }
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}

int cudaHostUnregister(void *memory)
{
    int code;
    pthread_mutex_lock(&lock);
    code = injected("HostUnregister");
    if (!code) {
        int i = 0;
        while (i < MAX_REGISTRATIONS && (!memory || registrations[i].start != memory))
            i++;
        if (i == MAX_REGISTRATIONS) {
            code = NOT_REGISTERED;
        } else {
            registrations[i].start = NULL;
            live_registrations--;
        }
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}

int cudaMalloc(void **memory, size_t size)
{
    int code;
    pthread_mutex_lock(&lock);
    code = injected("Malloc");
    if (!code) {
        /* Aligned as CUDA's, and full of what must not be read. */
        *memory = aligned_alloc(256, (size + 255) / 256 * 256 + 256);
        if (*memory) {
            memset(*memory, 0xa5, size);
            live_allocations++;
        } else {
            code = OUT_OF_MEMORY;
        }
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}

int cudaFree(void *memory)
{
    int code;
    pthread_mutex_lock(&lock);
    code = injected("Free");
    if (!code && memory) {
        live_allocations--;
        free(memory);
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}

int cudaSetDevice(int device)
{
    int code;
    pthread_mutex_lock(&lock);
    code = device < 0 || device >= devices ? INVALID_DEVICE : SUCCESS;
    if (!code) {
        current_device = device;
        code = injected("SetDevice");
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}

int cudaGetDevice(int *device)
{
    *device = current_device;
    return SUCCESS;
}

int cudaGetLastError(void)
{
    int code = last_error;
    last_error = SUCCESS;
    return code;
}

const char *cudaGetErrorName(int code)
{
    switch (code) {
    case SUCCESS: return "cudaSuccess";
    case INVALID_VALUE: return "cudaErrorInvalidValue";
    case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case INVALID_DEVICE: return "cudaErrorInvalidDevice";
    case INVALID_HANDLE: return "cudaErrorInvalidResourceHandle";
    case NOT_READY: return "cudaErrorNotReady";
    case ALREADY_REGISTERED: return "cudaErrorHostMemoryAlreadyRegistered";
    case NOT_REGISTERED: return "cudaErrorHostMemoryNotRegistered";
    default: return "unrecognized error code";
    }
}

const char *cudaGetErrorString(int code)
{
    return code ? "as the simulated GPU says" : "no error";
}

/* What follows is not CUDA's: settings and counters for tests. */

void simulatedSetDevices(int number)
{
    pthread_mutex_lock(&lock);
    devices = number;
    pthread_mutex_unlock(&lock);
}

void simulatedForgetContexts(void)
{
    pthread_mutex_lock(&lock);
    contexts = 0;
    pthread_mutex_unlock(&lock);
}

void simulatedSetDelays(double to_host, double to_device)
{
    pthread_mutex_lock(&lock);
    delay_to_host = to_host;
    delay_to_device = to_device;
    pthread_mutex_unlock(&lock);
}

/* Whether copies from now on are held up, each until simulatedRelease lets it go. */
void simulatedHoldCopies(int to_host, int to_device)
{
    pthread_mutex_lock(&lock);
    hold_to_host = to_host;
    hold_to_device = to_device;
    pthread_mutex_unlock(&lock);
}

/* Let the oldest `number` of what is held up go on, all of it if that is negative. */
void simulatedRelease(long number)
{
    pthread_mutex_lock(&lock);
    released = number < 0 || released + number > held ? held : released + number;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Let the call with this name return `code` after it has succeeded `after` times; code 0: stop. */
void simulatedFail(const char *call, int code, long after)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_FAILURES; i++)
        if (failures[i].code && !strcmp(failures[i].call, call))
            failures[i].code = 0;
    for (int i = 0; code && i < MAX_FAILURES; i++)
        if (!failures[i].code) {
            strncpy(failures[i].call, call, sizeof failures[i].call - 1);
            failures[i].code = code;
            failures[i].after = after;
            break;
        }
    pthread_mutex_unlock(&lock);
}

/* Kernels: nothing, a copy, or a sum of floats into `to`, after some time on the stream. */
int simulatedSleep(void *stream, double seconds)
{
    int code;
    pthread_mutex_lock(&lock);
    code = enqueue_if_known(stream, (Operation){.what = SLEEP, .seconds = seconds});
    pthread_mutex_unlock(&lock);
    return code;
}

/* A kernel that goes on when it is released. */
int simulatedHold(void *stream)
{
    int code;
    pthread_mutex_lock(&lock);
    code = enqueue_if_known(stream, (Operation){.what = SLEEP, .gate = ++held});
    pthread_mutex_unlock(&lock);
    return code;
}

int simulatedCopy(void *stream, double seconds, void *to, const void *from, size_t size)
{
    int code;
    pthread_mutex_lock(&lock);
    code = enqueue_if_known(stream, (Operation){
        .what = COPY, .kind = ON_DEVICE, .seconds = seconds, .to = to, .from = from, .size = size});
    pthread_mutex_unlock(&lock);
    return code;
}

int simulatedAdd(void *stream, double seconds, void *to, const void *from, size_t size)
{
    int code;
    pthread_mutex_lock(&lock);
    code = enqueue_if_known(stream, (Operation){
        .what = ADD, .kind = ON_DEVICE, .seconds = seconds, .to = to, .from = from, .size = size});
    pthread_mutex_unlock(&lock);
    return code;
}

/* For simulated_blas.c: a function on a stream, after some time, and what its calls must return. */
int simulatedCall(void *stream, double seconds, void (*function)(void *), void *argument)
{
    int code;
    pthread_mutex_lock(&lock);
    code = enqueue_if_known(stream, (Operation){
        .what = CALL, .seconds = seconds, .function = function, .argument = argument});
    pthread_mutex_unlock(&lock);
    return code;
}

int simulatedInjected(const char *call)
{
    int code;
    pthread_mutex_lock(&lock);
    code = injected(call);
    pthread_mutex_unlock(&lock);
    return code;
}

/* Whether some stream still has something to do. */
int simulatedBusy(void)
{
    int busy;
    pthread_mutex_lock(&lock);
    busy = ending;
    for (Stream *s = streams; s; s = s->next)
        busy |= s->busy;
    pthread_mutex_unlock(&lock);
    return busy;
}

typedef struct {
    long streams, events, registrations, allocations;
    long copies_to_host, copies_to_device, unpinned_copies, landed_on_host, queries;
    uint64_t contexts;
} Counts;

void simulatedCounts(Counts *counts)
{
    pthread_mutex_lock(&lock);
    *counts = (Counts){
        live_streams, live_events, live_registrations, live_allocations,
        copies_to_host, copies_to_device, unpinned_copies, landed_on_host, queries, contexts};
    pthread_mutex_unlock(&lock);
}
