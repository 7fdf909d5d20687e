from libc.stdint cimport uint64_t


cdef extern from "blocks.h":
    ctypedef struct block_t "struct mpiddp_block":
        uint64_t digest
        uint64_t balance
        unsigned int differs
        unsigned short way
        unsigned short bytes
        uint64_t *data


cdef class Block:
    cdef block_t *block
