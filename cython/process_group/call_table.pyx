"""What the ranks of a node call, in memory that they share: compared before anything is sent.

Note [Calls that do not fit]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
MPI does not compare what the ranks of a communicator call. If sizes differ it cuts a message,
writes beyond one or dies. So each process group has a page in the node's memory, and each of its
collectives a word there: its number, and a digest of the operation and of the sizes that must be
the same. The rank that comes first writes the word, and each later one compares. Of two ranks whose
calls do not fit together the later one finds it, and sends nothing. Nobody waits for anybody: it
costs one atomic operation on a word of the cache.

Where each rank may send another number of bytes to each, the two ends of a message compare in the
same way, in a word of their own. A gather or a scatter has one for each rank, an all_to_all one for
each two.

The page also says that the group is broken: some rank has waited in vain, or has found a
difference. Then the ranks may be at different operations, and whoever comes later sends nothing.

It covers the ranks of a node. A rank that is so far ahead that its words have replaced those of
this one's call is not compared.
"""

from zlib import crc32

from mpiddp.transports.shared_memory cimport Mapping

from mpiddp.flight_recorder.call_text import describe_dtype


cdef extern from *:
    """
    typedef unsigned long long mpiddp_word;
    static inline mpiddp_word mpiddp_word_load(const mpiddp_word *p)
    { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
    static inline void mpiddp_word_store(mpiddp_word *p, mpiddp_word v)
    { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
    static inline int mpiddp_word_replace(mpiddp_word *p, mpiddp_word old, mpiddp_word v)
    { return __atomic_compare_exchange_n(p, &old, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); }
    """
    ctypedef unsigned long long word_t "mpiddp_word"
    word_t load_word "mpiddp_word_load"(const word_t *) nogil
    void store_word "mpiddp_word_store"(word_t *, word_t) nogil
    int replace_word "mpiddp_word_replace"(word_t *, word_t, word_t) nogil


cdef enum:
    PAGES = 1024
    WORDS = 8192        # of a page: 64 KiB, of which what is never used takes no memory
    # The first words: how many ranks use the page, and at which collective the group was broken.
    MEMBERS = 0
    BROKEN_AT = 1
    FIRST = 8           # a cache line further on
    LAST = 512
    # From there on, those of messages between a root and each rank, ...
    ROOTED = 1536
    # ... and those of messages between any two ranks.
    PAIRS = WORDS - LAST - ROOTED
    # What a rank calls that raises an error of its own before anything is sent.
    REFUSED = 1

BYTES = PAGES * WORDS * sizeof(word_t)

FITS, DIFFERS, BROKEN = 0, 1, 2

# By name of an operation: its part of the digest, and whether it computes with the dtype.
_names = {}
_dtypes = {}


def call_digest(long long number, str name, detail, tensors):
    """Return a number that is the same on all ranks that call the same.

    Args:
        number: which of the group's collectives it is, from 1.
        name: the operation.
        detail: its ReduceOp, its root, a tuple of these, or None.
        tensors: those whose sizes must be the same on all ranks, and the dtypes as well if it
            computes with them.
    """
    cdef unsigned long long digest
    cdef bint computes
    known = _names.get(name)
    if known is None:
        known = _names[name] = crc32(name.encode()), "reduce" in name
    digest, computes = known
    if detail is not None:
        digest = _mixed(digest, <unsigned long long><long long>hash(detail))
    for tensor in tensors:
        digest = _mixed(digest, <unsigned long long><long long>tensor.nbytes)
        if computes:
            dtype = tensor.dtype
            code = _dtypes.get(dtype)
            if code is None:
                code = _dtypes[dtype] = crc32(describe_dtype(dtype).encode())
            digest = _mixed(digest, <unsigned long long>code)
    return _mixed(digest, <unsigned long long>number)


def code_of_name(str name):
    """Return the part of an operation's name in the digest of its calls."""
    return crc32(name.encode())


def code_of_dtype(dtype):
    """Return the part of a dtype in the digest of calls that compute with it."""
    return crc32(describe_dtype(dtype).encode())


cdef unsigned long long digest_of(
    unsigned long long name, long long detail, size_t size, int times, unsigned long long dtype,
    long long number,
) noexcept:
    cdef unsigned long long digest = name
    cdef int _tensor
    if detail != -1:    # which no hash is
        digest = _mixed(digest, <unsigned long long>detail)
    for _tensor in range(times):
        digest = _mixed(digest, size)
        if dtype:
            digest = _mixed(digest, dtype)
    return _mixed(digest, <unsigned long long>number)


def balance(Py_ssize_t rank, Py_ssize_t element_size, sent, expected):
    """Return a number whose sum over all ranks is zero if both ends of each message agree.

    Modulo 2 ** 64; else it is hardly ever zero.

    Args:
        rank: this one, in the group.
        element_size: bytes.
        sent: how many elements each rank gets.
        expected: how many each rank sends.
    """
    cdef unsigned long long total = 0
    cdef Py_ssize_t other, size = len(sent)
    for other in range(size):
        total += _mixed(rank * size + other + 1, <unsigned long long>(sent[other] * element_size))
    size = len(expected)
    for other in range(size):
        total -= _mixed(
            other * size + rank + 1, <unsigned long long>(expected[other] * element_size)
        )
    return total


cdef class CallTable:
    """The pages of all process groups in a node's memory.

    Not collective.

    Args:
        mapping: `BYTES` bytes that the ranks of the node share, at first zero.
        ranks: of the world, which share them.
        memory: a `NodeMemory` with room for as many groups, or None.
    """

    def __init__(self, Mapping mapping not None, ranks, memory=None):
        self.mapping = mapping
        self.ranks = frozenset(ranks)
        self.memory = memory

    def take(self, int members):
        """Reserve a page; return its index, -1 where there is none. Not collective.

        Args:
            members: how many ranks of the node will use and release it.
        """
        cdef word_t *words = <word_t *>self.mapping.address
        cdef Py_ssize_t index
        for index in range(PAGES):
            if replace_word(&words[index * WORDS + MEMBERS], 0, members):
                return index
        return -1

    def page(self, Py_ssize_t index):
        """Return a page that was taken. Not collective."""
        cdef CallPage page = CallPage.__new__(CallPage)
        assert 0 <= index < PAGES
        page.table = self
        page.words = <word_t *>self.mapping.address + index * WORDS
        return page


cdef class CallPage:
    """A process group's part of a `CallTable`. Not collective."""

    cpdef int enter(self, long long number, unsigned long long digest):
        """Say what this rank calls; return whether that fits what others have said.

        Args:
            number: which of the group's collectives it is, from 1.
            digest: of the call, from `call_digest`.

        Returns:
            FITS, DIFFERS, or BROKEN if the group is.
        """
        if load_word(&self.words[BROKEN_AT]):
            return BROKEN
        return self.compare(number, (digest ^ digest >> 32) & 0xFFFFFFFF | 2)

    def refuse(self, long long number):
        """Say that this rank's call has raised an error before anything was sent.

        Returns:
            DIFFERS if another rank's has not, unless the group is broken already; else FITS.
        """
        return FITS if load_word(&self.words[BROKEN_AT]) else self.compare(number, REFUSED)

    cdef int compare(self, long long number, unsigned long long digest) noexcept:
        return self.compare_word(&self.words[FIRST + number % (LAST - FIRST)], number, digest)

    def exchange(
        self, long long number, Py_ssize_t rank, sent, expected, here, Py_ssize_t root=-1
    ):
        """Say how many bytes go to each rank and are to come from each; return whose do not fit.

        Args:
            number: which of the group's collectives it is.
            rank: this one, in the group.
            sent: for each rank, the bytes that it gets.
            expected: for each rank, those that it sends.
            here: the ranks that share the page.
            root: the one from which, or to which, everything goes; -1: there is none.

        Returns:
            The first rank whose numbers differ, -1 for none. With very many ranks nothing is
            compared.
        """
        cdef Py_ssize_t size = len(sent)
        cdef Py_ssize_t sets = ROOTED // size if root >= 0 else PAIRS // (size * size)
        cdef Py_ssize_t other
        cdef word_t *words
        if sets == 0:
            return -1
        if root >= 0:
            words = &self.words[LAST + number % sets * size]
            for other in here if rank == root else [root] if root in here else []:
                # One of the two is nothing.
                if other != rank and self.compare_word(
                    &words[rank if other == root else other], number,
                    _folded(sent[other] + expected[other]),
                ):
                    return other
            return -1
        words = &self.words[LAST + ROOTED + number % sets * size * size]
        for other in here:
            if other != rank and (
                self.compare_word(&words[rank * size + other], number, _folded(sent[other]))
                or self.compare_word(&words[other * size + rank], number, _folded(expected[other]))
            ):
                return other
        return -1

    cdef int compare_word(
        self, unsigned long long *word, long long number, unsigned long long digest
    ) noexcept:
        cdef word_t own = (<word_t>number) << 32 | digest
        cdef word_t seen
        while True:
            seen = load_word(word)
            if seen and seen >> 32 == own >> 32:
                return FITS if seen == own else DIFFERS
            if seen and <int>((seen >> 32) - (own >> 32)) > 0:
                return FITS     # not to be known
            if replace_word(word, seen, own):
                return FITS

    def break_at(self, long long number):
        """Say that the group is broken since that collective, unless it is already."""
        replace_word(&self.words[BROKEN_AT], 0, max(number, 1))

    @property
    def broken(self):
        """Since which collective the group is broken, 0 if it is not."""
        return load_word(&self.words[BROKEN_AT])

    def release(self, memory=None):
        """Use it no more; the last rank leaves it to another group. Harmless when called twice.

        Args:
            memory: of the group, which goes with it.
        """
        cdef Py_ssize_t index
        cdef word_t members
        if self.released:
            return
        self.released = True
        while True:
            members = load_word(&self.words[MEMBERS])
            if members <= 1:
                if memory is not None:
                    memory.clear()
                for index in range(1, WORDS):
                    store_word(&self.words[index], 0)
                store_word(&self.words[MEMBERS], 0)
                return
            if replace_word(&self.words[MEMBERS], members, members - 1):
                return


cdef inline unsigned long long _folded(long long count) noexcept:
    """Return a number of bytes in 32 bits, never zero."""
    return (<unsigned long long>count ^ <unsigned long long>count >> 31) & 0x7FFFFFFF | 0x80000000U


cdef inline unsigned long long _mixed(unsigned long long digest, unsigned long long value) noexcept:
    """Return a digest of one more number; as in FNV-1a, in words instead of bytes."""
    digest = (digest ^ value) * 0x100000001B3ULL
    return digest ^ digest >> 29
