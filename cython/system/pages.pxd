# Pages of memory that a process gives back, and gets again, full of zeros, at the next write.

cdef extern from *:
    """
    #include <stdint.h>
    #include <sys/mman.h>
    #include <unistd.h>

    /* The file's pages where the memory is shared, this process's own where it is not. */
    static inline void mpiddp_give_back(char *start, size_t bytes)
    {
        uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
        uintptr_t first = ((uintptr_t)start + page - 1) & ~(page - 1);
        uintptr_t end = ((uintptr_t)start + bytes) & ~(page - 1);
        if (first < end && madvise((void *)first, end - first, MADV_REMOVE) != 0)
            madvise((void *)first, end - first, MADV_DONTNEED);
    }
    """
    # All whole pages within these bytes. Where the kernel cannot, they stay as they are.
    void give_back "mpiddp_give_back"(char *start, size_t bytes_) noexcept nogil
