/* Fill the table of calls.h for one binary interface of MPI: that of the mpi.h that it is compiled
 * with. The only file that includes mpi.h; see Note [MPI through one door] there.
 */
#define _GNU_SOURCE
#include <mpi.h>

#include <dlfcn.h>
#include <stddef.h>

#include "calls.h"
#include "which_mpi.h"

_Static_assert(sizeof(MPI_Comm) <= sizeof(mpiddp_handle), "a handle is larger than an address");
_Static_assert(sizeof(MPI_Status) <= sizeof(mpiddp_status), "no room for a status");
_Static_assert(MPI_MAX_LIBRARY_VERSION_STRING <= MPIDDP_LONGEST_TEXT, "no room for a version");
_Static_assert(MPI_MAX_ERROR_STRING <= MPIDDP_LONGEST_TEXT, "no room for an error");
_Static_assert(MPI_MAX_OBJECT_NAME <= MPIDDP_LONGEST_NAME, "no room for a name");
_Static_assert(MPI_SUCCESS == 0, "success is 0 (MPI-4.0, section 9.4)");

#define FUNCTIONS(each)                                                                           \
    each(Initialized) each(Finalized) each(Get_library_version) each(Error_string)                \
    each(Comm_rank) each(Comm_get_name) each(Comm_create_keyval) each(Comm_set_attr)              \
    each(Test) each(Testall) each(Cancel) each(Isend) each(Irecv) each(Improbe) each(Imrecv)      \
    each(Get_elements_x) each(Iallreduce) each(Iallgather) each(Iallgatherv) each(Ialltoall)      \
    each(Ialltoallv) each(Ibcast) each(Op_create) each(Type_contiguous) each(Type_commit)

#define DECLARED(name) __typeof__(MPI_##name) *name;
static struct functions {
    FUNCTIONS(DECLARED)
} mpi;

/* Open MPI's predefined handles are addresses of variables; those of others are numbers. */
#ifdef OMPI_MAJOR_VERSION
#define HANDLES(each)                                                                             \
    each(comm_null, "ompi_mpi_comm_null") each(comm_self, "ompi_mpi_comm_self")                   \
    each(comm_world, "ompi_mpi_comm_world") each(request_null, "ompi_request_null")               \
    each(byte, "ompi_mpi_byte") each(float32, "ompi_mpi_float")                                   \
    each(float64, "ompi_mpi_double") each(uint64, "ompi_mpi_uint64_t")                            \
    each(datatype_null, "ompi_mpi_datatype_null") each(sum, "ompi_mpi_op_sum")
#else
#define HANDLES(each)                                                                             \
    each(comm_null, MPI_COMM_NULL) each(comm_self, MPI_COMM_SELF)                                 \
    each(comm_world, MPI_COMM_WORLD) each(request_null, MPI_REQUEST_NULL)                         \
    each(byte, MPI_BYTE) each(float32, MPI_FLOAT) each(float64, MPI_DOUBLE)                       \
    each(uint64, MPI_UINT64_T) each(datatype_null, MPI_DATATYPE_NULL) each(sum, MPI_SUM)
#endif

/* Where MPI writes a handle: into one of its own type, since a number may be half of an address. */
#define WRITE_HANDLE(type, to, call)                                                              \
    type made = (type)*(to);                                                                      \
    int code = call;                                                                              \
    *(to) = (mpiddp_handle)made;                                                                  \
    return code

static MPI_Status *status_of(mpiddp_status *status)
{
    return status ? (MPI_Status *)status->room : MPI_STATUS_IGNORE;
}

static int comm_rank(mpiddp_handle comm, int *rank)
{
    return mpi.Comm_rank((MPI_Comm)comm, rank);
}

static int comm_get_name(mpiddp_handle comm, char *name, int *length)
{
    return mpi.Comm_get_name((MPI_Comm)comm, name, length);
}

/* Open MPI's MPI_COMM_NULL_COPY_FN is a function of the library. */
static int copy_nothing(MPI_Comm comm, int keyval, void *extra, void *from, void *to, int *copied)
{
    (void)comm, (void)keyval, (void)extra, (void)from, (void)to;
    *copied = 0;
    return MPI_SUCCESS;
}

static int call_function(MPI_Comm comm, int keyval, void *argument, void *function)
{
    (void)comm, (void)keyval;
    ((void (*)(void *))function)(argument);
    return MPI_SUCCESS;
}

static int when_freed(mpiddp_handle comm, void (*function)(void *), void *argument)
{
    int keyval = MPI_KEYVAL_INVALID;
    int code = mpi.Comm_create_keyval(copy_nothing, call_function, &keyval, (void *)function);
    return code ? code : mpi.Comm_set_attr((MPI_Comm)comm, keyval, argument);
}

static int test(mpiddp_handle *request, int *finished, mpiddp_status *status)
{
    WRITE_HANDLE(MPI_Request, request, mpi.Test(&made, finished, status_of(status)));
}

static int testall(int count, mpiddp_handle *requests, int *finished)
{
    MPI_Request own[count];
    int code;
    for (int i = 0; i < count; i++) own[i] = (MPI_Request)requests[i];
    code = mpi.Testall(count, own, finished, MPI_STATUSES_IGNORE);
    for (int i = 0; i < count; i++) requests[i] = (mpiddp_handle)own[i];
    return code;
}

static int cancel(mpiddp_handle *request)
{
    WRITE_HANDLE(MPI_Request, request, mpi.Cancel(&made));
}

static int isend(const void *buffer, int count, mpiddp_handle type, int to, int tag,
                 mpiddp_handle comm, mpiddp_handle *request)
{
    WRITE_HANDLE(MPI_Request, request, mpi.Isend(buffer, count, (MPI_Datatype)type, to, tag,
                                                 (MPI_Comm)comm, &made));
}

static int irecv(void *buffer, int count, mpiddp_handle type, int from, int tag, mpiddp_handle comm,
                 mpiddp_handle *request)
{
    WRITE_HANDLE(MPI_Request, request, mpi.Irecv(buffer, count, (MPI_Datatype)type, from, tag,
                                                 (MPI_Comm)comm, &made));
}

static int improbe(int from, int tag, mpiddp_handle comm, int *found, mpiddp_handle *message,
                   mpiddp_status *status)
{
    WRITE_HANDLE(MPI_Message, message, mpi.Improbe(from, tag, (MPI_Comm)comm, found, &made,
                                                   status_of(status)));
}

static int imrecv(void *buffer, int count, mpiddp_handle type, mpiddp_handle *message,
                  mpiddp_handle *request)
{
    MPI_Message taken = (MPI_Message)*message;
    WRITE_HANDLE(MPI_Request, request,
                 mpi.Imrecv(buffer, count, (MPI_Datatype)type, &taken, &made));
}

static int status_source(const mpiddp_status *status)
{
    return ((const MPI_Status *)status->room)->MPI_SOURCE;
}

/* What the table says, for use here. */
static struct mpiddp_calls table;

static int status_bytes(const mpiddp_status *status, long long *bytes)
{
    MPI_Count count = 0;
    int code = mpi.Get_elements_x((MPI_Status *)status->room, (MPI_Datatype)table.byte, &count);
    *bytes = count;
    return code;
}

static int iallreduce(const void *from, void *to, int count, mpiddp_handle type, mpiddp_handle op,
                      mpiddp_handle comm, mpiddp_handle *request)
{
    WRITE_HANDLE(MPI_Request, request, mpi.Iallreduce(from, to, count, (MPI_Datatype)type,
                                                      (MPI_Op)op, (MPI_Comm)comm, &made));
}

static int iallgather(const void *from, int count, mpiddp_handle type, void *to, int to_count,
                      mpiddp_handle to_type, mpiddp_handle comm, mpiddp_handle *request)
{
    WRITE_HANDLE(MPI_Request, request,
                 mpi.Iallgather(from, count, (MPI_Datatype)type, to, to_count,
                                (MPI_Datatype)to_type, (MPI_Comm)comm, &made));
}

static int iallgatherv(const void *from, int count, mpiddp_handle type, void *to,
                       const int *to_counts, const int *to_places, mpiddp_handle to_type,
                       mpiddp_handle comm, mpiddp_handle *request)
{
    WRITE_HANDLE(MPI_Request, request,
                 mpi.Iallgatherv(from, count, (MPI_Datatype)type, to, to_counts, to_places,
                                 (MPI_Datatype)to_type, (MPI_Comm)comm, &made));
}

static int ialltoall(const void *from, int count, mpiddp_handle type, void *to, int to_count,
                     mpiddp_handle to_type, mpiddp_handle comm, mpiddp_handle *request)
{
    WRITE_HANDLE(MPI_Request, request,
                 mpi.Ialltoall(from, count, (MPI_Datatype)type, to, to_count,
                               (MPI_Datatype)to_type, (MPI_Comm)comm, &made));
}

static int ialltoallv(const void *from, const int *counts, const int *places, mpiddp_handle type,
                      void *to, const int *to_counts, const int *to_places, mpiddp_handle to_type,
                      mpiddp_handle comm, mpiddp_handle *request)
{
    WRITE_HANDLE(MPI_Request, request,
                 mpi.Ialltoallv(from, counts, places, (MPI_Datatype)type, to, to_counts, to_places,
                                (MPI_Datatype)to_type, (MPI_Comm)comm, &made));
}

static int ibcast(void *buffer, int count, mpiddp_handle type, int root, mpiddp_handle comm,
                  mpiddp_handle *request)
{
    WRITE_HANDLE(MPI_Request, request,
                 mpi.Ibcast(buffer, count, (MPI_Datatype)type, root, (MPI_Comm)comm, &made));
}

static int op_create(mpiddp_combine_t function, int commutes, mpiddp_handle *operation)
{
    WRITE_HANDLE(MPI_Op, operation,
                 mpi.Op_create((MPI_User_function *)(void *)function, commutes, &made));
}

static int type_of_words(int count, mpiddp_handle *type)
{
    MPI_Datatype made;
    int code = mpi.Type_contiguous(count, (MPI_Datatype)table.uint64, &made);
    if (!code) code = mpi.Type_commit(&made);
    if (!code) *type = (mpiddp_handle)made;
    return code;
}

/* As the loader finds what a program calls: first what stands before all libraries. */
static void *find(void *library, const char *name)
{
    void *found = dlsym(RTLD_DEFAULT, name);
    return found ? found : dlsym(library, name);
}

mpiddp_fill_t mpiddp_fill;

const char *mpiddp_fill(struct mpiddp_calls *calls, void *library)
{
    struct functions functions;
    struct mpiddp_calls filled = {
        .interface = MPIDDP_INTERFACE,
        .vendor = MPIDDP_VENDOR,
        .version = MPIDDP_VERSION,
        .in_place = MPI_IN_PLACE,
        .any_source = MPI_ANY_SOURCE,
        .error_other = MPI_ERR_OTHER,
        .comm_rank = comm_rank,
        .comm_get_name = comm_get_name,
        .when_freed = when_freed,
        .test = test,
        .testall = testall,
        .cancel = cancel,
        .isend = isend,
        .irecv = irecv,
        .improbe = improbe,
        .imrecv = imrecv,
        .status_source = status_source,
        .status_bytes = status_bytes,
        .iallreduce = iallreduce,
        .iallgather = iallgather,
        .iallgatherv = iallgatherv,
        .ialltoall = ialltoall,
        .ialltoallv = ialltoallv,
        .ibcast = ibcast,
        .op_create = op_create,
        .type_of_words = type_of_words,
    };

#define FIND_FUNCTION(name)                                                                       \
    functions.name = (__typeof__(functions.name))find(library, "MPI_" #name);                     \
    if (!functions.name) return "MPI_" #name;
    FUNCTIONS(FIND_FUNCTION)
    filled.initialized = functions.Initialized;
    filled.finalized = functions.Finalized;
    filled.get_library_version = functions.Get_library_version;
    filled.error_string = functions.Error_string;

#ifdef OMPI_MAJOR_VERSION
#define SET_HANDLE(field, symbol)                                                                 \
    filled.field = (mpiddp_handle)find(library, symbol);                                          \
    if (!filled.field) return symbol;
#else
#define SET_HANDLE(field, handle) filled.field = (mpiddp_handle)handle;
#endif
    HANDLES(SET_HANDLE)

    mpi = functions;
    table = *calls = filled;
    return NULL;
}
