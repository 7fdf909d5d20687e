"""Which pages of a file that a process has mapped as private are its own, as Linux tells it."""

import os

cdef enum:
    PAGE = 4096                     # or a multiple of it
    PAGES_AT_ONCE = 1 << 16         # of those that the kernel is asked about

# Of an entry of /proc/self/pagemap: in memory or swapped out; of the file.
cdef unsigned long long PRESENT = 3ULL << 62
cdef unsigned long long OF_FILE = 1ULL << 61


cdef object own_pages(size_t address, Py_ssize_t start, Py_ssize_t end):
    cdef size_t first = (address + start) // PAGE
    cdef size_t count = (<size_t>(end - start) + PAGE - 1) // PAGE
    cdef size_t done = 0, at, found
    cdef const unsigned long long[::1] entries
    cdef unsigned long long entry
    own = []
    try:
        if os.sysconf("SC_PAGE_SIZE") != PAGE:
            raise OSError("its entries are of other pages")
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            while done < count:
                found = min(<size_t>PAGES_AT_ONCE, count - done)
                some = os.pread(descriptor, 8 * found, 8 * (first + done))
                if len(some) < 8:
                    raise OSError("it ends too early")
                found = len(some) // 8
                entries = memoryview(some)[:8 * found].cast("Q")
                for at in range(found):
                    entry = entries[at]
                    if entry & PRESENT and not entry & OF_FILE:
                        own.append(start + <Py_ssize_t>(done + at) * PAGE)
                done += found
        finally:
            os.close(descriptor)
    except OSError:
        return range(start, end, PAGE)
    return own
