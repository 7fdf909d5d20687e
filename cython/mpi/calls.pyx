"""The one door to MPI of compiled code: a table of functions, filled when the package is imported.

See Note [MPI through one door] in calls.h. Nothing here initialises MPI.
"""

cdef extern from "<dlfcn.h>":
    int RTLD_LAZY
    int RTLD_NOW
    int RTLD_LOCAL
    void *dlopen(const char *, int)
    void *dlsym(void *, const char *)
    const char *dlerror()

cdef extern from "calls.h":
    ctypedef const char *(*Fill "mpiddp_fill_t *")(Calls *, void *)


cdef void *_open(str path, int mode) except NULL:
    # Never closed: the table points there.
    cdef void *library = dlopen(path.encode(), mode | RTLD_LOCAL)
    if library == NULL:
        raise ImportError(dlerror().decode(errors="replace"))
    return library


def load(str path):
    """Load a file, and what it needs, before somebody else looks for it. Not collective.

    Raises:
        ImportError: the loader's words, if it cannot.
    """
    _open(path, RTLD_LAZY)


def fill(str interface, str module):
    """Fill the table. Not collective, and does not initialise MPI.

    Args:
        interface: the file that was compiled for the binary interface of this MPI.
        module: a file that needs the library of this MPI, such as mpi4py's; it is loaded, not run.

    Raises:
        ImportError: one of the files cannot be loaded, or the MPI lacks a function.
    """
    cdef Fill fill_table = <Fill>dlsym(_open(interface, RTLD_NOW), "mpiddp_fill")
    cdef const char *missing
    if fill_table == NULL:
        raise ImportError(f"{interface} is no file of mpiddp")
    missing = fill_table(&mpi, _open(module, RTLD_LAZY))
    if missing != NULL:
        raise ImportError(f"the MPI that {module} uses has no {missing.decode()}")
