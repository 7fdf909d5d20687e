/* The message of Note [Calls in a block], and how MPI combines those of two ranks. */
#ifndef MPIDDP_BLOCKS_H
#define MPIDDP_BLOCKS_H

#include "combining.h"

#define MPIDDP_BLOCK_BYTES 1024

struct mpiddp_block {
    uint64_t digest;
    uint64_t balance; /* of sizes that are sent, less those that are expected */
    uint32_t differs;
    uint16_t way; /* of mpiddp_ways, from 1; 0: no data */
    uint16_t bytes;
    uint64_t data[MPIDDP_BLOCK_BYTES / 8 - 3];
};

static void mpiddp_combine_blocks(const void *theirs, void *ours, int count)
{
    for (int i = 0; i < count; i++) {
        const struct mpiddp_block *their = (const struct mpiddp_block *)theirs + i;
        struct mpiddp_block *our = (struct mpiddp_block *)ours + i;
        our->balance += their->balance;
        our->differs |= their->differs | (their->digest != our->digest) |
                        (their->way != our->way) | (their->bytes != our->bytes);
        if (our->way && !our->differs) {
            const struct mpiddp_way *way = &mpiddp_ways[our->way - 1];
            way->combine(their->data, our->data, our->bytes / way->size);
        }
    }
}

#endif
