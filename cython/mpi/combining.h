/* Combine the numbers of two ranks, as MPI's own operations do, but a NaN is both the smallest and
 * the largest, as in torch.
 *
 * Note [The largest of a NaN and a number]
 * MPI's operations compare as C does: a NaN is neither larger nor smaller. So what comes out depends
 * on the order in which ranks are combined, and can differ between ranks. Here a NaN wins, and of
 * two zeros the positive one is the larger: all ranks get the same bits.
 */
#ifndef MPIDDP_COMBINING_H
#define MPIDDP_COMBINING_H

#include <complex.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>

/* Combines `count` numbers of another rank with those of this one. */
typedef void mpiddp_combine(const void *theirs, void *ours, long count);

#define MPIDDP_COMBINE(name, type, result)                                                        \
    static void name(const void *theirs, void *ours, long count)                                  \
    {                                                                                             \
        const type *restrict their = theirs;                                                      \
        type *restrict our = ours;                                                                \
        for (long i = 0; i < count; i++) {                                                        \
            type a = their[i], b = our[i];                                                        \
            our[i] = (type)(result);                                                              \
        }                                                                                         \
    }

#define MPIDDP_FLOAT(name, type)                                                                  \
    MPIDDP_COMBINE(mpiddp_sum_##name, type, a + b)                                                \
    MPIDDP_COMBINE(mpiddp_prod_##name, type, a *b)                                                \
    MPIDDP_COMBINE(mpiddp_max_##name, type,                                                       \
                   (a > b) | (a != a) | ((a == b) & !signbit(a)) ? a : b)                         \
    MPIDDP_COMBINE(mpiddp_min_##name, type,                                                       \
                   (a < b) | (a != a) | ((a == b) & (signbit(a) != 0)) ? a : b)

#define MPIDDP_COMPLEX(name, type)                                                                \
    MPIDDP_COMBINE(mpiddp_sum_##name, type, a + b)                                                \
    MPIDDP_COMBINE(mpiddp_prod_##name, type, a *b)

/* Sums and products wrap around, which C allows for unsigned numbers only. */
#define MPIDDP_INTEGER(name, type)                                                                \
    MPIDDP_COMBINE(mpiddp_sum_##name, type, (uint64_t)a + (uint64_t)b)                            \
    MPIDDP_COMBINE(mpiddp_prod_##name, type, (uint64_t)a *(uint64_t)b)                            \
    MPIDDP_COMBINE(mpiddp_max_##name, type, a > b ? a : b)                                        \
    MPIDDP_COMBINE(mpiddp_min_##name, type, a < b ? a : b)                                        \
    MPIDDP_COMBINE(mpiddp_band_##name, type, a &b)                                                \
    MPIDDP_COMBINE(mpiddp_bor_##name, type, a | b)                                                \
    MPIDDP_COMBINE(mpiddp_bxor_##name, type, a ^ b)

MPIDDP_FLOAT(float32, float)
MPIDDP_FLOAT(float64, double)
MPIDDP_COMPLEX(complex64, float _Complex)
MPIDDP_COMPLEX(complex128, double _Complex)
MPIDDP_INTEGER(int8, int8_t)
MPIDDP_INTEGER(int16, int16_t)
MPIDDP_INTEGER(int32, int32_t)
MPIDDP_INTEGER(int64, int64_t)
MPIDDP_INTEGER(uint8, uint8_t)
MPIDDP_INTEGER(uint16, uint16_t)
MPIDDP_INTEGER(uint32, uint32_t)
MPIDDP_INTEGER(uint64, uint64_t)
MPIDDP_COMBINE(mpiddp_land_bool, uint8_t, a && b)
MPIDDP_COMBINE(mpiddp_lor_bool, uint8_t, a || b)
MPIDDP_COMBINE(mpiddp_lxor_bool, uint8_t, !a != !b)

struct mpiddp_way {
    const char *operation, *dtype;
    int size;
    mpiddp_combine *combine;
};

#define MPIDDP_WAY(operation, dtype, type)                                                        \
    {#operation, #dtype, sizeof(type), mpiddp_##operation##_##dtype}
#define MPIDDP_WAYS_COMPLEX(dtype, type) MPIDDP_WAY(sum, dtype, type), MPIDDP_WAY(prod, dtype, type)
#define MPIDDP_WAYS_FLOAT(dtype, type)                                                            \
    MPIDDP_WAYS_COMPLEX(dtype, type), MPIDDP_WAY(max, dtype, type), MPIDDP_WAY(min, dtype, type)
#define MPIDDP_WAYS_INTEGER(dtype, type)                                                          \
    MPIDDP_WAYS_FLOAT(dtype, type), MPIDDP_WAY(band, dtype, type), MPIDDP_WAY(bor, dtype, type),  \
        MPIDDP_WAY(bxor, dtype, type)

/* All that there are, by names of operation and dtype. */
static const struct mpiddp_way mpiddp_ways[] = {
    MPIDDP_WAYS_FLOAT(float32, float),
    MPIDDP_WAYS_FLOAT(float64, double),
    MPIDDP_WAYS_COMPLEX(complex64, float _Complex),
    MPIDDP_WAYS_COMPLEX(complex128, double _Complex),
    MPIDDP_WAYS_INTEGER(int8, int8_t),
    MPIDDP_WAYS_INTEGER(int16, int16_t),
    MPIDDP_WAYS_INTEGER(int32, int32_t),
    MPIDDP_WAYS_INTEGER(int64, int64_t),
    MPIDDP_WAYS_INTEGER(uint8, uint8_t),
    MPIDDP_WAYS_INTEGER(uint16, uint16_t),
    MPIDDP_WAYS_INTEGER(uint32, uint32_t),
    MPIDDP_WAYS_INTEGER(uint64, uint64_t),
    MPIDDP_WAY(land, bool, uint8_t),
    MPIDDP_WAY(lor, bool, uint8_t),
    MPIDDP_WAY(lxor, bool, uint8_t),
};
enum { MPIDDP_WAYS = sizeof mpiddp_ways / sizeof *mpiddp_ways };

#endif
