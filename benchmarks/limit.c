/* The limit: what averaging gradients in a node's memory costs when there is nothing else.
 *
 * No hooks, no queue, no thread, no Python: a loop over buckets. For each bucket every rank
 * copies its gradients into its own part of the shared memory, the ranks meet, and each rank
 * averages its slice of all ranks' parts and writes the mean into all of them. At the end of
 * the step the ranks meet once more. With views that is all, because the means lie where
 * .grad points; without views they are copied back to the gradients.
 *
 * The copy into the bucket is part of it also with views: zero_grad() drops the gradients by
 * default, so autograd makes new ones in each step. */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A pause takes some 25 ns. Where ranks share cores, who spins keeps another from coming. */
enum { SPINS = 1000, SPINS_ON_SHARED_CORES = 20, YIELDS = 50, BLOCK = 1024 };

struct meeting {                    /* at the start of the shared memory, zero at first */
    _Alignas(64) atomic_uint arrived;
    _Alignas(64) atomic_uint generation;
    atomic_uint sleepers;
};

static void meet(struct meeting *m, unsigned ranks)
{
    unsigned generation = atomic_load(&m->generation);
    static long cores;              /* asked once: it is a system call */
    if (!cores) cores = sysconf(_SC_NPROCESSORS_ONLN);
    int spins = cores < (long)ranks ? SPINS_ON_SHARED_CORES : SPINS;
    if (atomic_fetch_add(&m->arrived, 1) + 1 == ranks) {
        atomic_store(&m->arrived, 0);
        atomic_store(&m->generation, generation + 1);
        if (atomic_load(&m->sleepers))
            syscall(SYS_futex, &m->generation, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
        return;
    }
    for (int i = 0; i < spins; i++) {
        if (atomic_load_explicit(&m->generation, memory_order_acquire) != generation) return;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    for (int i = 0; i < YIELDS; i++) {
        if (atomic_load(&m->generation) != generation) return;
        sched_yield();
    }
    atomic_fetch_add(&m->sleepers, 1);
    while (atomic_load(&m->generation) == generation)
        syscall(SYS_futex, &m->generation, FUTEX_WAIT, generation, NULL, NULL, 0);
    atomic_fetch_sub(&m->sleepers, 1);
}

/* Write the mean of elements [begin, end) of all parts into all parts. */
static void mean(float *const *parts, unsigned ranks, size_t begin, size_t end)
{
    float scale = 1.0f / (float)ranks;
    if (ranks == 2) {
        float *restrict a = parts[0], *restrict b = parts[1];
        for (size_t i = begin; i < end; i++) {
            float m = (a[i] + b[i]) * scale;
            a[i] = m;
            b[i] = m;
        }
        return;
    }
    for (size_t i = begin; i < end; i += BLOCK) {
        float sum[BLOCK];
        size_t n = end - i < BLOCK ? end - i : BLOCK;
        memcpy(sum, parts[0] + i, n * sizeof(float));
        for (unsigned r = 1; r < ranks; r++) {
            const float *restrict part = parts[r] + i;
            for (size_t k = 0; k < n; k++) sum[k] += part[k];
        }
        for (size_t k = 0; k < n; k++) sum[k] *= scale;
        for (unsigned r = 0; r < ranks; r++) memcpy(parts[r] + i, sum, n * sizeof(float));
    }
}

/* One step. gradients[p] holds sizes[p] floats; bucket b is made of the parameters from
 * ends[b - 1] (0 for the first) to ends[b], and parts[r] is rank r's memory for all of them,
 * end to end. gradients may be NULL: then the buckets hold the gradients already. */
void limit_step(struct meeting *m, float *const *parts, unsigned ranks, unsigned rank,
                float *const *gradients, const size_t *sizes, const size_t *ends,
                size_t buckets, int copy_back)
{
    size_t p = 0, offset = 0;
    for (size_t b = 0; b < buckets; b++) {
        size_t begin = offset;
        for (; p < ends[b]; p++) {
            if (gradients) memcpy(parts[rank] + offset, gradients[p], sizes[p] * sizeof(float));
            offset += sizes[p];
        }
        meet(m, ranks);
        /* Slices end at cache lines: no line is written by two ranks. */
        size_t lines = (offset + 15) / 16 - begin / 16;
        size_t from = (begin / 16 + lines * rank / ranks) * 16;
        size_t to = (begin / 16 + lines * (rank + 1) / ranks) * 16;
        if (from < begin) from = begin;
        if (to > offset) to = offset;
        mean(parts, ranks, from, to);
    }
    meet(m, ranks);
    if (gradients && copy_back) {
        for (p = 0, offset = 0; p < ends[buckets - 1]; offset += sizes[p++])
            memcpy(gradients[p], parts[rank] + offset, sizes[p] * sizeof(float));
    }
}

/* The seconds that `steps` steps take, one after another. */
double limit_seconds(struct meeting *m, float *const *parts, unsigned ranks, unsigned rank,
                     float *const *gradients, const size_t *sizes, const size_t *ends,
                     size_t buckets, int copy_back, size_t steps)
{
    struct timespec began, ended;
    meet(m, ranks);
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (size_t i = 0; i < steps; i++)
        limit_step(m, parts, ranks, rank, gradients, sizes, ends, buckets, copy_back);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    return (double)(ended.tv_sec - began.tv_sec) + 1e-9 * (double)(ended.tv_nsec - began.tv_nsec);
}
