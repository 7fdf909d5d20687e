/* Loops over arrays of gradients: mean, and 16-bit <-> 32-bit floating point.
 *
 * Plain C that any compiler vectorises where the machine allows; no loop here
 * may reorder a sum or lose a NaN, so never compile this with -ffast-math.
 * Sums are divided, not multiplied by a reciprocal: the mean is then the
 * correctly rounded quotient, and equal operands give back their own bits.
 */
#ifndef MPIDDP_KERNELS_H
#define MPIDDP_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t mpiddp_float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float mpiddp_bits_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float mpiddp_bfloat16_to_float(uint16_t value)
{
    return mpiddp_bits_float((uint32_t)value << 16);
}

/* Round to nearest, ties to even; a NaN stays a (quiet) NaN. */
static inline uint16_t mpiddp_float_to_bfloat16(float value)
{
    uint32_t bits = mpiddp_float_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t nan = (bits >> 16) | 0x0040u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

/* The exponent is rebased by a multiplication, which is exact and makes normal
 * numbers of subnormal ones; exponent 31 (infinity, NaN) is then set by hand. */
static inline float mpiddp_float16_to_float(uint16_t value)
{
    uint32_t sign = (uint32_t)(value & 0x8000u) << 16;
    uint32_t magnitude = (uint32_t)(value & 0x7fffu) << 13;
    uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
    float rebased = mpiddp_bits_float(magnitude) * 0x1p112f;
    return mpiddp_bits_float(mpiddp_float_bits(rebased) | special | sign);
}

/* Round to nearest, ties to even; overflow gives infinity, a NaN stays a NaN. */
static inline uint16_t mpiddp_float_to_float16(float value)
{
    uint32_t bits = mpiddp_float_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude >= 0x47800000u) {            /* 65536 and more, infinity, NaN */
        half = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : 0x7c00u;
    } else if (magnitude < 0x38800000u) {      /* subnormal: let the FPU round it */
        half = mpiddp_float_bits(mpiddp_bits_float(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    }
    return (uint16_t)(half | sign);
}

static inline void mpiddp_mean_float32(
    float *restrict out, const float *restrict sum, size_t count, double divisor)
{
    const float n = (float)divisor;
    for (size_t i = 0; i < count; i++)
        out[i] = sum[i] / n;
}

static inline void mpiddp_mean_float64(
    double *restrict out, const double *restrict sum, size_t count, double divisor)
{
    for (size_t i = 0; i < count; i++)
        out[i] = sum[i] / divisor;
}

static inline void mpiddp_widen_float16(float *restrict out, const uint16_t *restrict in, size_t count)
{
    for (size_t i = 0; i < count; i++)
        out[i] = mpiddp_float16_to_float(in[i]);
}

static inline void mpiddp_widen_bfloat16(float *restrict out, const uint16_t *restrict in, size_t count)
{
    for (size_t i = 0; i < count; i++)
        out[i] = mpiddp_bfloat16_to_float(in[i]);
}

static inline void mpiddp_mean_to_float16(
    uint16_t *restrict out, const float *restrict sum, size_t count, double divisor)
{
    const float n = (float)divisor;
    for (size_t i = 0; i < count; i++)
        out[i] = mpiddp_float_to_float16(sum[i] / n);
}

static inline void mpiddp_mean_to_bfloat16(
    uint16_t *restrict out, const float *restrict sum, size_t count, double divisor)
{
    const float n = (float)divisor;
    for (size_t i = 0; i < count; i++)
        out[i] = mpiddp_float_to_bfloat16(sum[i] / n);
}

#endif
