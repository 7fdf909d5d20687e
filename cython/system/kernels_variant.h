/* Template: all operations for one machine, as a struct mpiddp_kernels. No include guard.
 *
 * kernels.h includes this once for each machine, with these defined:
 *   VARIANT      its name
 *   TARGET       the attribute that lets a function use its instructions
 *   FLOAT16_...  and BFLOAT16_..., as kernels_loops.h describes them, where the machine
 *                has instructions that compilers do not find by themselves
 */
#define JOIN_(a, b, c) mpiddp_##a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define NAME(operation) JOIN(operation, ELEMENT_NAME, VARIANT)

#define ELEMENT_NAME float32
#define ELEMENT float
#define ELEMENT_BITS uint32_t
#define SPECIAL(e) mpiddp_overflow_float(e)
#define SUM float
#define OVERFLOWS 1
#define BITS uint32_t
#define OVERFLOW(sum) mpiddp_overflow_float(sum)
#define CHOOSE_SUM(s, v, w) mpiddp_choose_float(s, v, w)
#include "kernels_loops.h"

#define ELEMENT_NAME float64
#define ELEMENT double
#define ELEMENT_BITS uint64_t
#define SPECIAL(e) mpiddp_overflow_double(e)
#define SUM double
#define OVERFLOWS 1
#define BITS uint64_t
#define OVERFLOW(sum) mpiddp_overflow_double(sum)
#define CHOOSE_SUM(s, v, w) mpiddp_choose_double(s, v, w)
#include "kernels_loops.h"

#define ELEMENT_NAME float16
#define ELEMENT uint16_t
#define ELEMENT_BITS uint16_t
#define SPECIAL(e) mpiddp_special_float16(e)
#define SUM float
/* The largest float16 is 65504. */
#define OVERFLOWS 0
#ifdef FLOAT16_VECTOR
#define VECTOR FLOAT16_VECTOR
#define LANES FLOAT16_LANES
#define LOAD(p) FLOAT16_LOAD(p)
#define STORE(p, v) FLOAT16_STORE(p, v)
#define LOAD_SUM(p) FLOAT16_LOAD_SUM(p)
#define STORE_SUM(p, v) FLOAT16_STORE_SUM(p, v)
#define ADD(v, w) FLOAT16_ADD(v, w)
#define MULTIPLY(v, sum) FLOAT16_MULTIPLY(v, sum)
#define DIVIDE(v, sum) FLOAT16_DIVIDE(v, sum)
#else
#define LOAD(p) mpiddp_float16_to_float(*(p))
#define STORE(p, v) (*(p) = mpiddp_float_to_float16(v))
#endif
#include "kernels_loops.h"

#define ELEMENT_NAME bfloat16
#define ELEMENT uint16_t
#define ELEMENT_BITS uint16_t
#define SPECIAL(e) mpiddp_special_bfloat16(e)
#define SUM float
#define OVERFLOWS 1
#define BITS uint32_t
#define OVERFLOW(sum) mpiddp_overflow_float(sum)
#define CHOOSE_SUM(s, v, w) mpiddp_choose_float(s, v, w)
#ifdef BFLOAT16_VECTOR
#define VECTOR BFLOAT16_VECTOR
#define LANES BFLOAT16_LANES
#define LOAD(p) BFLOAT16_LOAD(p)
#define STORE(p, v) BFLOAT16_STORE(p, v)
#define LOAD_SUM(p) BFLOAT16_LOAD_SUM(p)
#define STORE_SUM(p, v) BFLOAT16_STORE_SUM(p, v)
#define ADD(v, w) BFLOAT16_ADD(v, w)
#define MULTIPLY(v, sum) BFLOAT16_MULTIPLY(v, sum)
#define DIVIDE(v, sum) BFLOAT16_DIVIDE(v, sum)
#define SPREAD(sum) BFLOAT16_SPREAD(sum)
#define DIVIDE_EACH(v, w) BFLOAT16_DIVIDE_EACH(v, w)
#define CHOOSE(s, v, w) BFLOAT16_CHOOSE(s, v, w)
#else
#define LOAD(p) mpiddp_bfloat16_to_float(*(p))
#define STORE(p, v) (*(p) = mpiddp_float_to_bfloat16(v))
#endif
#include "kernels_loops.h"

#undef NAME
#define NAME(operation, element) JOIN(operation, element, VARIANT)

static TARGET void NAME(mean_in, place)(
    int element, char *const *buffers, size_t ranks, size_t first, size_t count, double divisor)
{
    const mpiddp_float_state before = mpiddp_set_float_state();
    if (element == MPIDDP_FLOAT32)
        NAME(mean_in_place, float32)(buffers, ranks, first, count, divisor);
    else if (element == MPIDDP_FLOAT64)
        NAME(mean_in_place, float64)(buffers, ranks, first, count, divisor);
    else if (element == MPIDDP_FLOAT16)
        NAME(mean_in_place, float16)(buffers, ranks, first, count, divisor);
    else
        NAME(mean_in_place, bfloat16)(buffers, ranks, first, count, divisor);
    mpiddp_reset_float_state(before);
}

static TARGET void NAME(sum, to)(
    int element, void *out, char *const *buffers, size_t ranks, size_t first, size_t count)
{
    const mpiddp_float_state before = mpiddp_set_float_state();
    if (element == MPIDDP_FLOAT32)
        NAME(sum_to, float32)((float *)out, buffers, ranks, first, count);
    else if (element == MPIDDP_FLOAT64)
        NAME(sum_to, float64)((double *)out, buffers, ranks, first, count);
    else if (element == MPIDDP_FLOAT16)
        NAME(sum_to, float16)((float *)out, buffers, ranks, first, count);
    else
        NAME(sum_to, bfloat16)((float *)out, buffers, ranks, first, count);
    mpiddp_reset_float_state(before);
}

static TARGET size_t NAME(spread, mean)(
    int element, char *const *buffers, size_t ranks, size_t first, size_t count,
    const void *sum, double divisor)
{
    const mpiddp_float_state before = mpiddp_set_float_state();
    if (element == MPIDDP_FLOAT32)
        count = NAME(spread_finite_mean, float32)(
            buffers, ranks, first, count, (const float *)sum, divisor);
    else if (element == MPIDDP_FLOAT64)
        count = NAME(spread_finite_mean, float64)(
            buffers, ranks, first, count, (const double *)sum, divisor);
    else if (element == MPIDDP_FLOAT16)
        NAME(spread_mean, float16)(buffers, ranks, first, count, (const float *)sum, divisor);
    else
        count = NAME(spread_finite_mean, bfloat16)(
            buffers, ranks, first, count, (const float *)sum, divisor);
    mpiddp_reset_float_state(before);
    return count;
}

static TARGET void NAME(scaled_sum, to)(
    int element, void *out, char *const *buffers, size_t ranks, size_t first, size_t count,
    double divisor)
{
    const mpiddp_float_state before = mpiddp_set_float_state();
    if (element == MPIDDP_FLOAT32)
        NAME(scaled_sum_to, float32)((float *)out, buffers, ranks, first, count, divisor);
    else if (element == MPIDDP_FLOAT64)
        NAME(scaled_sum_to, float64)((double *)out, buffers, ranks, first, count, divisor);
    else if (element == MPIDDP_FLOAT16)
        NAME(sum_to, float16)((float *)out, buffers, ranks, first, count);
    else
        NAME(scaled_sum_to, bfloat16)((float *)out, buffers, ranks, first, count, divisor);
    mpiddp_reset_float_state(before);
}

static TARGET void NAME(spread_scaled, mean)(
    int element, char *const *buffers, size_t ranks, size_t first, size_t count,
    const void *sum, const void *scaled, double divisor)
{
    const mpiddp_float_state before = mpiddp_set_float_state();
    if (element == MPIDDP_FLOAT32)
        NAME(spread_scaled_mean, float32)(
            buffers, ranks, first, count, (const float *)sum, (const float *)scaled, divisor);
    else if (element == MPIDDP_FLOAT64)
        NAME(spread_scaled_mean, float64)(
            buffers, ranks, first, count, (const double *)sum, (const double *)scaled, divisor);
    else if (element == MPIDDP_FLOAT16)
        NAME(spread_mean, float16)(buffers, ranks, first, count, (const float *)sum, divisor);
    else
        NAME(spread_scaled_mean, bfloat16)(
            buffers, ranks, first, count, (const float *)sum, (const float *)scaled, divisor);
    mpiddp_reset_float_state(before);
}

static TARGET void NAME(mean, to)(
    int element, void *out, char *const *buffers, size_t ranks, size_t first, size_t count,
    double divisor)
{
    const mpiddp_float_state before = mpiddp_set_float_state();
    if (element == MPIDDP_FLOAT32)
        NAME(mean_to, float32)((float *)out, buffers, ranks, first, count, divisor);
    else if (element == MPIDDP_FLOAT64)
        NAME(mean_to, float64)((double *)out, buffers, ranks, first, count, divisor);
    else if (element == MPIDDP_FLOAT16)
        NAME(mean_to, float16)((uint16_t *)out, buffers, ranks, first, count, divisor);
    else
        NAME(mean_to, bfloat16)((uint16_t *)out, buffers, ranks, first, count, divisor);
    mpiddp_reset_float_state(before);
}

static TARGET void NAME(scaled_sum_as, element)(
    int element, void *out, char *const *buffers, size_t ranks, size_t first, size_t count,
    double divisor)
{
    const mpiddp_float_state before = mpiddp_set_float_state();
    if (element == MPIDDP_FLOAT32)
        NAME(scaled_sum_as_element, float32)((float *)out, buffers, ranks, first, count, divisor);
    else if (element == MPIDDP_FLOAT64)
        NAME(scaled_sum_as_element, float64)((double *)out, buffers, ranks, first, count, divisor);
    else if (element == MPIDDP_FLOAT16)
        NAME(scaled_sum_as_element, float16)(
            (uint16_t *)out, buffers, ranks, first, count, divisor);
    else
        NAME(scaled_sum_as_element, bfloat16)(
            (uint16_t *)out, buffers, ranks, first, count, divisor);
    mpiddp_reset_float_state(before);
}

static TARGET int NAME(are, finite)(int element, const void *array, size_t count)
{
    if (element == MPIDDP_FLOAT32)
        return NAME(are_finite, float32)((const float *)array, count);
    if (element == MPIDDP_FLOAT64)
        return NAME(are_finite, float64)((const double *)array, count);
    if (element == MPIDDP_FLOAT16)
        return NAME(are_finite, float16)((const uint16_t *)array, count);
    return NAME(are_finite, bfloat16)((const uint16_t *)array, count);
}

static TARGET void NAME(replace, special)(
    int element, void *array, const void *other, size_t count)
{
    if (element == MPIDDP_FLOAT32)
        NAME(replace_special, float32)((float *)array, (const float *)other, count);
    else if (element == MPIDDP_FLOAT64)
        NAME(replace_special, float64)((double *)array, (const double *)other, count);
    else if (element == MPIDDP_FLOAT16)
        NAME(replace_special, float16)((uint16_t *)array, (const uint16_t *)other, count);
    else
        NAME(replace_special, bfloat16)((uint16_t *)array, (const uint16_t *)other, count);
}

static MPIDDP_NOINLINE TARGET void NAME(double_to, float)(
    float *restrict out, const double *restrict in, size_t count)
{
    for (size_t i = 0; i < count; i++)
        out[i] = (float)in[i];
}

static MPIDDP_NOINLINE TARGET void NAME(double_to_odd, float)(
    float *restrict out, const double *restrict in, size_t count)
{
    for (size_t i = 0; i < count; i++)
        out[i] = mpiddp_double_to_odd_float(in[i]);
}

static MPIDDP_NOINLINE TARGET void NAME(float_to, double)(
    double *restrict out, const float *restrict in, size_t count)
{
    for (size_t i = 0; i < count; i++)
        out[i] = (double)in[i];
}

/* Every type becomes float on the way, in blocks that stay in the cache. From double
 * to 16 bits that float is rounded to odd, so that the result is rounded once. */
static TARGET void NAME(convert, any)(
    int to, int from, void *out, const void *in, size_t count)
{
    const mpiddp_float_state before = mpiddp_set_float_state();
    const size_t to_bytes = mpiddp_element_bytes(to), from_bytes = mpiddp_element_bytes(from);
    float block[MPIDDP_BLOCK];
    size_t done, n;
    if (to == from)
        memcpy(out, in, count * to_bytes);
    for (done = to == from ? count : 0; done < count; done += n) {
        char *target = (char *)out + done * to_bytes;
        char *source = (char *)in + done * from_bytes;
        float *wide = to == MPIDDP_FLOAT32 ? (float *)target : block;
        n = count - done < MPIDDP_BLOCK ? count - done : MPIDDP_BLOCK;
        if (from == MPIDDP_FLOAT32)
            wide = (float *)source;
        else if (from == MPIDDP_FLOAT16)
            NAME(sum_to, float16)(wide, &source, 1, 0, n);
        else if (from == MPIDDP_BFLOAT16)
            NAME(sum_to, bfloat16)(wide, &source, 1, 0, n);
        else if (to == MPIDDP_FLOAT32)
            NAME(double_to, float)(wide, (const double *)source, n);
        else
            NAME(double_to_odd, float)(wide, (const double *)source, n);
        if (to == MPIDDP_FLOAT64)
            NAME(float_to, double)((double *)target, wide, n);
        else if (to == MPIDDP_FLOAT16)
            NAME(spread_mean, float16)(&target, 1, 0, n, wide, 1);
        else if (to == MPIDDP_BFLOAT16)
            NAME(spread_mean, bfloat16)(&target, 1, 0, n, wide, 1);
    }
    mpiddp_reset_float_state(before);
}

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

static const struct mpiddp_kernels JOIN(kernels, of, VARIANT) = {
    TEXT(VARIANT),
    NAME(mean_in, place),
    NAME(sum, to),
    NAME(spread, mean),
    NAME(scaled_sum, to),
    NAME(spread_scaled, mean),
    NAME(mean, to),
    NAME(scaled_sum_as, element),
    NAME(are, finite),
    NAME(replace, special),
    NAME(convert, any),
};

#undef TEXT
#undef TEXT_
#undef NAME
#undef JOIN
#undef JOIN_
#undef VARIANT
#undef TARGET
#undef FLOAT16_VECTOR
#undef FLOAT16_LANES
#undef FLOAT16_LOAD
#undef FLOAT16_STORE
#undef FLOAT16_LOAD_SUM
#undef FLOAT16_STORE_SUM
#undef FLOAT16_ADD
#undef FLOAT16_MULTIPLY
#undef FLOAT16_DIVIDE
#undef BFLOAT16_VECTOR
#undef BFLOAT16_LANES
#undef BFLOAT16_LOAD
#undef BFLOAT16_STORE
#undef BFLOAT16_LOAD_SUM
#undef BFLOAT16_STORE_SUM
#undef BFLOAT16_ADD
#undef BFLOAT16_MULTIPLY
#undef BFLOAT16_DIVIDE
#undef BFLOAT16_SPREAD
#undef BFLOAT16_DIVIDE_EACH
#undef BFLOAT16_CHOOSE
