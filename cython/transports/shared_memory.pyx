"""Memory that the ranks of a node share: one piece per rank, mapped by all of them.

Note [Anonymous files instead of windows]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each rank makes its piece as an anonymous file (memfd_create) and the others open it
through /proc. Compared with MPI_Win_allocate_shared: MPI prints nothing and starts no
progress thread, the limits on /dev/shm in containers do not apply, nothing is left behind
when a job is killed, and each piece lives as long as anybody maps it, so that a gradient
may outlive its model and garbage collection is never collective.
posix_fallocate takes the pages at once: too little memory is an error here instead of a
bus error in backward.

Note [Which pages]
~~~~~~~~~~~~~~~~~~
Linux takes a page from the memory of the NUMA node on which the thread runs that first asks for it.
So each rank takes all pages of its own piece before the others know of it. From 2 MB on it asks for
large pages. Where the kernel gives them to who asks (`advise` in
/sys/kernel/mm/transparent_hugepage/shmem_enabled), posix_fallocate does not ask: a page fault in
memory that was so advised does. So the pages are populated through the mapping first.

Note [Memory in forked children]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A child of fork() has the same mappings, so all ranks would train with what it wrote to a gradient.
Therefore each rank keeps the file of its own piece open, and in a child that piece is mapped anew
at the same address, as private. The child reads what is there. As long as it writes nothing, it
also sees what its parent writes later; what it writes, nobody else sees. Nothing is copied at the
fork.
That keeps the pages for as long as the child lives. So it is done only where a gradient of the user
may lie there (`given_out`). Workers of a data loader, mostly forked before the first backward, get
zeros that are their own, and keep no page of buckets that their parent has given back. The pieces
of other ranks are taken from the child; only the reducer knows their addresses.
All calls of the C library's fork() are seen, so those from libraries in other languages too.

Note [One piece for all]
~~~~~~~~~~~~~~~~~~~~~~~~
Parameters that a node's ranks share lie in one piece (`allocate_common`), because a parameter may
belong to several ranks. Each rank takes the pages of its own ranges, and keeps a descriptor: to map
the piece as private (`make_private`). Then what this process writes there stays its own, page by
page, and in all other pages it sees what is written through `another` mapping of the file. Linux
tells which pages are a process's own. One rank may put its own into the file (`keep_writes`); who
maps the file again has none any more.
"""

import os

from cpython.buffer cimport PyBuffer_FillInfo
from libc.errno cimport errno
from libc.string cimport memcmp, memcpy

from mpiddp.mpi.errors cimport check_errno
from mpiddp.system.posix cimport (
    pthread_atfork, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock,
)
from mpiddp.system.own_pages cimport own_pages
from mpiddp.system import memory_files


cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *, size_t, int, int, int, long long)
    int munmap(void *, size_t)
    int madvise(void *, size_t, int)
    const int PROT_NONE
    const int PROT_READ
    const int PROT_WRITE
    const int MAP_ANONYMOUS
    const int MAP_FIXED
    const int MAP_NORESERVE
    const int MAP_PRIVATE
    const int MAP_SHARED
    void *MAP_FAILED

cdef extern from "<sys/stat.h>" nogil:
    struct file_status "stat":
        unsigned long long st_dev
        unsigned long long st_ino
    int fstat(int, file_status *)

cdef extern from "<unistd.h>" nogil:
    int close(int)

cdef extern from *:
    """
    #ifndef MADV_HUGEPAGE
    #define MADV_HUGEPAGE 14
    #endif
    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23      /* Linux 5.14 */
    #endif
    """
    const int MADV_DONTNEED
    const int MADV_HUGEPAGE
    const int MADV_POPULATE_WRITE

cdef enum:
    PAGE = 4096                     # or a multiple of it
    LARGE_PAGES_FROM = 1 << 21

# All mappings of this process, and the lock of that list, which a fork holds too.
cdef Segment *segments = NULL
cdef pthread_mutex_t segments_lock


cdef void before_fork() noexcept nogil:
    pthread_mutex_lock(&segments_lock)


cdef void after_fork() noexcept nogil:
    pthread_mutex_unlock(&segments_lock)


cdef int is_open(Segment *segment) noexcept nogil:
    """Return whether the descriptor is still that of the file: programs may close all they find."""
    cdef file_status status
    return (
        segment.descriptor >= 0
        and fstat(segment.descriptor, &status) == 0
        and status.st_dev == segment.device
        and status.st_ino == segment.inode
    )


cdef void after_fork_in_child() noexcept nogil:
    """Take all mappings out of the memory that the ranks share; no other thread runs yet."""
    cdef Segment *segment = segments
    cdef int kept, access
    while segment != NULL:
        kept = False
        access = PROT_NONE
        if is_open(segment):
            if segment.own_writes:
                kept = True         # the child's from now on, with what the parent has written
            elif segment.given_out:
                kept = mmap(
                    segment.address, segment.size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, segment.descriptor, 0,
                ) != MAP_FAILED
            else:
                access = PROT_READ | PROT_WRITE     # for flags that the reducer sets in a forward
            close(segment.descriptor)
            segment.descriptor = -1
        if not kept and not segment.private:
            # The addresses stay taken, so that `munmap` finds nobody else's memory there.
            mmap(
                segment.address, segment.size, access,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0,
            )
        segment.private = True
        segment = segment.next
    pthread_mutex_unlock(&segments_lock)


check_errno(pthread_mutex_init(&segments_lock, NULL), "pthread_mutex_init")
check_errno(pthread_atfork(before_fork, after_fork, after_fork_in_child), "pthread_atfork")


cdef class Mapping:
    """One file in memory, as a writable buffer of bytes; unmapped with its last user.

    Not collective.

    Args:
        descriptor: of the file; it may be closed afterwards, unless it is `own`.
        size: in bytes.
        own: the descriptor is closed with the mapping. Forked children may keep the content, see
            Note [Memory in forked children].
        populate: take all pages, see Note [Which pages].

    Raises:
        OSError: the file cannot be mapped.
    """

    def __init__(self, int descriptor, Py_ssize_t size, *, bint own=False, bint populate=False):
        cdef Segment *segment = &self.segment
        cdef file_status status
        cdef void *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0)
        if address == MAP_FAILED:
            raise OSError(errno, f"mmap of {size} bytes: {os.strerror(errno)}")
        self.address = <char *>address
        self.size = size
        if size >= LARGE_PAGES_FROM:
            # Not every kernel can, none need.
            madvise(address, size, MADV_HUGEPAGE)
            if populate:
                madvise(address, size, MADV_POPULATE_WRITE)
        segment.address = self.address
        segment.size = size
        segment.descriptor = -1
        if own and fstat(descriptor, &status) == 0:
            segment.device = status.st_dev
            segment.inode = status.st_ino
            segment.descriptor = descriptor
        self._enlist()

    def __dealloc__(self):
        if self.address != NULL:
            self._strike_off()
            munmap(self.address, self.size)
            if is_open(&self.segment):
                close(self.segment.descriptor)

    cdef void _enlist(self) noexcept nogil:
        global segments
        pthread_mutex_lock(&segments_lock)
        self.segment.next = segments
        if segments != NULL:
            segments.previous = &self.segment
        segments = &self.segment
        pthread_mutex_unlock(&segments_lock)

    cdef void _strike_off(self) noexcept nogil:
        global segments
        pthread_mutex_lock(&segments_lock)
        if self.segment.previous == NULL:
            segments = self.segment.next
        else:
            self.segment.previous.next = self.segment.next
        if self.segment.next != NULL:
            self.segment.next.previous = self.segment.previous
        pthread_mutex_unlock(&segments_lock)

    def make_private(self):
        """Let what this process writes from now on be its own, see Note [One piece for all].

        Not collective.

        Raises:
            OSError: the kernel refuses.
        """
        self._map_private(self.segment.descriptor)
        self.segment.own_writes = True

    cdef _map_private(self, int descriptor):
        if mmap(
            self.address, self.size, PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, descriptor, 0,
        ) == MAP_FAILED:
            raise OSError(errno, f"mmap of {self.size} bytes: {os.strerror(errno)}")
        if self.size >= LARGE_PAGES_FROM:
            madvise(self.address, self.size, MADV_HUGEPAGE)

    def another(self, *, bint private=False):
        """Return another mapping of the same file. Not collective.

        Args:
            private: what this process writes there stays its own; else it is shared.

        Raises:
            OSError: the kernel refuses to map the file.
        """
        cdef Mapping mapping = Mapping(self.segment.descriptor, self.size)
        if private:
            mapping._map_private(self.segment.descriptor)
            mapping.segment.private = True      # of a child, too, as it is at the fork
        return mapping

    def changes(self, Mapping file not None):
        """Return where this process sees something else than what is in the file.

        Not collective.

        Args:
            file: another mapping of the file, which is shared.

        Returns:
            A number that stands for what is different and where, 0 for nothing; and first and last
            byte (exclusive) of each page that is.
        """
        cdef unsigned long long digest = 14695981039346656037ULL    # as FNV-1a begins
        cdef size_t start, size, at
        cdef unsigned long long word
        pages = []
        for start in own_pages(<size_t>self.address, 0, self.size):
            size = min(<size_t>PAGE, <size_t>self.size - start)
            if not memcmp(file.address + start, self.address + start, size):
                continue
            pages.append((start, start + size))
            digest = (digest ^ start) * 1099511628211ULL
            for at in range(0, size, 8):
                word = 0
                memcpy(&word, self.address + start + at, min(<size_t>8, size - at))
                digest = (digest ^ word) * 1099511628211ULL
                digest ^= digest >> 29
        return (digest if pages else 0), pages

    def keep_writes(self, Mapping file not None):
        """Put what this process has written since `make_private` into the file. Not collective.

        Args:
            file: another mapping of the file, which is shared.
        """
        cdef size_t start, size
        for start in own_pages(<size_t>self.address, 0, self.size):
            size = min(<size_t>PAGE, <size_t>self.size - start)
            if memcmp(file.address + start, self.address + start, size):
                memcpy(file.address + start, self.address + start, size)

    def forget_writes(self):
        """See again what is in the file, after `make_private`. Not collective.

        Raises:
            OSError: the kernel refuses.
        """
        cdef size_t start, end
        for start, end in self.own_ranges(0, self.size):
            if madvise(self.address + start, end - start, MADV_DONTNEED):
                raise OSError(errno, f"madvise: {os.strerror(errno)}")

    def own_ranges(self, Py_ssize_t start, Py_ssize_t end):
        """Return first and last byte (exclusive) of what may be this process's own, in order.

        Not collective. Of what lies between two bytes, the first at the begin of a page.
        """
        own = own_pages(<size_t>self.address, start, end)
        return _whole_pages((page, page + 1) for page in own)

    def has_own_pages(self):
        """Return whether this process has written there since `make_private`. Not collective.

        True, too, where the kernel does not tell.
        """
        return bool(own_pages(<size_t>self.address, 0, self.size))

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.address, self.size, 0, flags)


def allocate(node, Py_ssize_t size):
    """Return mappings of every rank's piece of `size` zero bytes, in order of rank.

    Collective over `node`.

    Args:
        node: an mpi4py communicator whose ranks share memory.
        size: bytes of each piece, greater than zero, the same on all ranks.

    Raises:
        OSError: some rank cannot make or map some piece, or asks for another size; raised on
            all ranks.
    """
    cdef Py_ssize_t rank
    cdef Mapping own = None
    problem = path = ""
    identity = None
    mappings = []
    try:
        own = _make(size)
        path = f"/proc/{os.getpid()}/fd/{own.segment.descriptor}"
        identity = own.segment.device, own.segment.inode
    except (AttributeError, MemoryError, OSError) as error:
        problem = f"cannot make {size} bytes of shared memory: {error}"
    pieces = node.allgather((path, identity, size, problem))
    sizes = [their_size for _, _, their_size, _ in pieces]
    if len(set(sizes)) > 1:
        problem = f"sees ranks ask for different sizes of shared memory, in bytes: {sizes}"
    elif not any(text for _, _, _, text in pieces):
        try:
            for rank, (path, expected, _, _) in enumerate(pieces):
                mappings.append(
                    own if rank == node.Get_rank() else _map(path, expected, size)
                )
        except (MemoryError, OSError) as error:
            problem = f"cannot map the memory of rank {rank} of the node: {error}"
    _raise_problems(node, problem)
    return mappings


def allocate_common(node, Py_ssize_t size, ranges):
    """Return a mapping of one piece of `size` zero bytes that all ranks of a node share.

    Collective over `node`. See Note [One piece for all].

    Args:
        node: an mpi4py communicator whose ranks share memory.
        size: in bytes, greater than zero, the same on all ranks.
        ranges: pairs of first and last byte (exclusive) whose pages this rank takes. Pages that no
            rank takes cost nothing until somebody writes there.

    Raises:
        OSError: some rank cannot map the piece or take its pages; raised on all ranks.
    """
    cdef Mapping mapping = None
    descriptor = -1
    problem = ""
    found = None
    if node.Get_rank() == 0:
        try:
            descriptor = memory_files.create("mpiddp")
            os.ftruncate(descriptor, size)
            found = f"/proc/{os.getpid()}/fd/{descriptor}", _identity(descriptor)
        except (AttributeError, OSError) as error:
            problem = f"cannot make {size} bytes of shared memory: {error}"
    found = node.bcast(found)
    if found is not None:
        try:
            if descriptor < 0:
                descriptor = _open(*found)
            mapping = Mapping(descriptor, size, own=True)
            mapping.segment.given_out = True
            for start, end in _whole_pages(ranges):
                if end - start >= LARGE_PAGES_FROM:
                    madvise(mapping.address + <size_t>start, end - start, MADV_POPULATE_WRITE)
                os.posix_fallocate(descriptor, start, min(end, size) - start)
        except (MemoryError, OSError) as error:
            problem = f"cannot map {size} bytes of shared memory: {error}"
    if mapping is None and descriptor >= 0:
        os.close(descriptor)
    _raise_problems(node, problem)
    return mapping


def _whole_pages(ranges):
    """Return ranges of bytes as ranges of pages, those that touch each other joined."""
    joined = []
    open_start = open_end = 0
    for start, end in sorted(ranges):
        start, end = start // PAGE * PAGE, -(-end // PAGE) * PAGE
        if start <= open_end:
            open_end = max(end, open_end)
            continue
        if open_end > open_start:
            joined.append((open_start, open_end))
        open_start, open_end = start, end
    if open_end > open_start:
        joined.append((open_start, open_end))
    return joined


def _raise_problems(node, problem):
    """Raise on all ranks what some rank has met. Collective over `node`."""
    problems = [
        f"rank {rank} of the {node.Get_size()} on {os.uname().nodename} {text}"
        for rank, text in enumerate(node.allgather(problem)) if text
    ]
    if problems:
        raise OSError(problems[0])


def _make(Py_ssize_t size):
    """Return the mapping of a new piece, with all its pages."""
    cdef Mapping own
    descriptor = memory_files.create("mpiddp")
    try:
        os.ftruncate(descriptor, size)
        own = Mapping(descriptor, size, own=True, populate=True)
    except BaseException:
        os.close(descriptor)
        raise
    os.posix_fallocate(descriptor, 0, size)
    return own


def _identity(descriptor):
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _open(path, expected):
    """Return a descriptor of another rank's file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    # In another container the same path may lead to another process.
    if _identity(descriptor) != tuple(expected):
        os.close(descriptor)
        raise OSError(f"{path} is another file: do the ranks see the same processes?")
    return descriptor


def _map(path, expected, size):
    descriptor = _open(path, expected)
    try:
        return Mapping(descriptor, size)
    finally:
        os.close(descriptor)
