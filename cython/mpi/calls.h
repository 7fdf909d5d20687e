/* What compiled code uses of MPI: a table of functions and constants, the same for every MPI.
 *
 * Note [MPI through one door]
 * MPIs differ in what their handles are (numbers or addresses), in their constants and in the layout
 * of a status. So code that includes mpi.h runs on the MPIs of one binary interface only. Here only
 * binary_interface.c includes it, which is compiled once for each interface and knows nothing of
 * Python. Everything else calls MPI by this table, with handles as numbers of the size of an address
 * (as mpi4py's `handle` gives them), and is compiled once. When the package is imported, the file
 * for the interface of the MPI that mpi4py uses fills the table (calls.pyx, compatibility.py).
 *
 * The functions are found in that MPI by their names, as the loader would do, and so a tool is
 * found first that puts itself before MPI (LD_PRELOAD, as Score-P and mpiP do). Nothing links an
 * MPI: libraries of one interface have several names (libmpi.so.12, libmpich.so.12).
 */
#ifndef MPIDDP_CALLS_H
#define MPIDDP_CALLS_H

#include <stdint.h>

/* A communicator, request, message, datatype or operation. */
typedef intptr_t mpiddp_handle;

/* Room for the MPI_Status of any MPI. */
typedef struct {
    _Alignas(8) char room[64];
} mpiddp_status;

/* Combines numbers, as MPI_User_function, whose last argument has another type for each MPI. */
typedef void (*mpiddp_combine_t)(void *, void *, int *, void *);

/* As much as the MPI_MAX_... of any MPI. */
enum { MPIDDP_LONGEST_TEXT = 8192, MPIDDP_LONGEST_NAME = 512 };

struct mpiddp_calls {
    const char *interface; /* of which_mpi.h, as are the next two */
    const char *vendor;
    const char *version;

    mpiddp_handle comm_null, comm_self, comm_world, request_null;
    mpiddp_handle byte, float32, float64, uint64, datatype_null, sum;
    void *in_place;
    int any_source, error_other;

    int (*initialized)(int *);
    int (*finalized)(int *);
    int (*get_library_version)(char *, int *);
    int (*error_string)(int, char *, int *);
    int (*comm_rank)(mpiddp_handle, int *);
    int (*comm_get_name)(mpiddp_handle, char *, int *);
    /* Calls a function with an argument when the communicator is freed. */
    int (*when_freed)(mpiddp_handle, void (*)(void *), void *);

    int (*test)(mpiddp_handle *, int *, mpiddp_status *);
    int (*testall)(int, mpiddp_handle *, int *);
    int (*cancel)(mpiddp_handle *);
    int (*isend)(const void *, int, mpiddp_handle, int, int, mpiddp_handle, mpiddp_handle *);
    int (*irecv)(void *, int, mpiddp_handle, int, int, mpiddp_handle, mpiddp_handle *);
    int (*improbe)(int, int, mpiddp_handle, int *, mpiddp_handle *, mpiddp_status *);
    int (*imrecv)(void *, int, mpiddp_handle, mpiddp_handle *, mpiddp_handle *);
    int (*status_source)(const mpiddp_status *);
    int (*status_bytes)(const mpiddp_status *, long long *);

    int (*iallreduce)(const void *, void *, int, mpiddp_handle, mpiddp_handle, mpiddp_handle,
                      mpiddp_handle *);
    int (*iallgather)(const void *, int, mpiddp_handle, void *, int, mpiddp_handle, mpiddp_handle,
                      mpiddp_handle *);
    int (*iallgatherv)(const void *, int, mpiddp_handle, void *, const int *, const int *,
                       mpiddp_handle, mpiddp_handle, mpiddp_handle *);
    int (*ialltoall)(const void *, int, mpiddp_handle, void *, int, mpiddp_handle, mpiddp_handle,
                     mpiddp_handle *);
    int (*ialltoallv)(const void *, const int *, const int *, mpiddp_handle, void *, const int *,
                      const int *, mpiddp_handle, mpiddp_handle, mpiddp_handle *);
    int (*ibcast)(void *, int, mpiddp_handle, int, mpiddp_handle, mpiddp_handle *);

    int (*op_create)(mpiddp_combine_t, int, mpiddp_handle *);
    /* Makes a datatype of so many unsigned 64-bit numbers, ready for use. */
    int (*type_of_words)(int, mpiddp_handle *);
};

/* Fill the table from what `library`, or a library that it needs, has of MPI. Returns NULL, or the
 * name of what it lacks. */
typedef const char *mpiddp_fill_t(struct mpiddp_calls *, void *library);

#endif
