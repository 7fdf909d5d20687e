"""For which MPIs the file is that fills the table of calls, and which MPI is called.

Importing this module or calling its functions does not initialise MPI.
"""

from mpiddp.mpi.calls cimport LONGEST_TEXT, mpi


def compiled_against():
    """Return vendor and version of the MPI whose mpi.h was used for what calls MPI here.

    Every MPI of the same binary interface will do: see `interface`. Not collective.

    Returns:
        A pair such as ``("Open MPI", "5.0.11")``.
    """
    return mpi.vendor.decode(), mpi.version.decode()


def interface():
    """Return the name of the binary interface of the MPI that is called. Not collective.

    Returns:
        "openmpi", "mpich" (of Intel MPI, Cray MPICH, MVAPICH and ParaStation, too), "mpiabi" (of
        the MPI standard) or "other".
    """
    return mpi.interface.decode()


def linked_version():
    """Return the version string of the MPI library that is called.

    Not collective. `MPI_Get_library_version` may be called before initialisation
    (MPI-4.0, section 9.1.1).
    """
    cdef char text[LONGEST_TEXT + 1]
    cdef int length = 0
    mpi.get_library_version(text, &length)
    return text[:length].decode(errors="replace")
