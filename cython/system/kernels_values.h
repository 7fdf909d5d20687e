/* One value at a time: float16 and bfloat16 to float and back, double to float, sums that
 * overflowed.
 *
 * Where a value decides, both results are computed and one is masked out, so that
 * compilers turn loops over these into SIMD code on any machine. Widening is exact;
 * narrowing rounds to nearest, ties to even; overflow gives infinity; a NaN stays a
 * NaN. No subnormal float is ever an operand or a result of a float instruction here:
 * those are slow on some machines.
 */
#ifndef MPIDDP_KERNELS_VALUES_H
#define MPIDDP_KERNELS_VALUES_H

#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define MPIDDP_INLINE static inline __attribute__((always_inline))
#else
#define MPIDDP_INLINE static inline
#endif

MPIDDP_INLINE uint32_t mpiddp_float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

MPIDDP_INLINE float mpiddp_bits_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* `a` where the condition holds, else `b`. Not ?: because GCC makes that a branch when
 * a float instruction depends on it. */
MPIDDP_INLINE uint32_t mpiddp_select(int condition, uint32_t a, uint32_t b)
{
    uint32_t mask = -(uint32_t)(condition != 0);
    return (a & mask) | (b & ~mask);
}

MPIDDP_INLINE float mpiddp_bfloat16_to_float(uint16_t value)
{
    return mpiddp_bits_float((uint32_t)value << 16);
}

MPIDDP_INLINE uint16_t mpiddp_float_to_bfloat16(float value)
{
    uint32_t bits = mpiddp_float_bits(value);
    uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    uint32_t quiet = bits | 0x00400000u;
    return (uint16_t)(mpiddp_select(value != value, quiet, rounded) >> 16);
}

/* The exponent's bias is 15 in a float16 and 127 in a float. */
MPIDDP_INLINE float mpiddp_float16_to_float(uint16_t value)
{
    uint32_t sign = (uint32_t)(value & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)(value & 0x7fffu) << 13;
    uint32_t normal = magnitude + 0x38000000u;
    uint32_t special = magnitude | 0x7f800000u;         /* infinity, NaN */
    /* Subnormal: 2^-14 plus the fraction, minus 2^-14. */
    float fraction = mpiddp_bits_float((magnitude & 0x007fffffu) | 0x38800000u) - 0x1p-14f;
    uint32_t bits = mpiddp_select(magnitude < 0x00800000u, mpiddp_float_bits(fraction), normal);
    bits = mpiddp_select(magnitude >= 0x0f800000u, special, bits);
    return mpiddp_bits_float(bits | sign);
}

MPIDDP_INLINE uint16_t mpiddp_float_to_float16(float value)
{
    uint32_t bits = mpiddp_float_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    /* Subnormal: the last digit of 0.5f is worth 2^-24, like that of the result. A
     * subnormal float is too small to count. */
    uint32_t addend = mpiddp_select(magnitude >= 0x00800000u, magnitude, 0);
    uint32_t subnormal = mpiddp_float_bits(mpiddp_bits_float(addend) + 0.5f) - 0x3f000000u;
    uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    uint32_t half = mpiddp_select(magnitude < 0x38800000u, subnormal, normal);
    half = mpiddp_select(magnitude >= 0x47800000u, 0x7c00u, half);     /* 65536 and more */
    half = mpiddp_select(magnitude > 0x7f800000u, nan, half);
    return (uint16_t)(half | sign);
}

/* Rounded to odd: towards zero, and the last digit set where anything was lost. A
 * second rounding, to fewer digits, then gives what one rounding would have given. */
MPIDDP_INLINE float mpiddp_double_to_odd_float(double value)
{
    float nearest = (float)value;
    double back = (double)nearest;
    uint32_t bits = mpiddp_float_bits(nearest);
    int away = value < 0 ? back < value : back > value;
    int inexact = back != value;                        /* of a NaN too: it stays one */
    return mpiddp_bits_float((bits - (uint32_t)away) | (uint32_t)inexact);
}

/* Whether multiplying by the reciprocal gives the same bits as dividing, because it is
 * exact. Only of 1 and more, where the reciprocal is also the `mpiddp_scale`. */
MPIDDP_INLINE int mpiddp_is_power_of_two(double value)
{
    uint64_t bits;
    uint64_t exponent;
    memcpy(&bits, &value, sizeof bits);
    exponent = (bits >> 52) & 0x7ffu;
    /* Up to 126 its reciprocal is normal in a float as well. */
    return (bits & 0xfffffffffffffu) == 0 && exponent >= 1023 && exponent <= 1023 + 126;
}

/* Note [Sums that overflow]
 * A sum may be infinite, or NaN, where the mean is a number: 3e38 + 3e38 in float32. To
 * handle that, no bit of other means may change. So the plain sum is used where it is
 * finite; elsewhere, the sum of the same operands times `mpiddp_scale`. That is a power
 * of two and at most 1/divisor, so that the sum of `divisor` operands is finite. Scaling
 * costs subnormal operands their last digits, which do not matter beside operands
 * whose sum overflows. An operand that is infinite or NaN makes both sums so. */
MPIDDP_INLINE double mpiddp_scale(double divisor)
{
    double scale = 1;
    while (scale * divisor > 1)
        scale *= 0.5;
    return scale;
}

/* Bit 31, or 63, is set where a value is infinite or NaN. */
MPIDDP_INLINE uint32_t mpiddp_overflow_float(float value)
{
    return (mpiddp_float_bits(value) & 0x7f800000u) + 0x00800000u;
}

MPIDDP_INLINE uint64_t mpiddp_overflow_double(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits & 0x7ff0000000000000u) + 0x0010000000000000u;
}

/* The same for elements of 16 bits, with bit 15. */
MPIDDP_INLINE uint16_t mpiddp_special_float16(uint16_t value)
{
    return (uint16_t)((value & 0x7c00u) + 0x0400u);
}

MPIDDP_INLINE uint16_t mpiddp_special_bfloat16(uint16_t value)
{
    return (uint16_t)((value & 0x7f80u) + 0x0080u);
}

/* `v` where the sum is finite, else `w`. */
MPIDDP_INLINE float mpiddp_choose_float(float sum, float v, float w)
{
    return mpiddp_bits_float(mpiddp_select(
        (mpiddp_float_bits(sum) & 0x7f800000u) == 0x7f800000u,
        mpiddp_float_bits(w), mpiddp_float_bits(v)));
}

MPIDDP_INLINE double mpiddp_choose_double(double sum, double v, double w)
{
    uint64_t mask = -(mpiddp_overflow_double(sum) >> 63), v_bits, w_bits;
    memcpy(&v_bits, &v, sizeof v_bits);
    memcpy(&w_bits, &w, sizeof w_bits);
    v_bits = (w_bits & mask) | (v_bits & ~mask);
    memcpy(&v, &v_bits, sizeof v);
    return v;
}

#endif
