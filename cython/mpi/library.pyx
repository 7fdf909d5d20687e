"""Which MPI this package was compiled against, and which one it is linked to.

Importing this module or calling its functions does not initialise MPI.
"""

from mpi4py.libmpi cimport MPI_Get_library_version, MPI_MAX_LIBRARY_VERSION_STRING

cdef extern from *:
    """
    #define MPIDDP_STRING_(x) #x
    #define MPIDDP_STRING(x) MPIDDP_STRING_(x)
    #if defined(OMPI_MAJOR_VERSION)
    #define MPIDDP_VENDOR "Open MPI"
    #define MPIDDP_VERSION \
        MPIDDP_STRING(OMPI_MAJOR_VERSION) "." MPIDDP_STRING(OMPI_MINOR_VERSION) "." \
        MPIDDP_STRING(OMPI_RELEASE_VERSION)
    #elif defined(I_MPI_VERSION)
    #define MPIDDP_VENDOR "Intel MPI"
    #define MPIDDP_VERSION I_MPI_VERSION
    #elif defined(MVAPICH_VERSION)
    #define MPIDDP_VENDOR "MVAPICH"
    #define MPIDDP_VERSION MVAPICH_VERSION
    #elif defined(MVAPICH2_VERSION)
    #define MPIDDP_VENDOR "MVAPICH2"
    #define MPIDDP_VERSION MVAPICH2_VERSION
    #elif defined(MPICH_VERSION)
    #define MPIDDP_VENDOR "MPICH"
    #define MPIDDP_VERSION MPICH_VERSION
    #elif defined(MPI_ABI_VERSION) && MPI_ABI_VERSION > 0
    /* mpicc_abi: the header of the standard names no library. */
    #define MPIDDP_VENDOR "MPI ABI"
    #define MPIDDP_VERSION \
        MPIDDP_STRING(MPI_ABI_VERSION) "." MPIDDP_STRING(MPI_ABI_SUBVERSION)
    #else
    #define MPIDDP_VENDOR "unknown"
    #define MPIDDP_VERSION "0"
    #endif
    """
    const char *MPIDDP_VENDOR
    const char *MPIDDP_VERSION


def compiled_against():
    """Return vendor and version of the MPI whose mpi.h this build was compiled with.

    Not collective.

    Returns:
        A pair such as ``("Open MPI", "5.0.11")``.
    """
    return MPIDDP_VENDOR.decode(), MPIDDP_VERSION.decode()


def linked_version():
    """Return the version string of the MPI library that this module is linked to.

    Not collective. `MPI_Get_library_version` may be called before initialisation
    (MPI-4.0, section 9.1.1).
    """
    cdef char text[MPI_MAX_LIBRARY_VERSION_STRING + 1]
    cdef int length = 0
    MPI_Get_library_version(text, &length)
    return text[:length].decode(errors="replace")
