/* Which MPI the headers are of: whose, which version, and which binary interface. After mpi.h.
 *
 * MPIs of one binary interface have the same handles, constants and structures, whoever made them:
 * "openmpi" is Open MPI's since 3.0 and of what is derived from it, "mpich" that of the MPICH ABI
 * compatibility initiative (MPICH since 3.1, Intel MPI, Cray MPICH, MVAPICH, ParaStation), "mpiabi"
 * that of the MPI standard (MPI-5.0, chapter 20). Of any other it is not known who shares it.
 */
#ifndef MPIDDP_WHICH_MPI_H
#define MPIDDP_WHICH_MPI_H

#define MPIDDP_STRING_(x) #x
#define MPIDDP_STRING(x) MPIDDP_STRING_(x)

#if defined(OMPI_MAJOR_VERSION)
#define MPIDDP_INTERFACE "openmpi"
#define MPIDDP_VENDOR "Open MPI"
#define MPIDDP_VERSION                                                                            \
    MPIDDP_STRING(OMPI_MAJOR_VERSION)                                                             \
    "." MPIDDP_STRING(OMPI_MINOR_VERSION) "." MPIDDP_STRING(OMPI_RELEASE_VERSION)
#elif defined(I_MPI_VERSION)
#define MPIDDP_INTERFACE "mpich"
#define MPIDDP_VENDOR "Intel MPI"
#define MPIDDP_VERSION I_MPI_VERSION
#elif defined(MVAPICH_VERSION)
#define MPIDDP_INTERFACE "mpich"
#define MPIDDP_VENDOR "MVAPICH"
#define MPIDDP_VERSION MVAPICH_VERSION
#elif defined(MVAPICH2_VERSION)
#define MPIDDP_INTERFACE "mpich"
#define MPIDDP_VENDOR "MVAPICH2"
#define MPIDDP_VERSION MVAPICH2_VERSION
#elif defined(MPICH_VERSION)
#define MPIDDP_INTERFACE "mpich"
#define MPIDDP_VENDOR "MPICH"
#define MPIDDP_VERSION MPICH_VERSION
#elif defined(MPI_ABI_VERSION) && MPI_ABI_VERSION > 0
/* mpicc_abi: the header of the standard names no library. */
#define MPIDDP_INTERFACE "mpiabi"
#define MPIDDP_VENDOR "MPI ABI"
#define MPIDDP_VERSION MPIDDP_STRING(MPI_ABI_VERSION) "." MPIDDP_STRING(MPI_ABI_SUBVERSION)
#else
#define MPIDDP_INTERFACE "other"
#define MPIDDP_VENDOR "unknown"
#define MPIDDP_VERSION "0"
#endif

#endif
